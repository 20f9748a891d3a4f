"""Tell the parent process how a rank ended: each rank writes its error into a file of its own, so that the first cause
can be told from its consequences.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.core.errors import ShardwiseError, users_lines
from shardwise.report.files import logs, write_whole
from shardwise.runtime.call import CommunicationError
from shardwise.runtime.progress import record_path

MONITOR = "monitor"  # a folder in that of the run: the records of its ranks
RANKS_LOCK = ".ranks"  # a file in the run's folder: each rank holds a shared lock on it until it ends

Kind = Literal["config", "shardwise", "non-finite", "overflow", "communication", "other"]


def log_path(run_dir: Path, rank: int) -> Path:
    """Return the path of the log that gets everything rank ``rank`` prints."""
    return logs(run_dir) / f"rank_{rank}.log"


@dataclass(frozen=True)
class RankError:
    """This records the exception that ended a rank at ``time``, in seconds since the epoch.

    ``message`` is for people, ``place`` says what the rank was doing, and ``lines`` show the user's code that raised
    the exception, if any did.
    """

    rank: int
    time: float
    kind: Kind
    message: str
    place: str
    lines: Sequence[str] = ()

    @staticmethod
    def of(rank: int, error: BaseException, place: str, message: str) -> RankError:
        """Return the record of ``error``, made now."""
        kind: Any = "other"
        if isinstance(error, CommunicationError) or type(error).__name__ in ("DistNetworkError", "DistStoreError"):
            kind = "communication"
        elif isinstance(error, ShardwiseError):
            kind = error.cause
        return RankError(rank, time.time(), kind, message, place, users_lines(error) if kind == "other" else ())

    def save(self, run_dir: Path) -> None:
        """Write the record atomically to where :func:`read_errors` looks; a rank's first error stays."""
        path = record_path(run_dir, self.rank).with_suffix(".error")
        if path.exists():
            return
        write_whole(path, json.dumps(asdict(self)))


def read_errors(run_dir: Path) -> list[RankError]:
    """Return the errors of all ranks, the earliest first."""
    found = [
        RankError(**json.loads(path.read_text(encoding="utf-8"))) for path in (run_dir / MONITOR).glob("rank_*.error")
    ]
    return sorted(found, key=lambda error: (error.time, error.rank))


def error_of(run_dir: Path, rank: int) -> RankError | None:
    """Return the error of one rank, or None."""
    return next((error for error in read_errors(run_dir) if error.rank == rank), None)


def first_cause(errors: Iterable[RankError]) -> RankError | None:
    """Return the earliest error that is not just a consequence of another rank's end, or None."""
    return next((error for error in errors if error.kind != "communication"), None)
