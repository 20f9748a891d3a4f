"""Set up what surrounds a rank that shardwise started: its log, its progress record, and how it ends.

``python -m shardwise.launch.rank RUN_DIR SCRIPT [ARGUMENTS]`` runs a user's script as one rank.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shardwise.core.errors import ShardwiseError, describe
from shardwise.runtime.progress import RUN_DIR, Progress, read_record, record_path

from .copies import Copies
from .monitor import RANKS_LOCK, RankError, log_path
from .watch import STACK_SIGNAL, stack_path

FOLLOW_DELAY = 0.5  # seconds that a rank that lost its peers waits, so that the first to fail can report its error
PARENT_CHECK = 1.0  # seconds between two looks at whether the parent is alive


@contextmanager
def rank_process(run_dir: Path) -> Iterator[Progress]:
    """Make this process a rank of the run: it prints to its log, records its progress, and writes its error for the
    parent.

    An error ends the process with code 1, an interruption with 130 or 143.
    """
    rank = int(os.environ["RANK"])
    lock = (run_dir / RANKS_LOCK).open("w")  # held to the end of the process
    fcntl.flock(lock, fcntl.LOCK_SH)
    _redirect(log_path(run_dir, rank))
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), name="shardwise-parent", daemon=True).start()
    signal.signal(signal.SIGTERM, _terminated)
    progress = Progress(record_path(run_dir, rank))
    stack = stack_path(run_dir, rank).open("ab")  # stays open: faulthandler writes to its file descriptor
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    try:
        yield progress
    except (KeyboardInterrupt, SystemExit) as stop:
        code = 130 if isinstance(stop, KeyboardInterrupt) else stop.code
        if code not in (None, 0):
            print(f"rank {rank} stops: {'exit code ' if isinstance(code, int) else ''}{code}", flush=True)
            end_now(code if isinstance(code, int) else 1)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent has to know
        _fail(run_dir, rank, error, progress)
    progress.finish()
    lock.close()


def message_of(error: BaseException) -> str:
    """Return an error as text for people; errors that are not shardwise's get their type and where they were raised."""
    return str(error) if isinstance(error, ShardwiseError) else describe(error)


def _fail(run_dir: Path, rank: int, error: BaseException, progress: Progress) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent sends SIGTERM as soon as another rank has ended
    with suppress(OSError):  # a full disk
        traceback.print_exc()
    if record_error(run_dir, rank, progress, error).kind == "communication":
        time.sleep(FOLLOW_DELAY)
    end_now(1)


def record_error(run_dir: Path, rank: int, progress: Progress, error: BaseException) -> RankError:
    """Tell the parent which error ends this rank; an error that was told before stays, with its time."""
    record = read_record(run_dir, rank)
    found = RankError.of(rank, error, record.whereabouts if record else "", message_of(error))
    try:
        found.save(run_dir)
    except OSError:  # a full disk: the record has room for the message
        progress.notify(found.message)
    return found


def end_now(code: int) -> NoReturn:
    """End the process at once: threads and communicators that wait for lost peers would keep it alive."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _redirect(path: Path) -> None:
    """Send all output of this process and of its children to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _leave_with_parent(parent: int) -> None:
    """End this rank once its launcher is gone, since nobody would watch over it any more."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK)
    print("the launcher is gone", file=sys.stderr, flush=True)
    os._exit(1)


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


def stop_on(numbers: Sequence[signal.Signals], then: Any) -> Callable[[], bool]:
    """Only note the first of these signals, and let ``then`` handle further ones; the result tells if one has come."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for each in numbers:
            signal.signal(each, then)

    for each in numbers:
        signal.signal(each, ask)
    return lambda: bool(asked)


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGUMENTS`` would."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Run the script on this module's command line as one rank."""
    run_dir, script, *arguments = sys.argv[1:]
    with rank_process(Path(run_dir)) as progress:
        progress.phase(f"running {script}")
        os.environ[RUN_DIR] = run_dir  # tells a Trainer in the script where its record is
        copies = Copies()
        try:
            run_script(script, arguments)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        copies.check(script)


if __name__ == "__main__":
    main()
