"""Begin a run in a folder with files of an earlier one, which stay as they are until the new run's first step has
worked.

Until then the new run writes into ``starting`` (:func:`stage`); :func:`settle` then moves the earlier run aside, or
cuts its records down to the checkpoint that the new run goes on from, and moves up what the start has written.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shardwise.report.files import (
    BEST,
    CONFIG,
    EVALUATIONS,
    LOGS,
    MEMORY,
    METRICS,
    PLAN,
    RESULT,
    SAMPLE,
    SAMPLES,
    SCHEDULE,
    STARTING,
    WEIGHTS,
    begins_anew,
)

from .folder import CHECKPOINTS, keep_lines
from .monitor import MONITOR, RANKS_LOCK

EARLIER = "earlier"
KEPT = (METRICS, WEIGHTS)  # worth keeping even without a checkpoint
STALE = (BEST, SAMPLE, SAMPLES, EVALUATIONS, METRICS, MEMORY, SCHEDULE, PLAN, RESULT)
OURS = (".lock", RANKS_LOCK, MONITOR, STARTING)  # of whichever run is under way


def stage(run_dir: Path, config: str, *, anew: bool) -> None:
    """Write ``config``, as TOML, for the ranks: into ``starting`` if an earlier run has left anything in the folder.

    ``anew`` says that the run does not go on with that run: then its logs, too, are apart until its first step.
    """
    start = run_dir / STARTING
    shutil.rmtree(start, ignore_errors=True)  # of a start that failed
    if _earlier(run_dir):
        (start / LOGS if anew else start).mkdir(parents=True)
    else:
        start = run_dir
    (start / CONFIG).write_text(config, encoding="utf-8")


def settle(run_dir: Path, first: int) -> list[str]:
    """Make the folder that of the run that has begun with step ``first``; return what there is to tell the user.

    It is called by one rank, while the others wait.
    """
    start, told = run_dir / STARTING, list[str]()
    if begins_anew(run_dir):
        if _worth_keeping(run_dir):
            told.append(f"the earlier run is now in {_set_aside(run_dir)}")
        else:
            shutil.rmtree(run_dir / LOGS, ignore_errors=True)
            for name in STALE:
                (run_dir / name).unlink(missing_ok=True)
    else:
        keep_lines(run_dir / METRICS, first)
        for name in (EVALUATIONS, SAMPLES):  # of the weights after a step; metrics count from 0
            keep_lines(run_dir / name, first + 1)
        (run_dir / RESULT).unlink(missing_ok=True)
    if start.is_dir():
        for entry in sorted(start.iterdir(), key=lambda one: one.name == LOGS):
            os.replace(entry, run_dir / entry.name)
        start.rmdir()
    return told


def begun(run_dir: Path) -> bool:
    """Return whether the first step of the run that was staged in a folder has worked."""
    return not (run_dir / STARTING).exists() and (run_dir / METRICS).exists()


def _earlier(run_dir: Path) -> list[Path]:
    """Return what an earlier run has left in the folder; its logs alone do not count."""
    names = (entry for entry in sorted(run_dir.iterdir()) if not entry.name.startswith(f"{EARLIER}-"))
    found = [entry for entry in names if entry.name not in OURS]
    return found if any(entry.name != LOGS for entry in found) else []


def _worth_keeping(run_dir: Path) -> bool:
    has_lines = any((run_dir / name).exists() and (run_dir / name).stat().st_size for name in KEPT)
    saved = (run_dir / CHECKPOINTS).is_dir() and any((run_dir / CHECKPOINTS).iterdir())
    return has_lines or saved or (run_dir / RESULT).exists()


def _set_aside(run_dir: Path) -> Path:
    """Move what a run left into the first free ``FOLDER-N``, or ``FOLDER/earlier-N`` if the folder is a mount point."""
    run_dir = run_dir.resolve()
    own = run_dir.stat().st_dev == run_dir.parent.stat().st_dev
    base = run_dir if own and run_dir.name else run_dir / EARLIER
    number = 1
    while (aside := base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    aside.mkdir()
    for entry in _earlier(run_dir):
        os.rename(entry, aside / entry.name)
    return aside
