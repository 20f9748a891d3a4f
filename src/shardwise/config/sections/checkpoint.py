"""The keys of the section ``[checkpoint]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.metrics import Goal

from ..rules import choice, integer, key, text


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
    best: str | None = key(
        text("the name of a metric"),
        does="the checkpoint of the evaluation with the best value of this metric is saved and kept too",
        otherwise="none",
        legal='`"validation_loss"`, or the name of a metric of `validation.metrics`',
    )
    goal: Goal | None = key(
        choice("max", "min"),
        does="whether more or less of `best` is better",
        otherwise='`"min"` for `"validation_loss"` and `"perplexity"`, else `"max"`',
    )
    staging_mib: int | None = key(
        integer(1),
        does="the most MiB of a rank's memory for copies on their way to disk",
        otherwise="as much as the rank saves",
    )
