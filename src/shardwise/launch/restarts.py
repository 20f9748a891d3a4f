"""Continue a run after the loss of a rank: all ranks start again from the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from shardwise.checkpoint.reader import latest
from shardwise.report.files import begins_anew, logs

from .folder import CHECKPOINTS
from .local import RunFailed

CAUSES = ("lost", "hang", "communication")  # a rank's own exception would happen again


def run_with_restarts(start: Callable[[], bool], run_dir: Path, limit: int, say: Callable[[str], object]) -> bool:
    """Call ``start``, which runs all ranks to their end, and again whenever a rank was lost or hung.

    Return what ``start`` returns: whether the ranks were asked to stop.  Raise the last :class:`RunFailed` after
    ``limit`` restarts in a row without a new checkpoint, and at once where starting again would not help (an error in
    the model, the data or the configuration), or if the ranks had been asked to stop.
    """
    log = partial(_log, run_dir)
    in_a_row, before = 0, _last(run_dir)
    while True:
        began = time.monotonic()
        log("starting the ranks")
        try:
            asked = start()
            log(f"the ranks ended after {time.monotonic() - began:.1f} s{', as they were asked to' if asked else ''}")
            return asked
        except RunFailed as failure:
            last = _last(run_dir)
            in_a_row = in_a_row + 1 if last == before else 1
            before = last
            for line in (str(failure), *failure.details):
                log(line)
            log(f"all ranks had ended {time.monotonic() - failure.began:.1f} s after the first sign of it")
            if failure.cause not in CAUSES or failure.asked or in_a_row > limit:
                raise
            place = f"from {last.name}" if last is not None else "from the beginning"
            say(f"{failure}; starting again {place} (restart {in_a_row} of {limit})")
            log(f"starting again {place} (restart {in_a_row} of {limit})")


def _log(run_dir: Path, text: str) -> None:
    """Append a line with its time to ``launcher.log``; a full disk does not end the run."""
    with suppress(OSError), (logs(run_dir) / "launcher.log").open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def _last(run_dir: Path) -> Path | None:
    return None if begins_anew(run_dir) else latest(run_dir / CHECKPOINTS)
