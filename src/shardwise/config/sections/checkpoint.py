"""The keys of the section ``[checkpoint]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from dataclasses import dataclass

from ..rules import (
    integer,
    key,
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig:
    """``[checkpoint]``: when checkpoints are written, and which are kept."""

    every: int = key(
        integer(0),
        does="the number of steps from one checkpoint to the next; 0: only at the end and when interrupted",
        otherwise="a fifth of `train.steps`",
    )
    keep_last: int = key(
        integer(1),
        2,
        does="the number of latest checkpoints that are kept",
    )
    keep_every: int | None = key(
        integer(1),
        does="checkpoints whose step is a multiple of this are kept too",
        otherwise="none",
    )
    staging_mib: int | None = key(
        integer(1),
        does="the most MiB of a rank's memory for copies on their way to disk",
        otherwise="as much as the rank saves",
    )
