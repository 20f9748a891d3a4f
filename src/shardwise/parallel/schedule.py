"""Schedules of pipelines: what each rank computes, in which order.  Pure data: lowering adds everything else.

A model is cut into ``stages``; each rank of the axis ``pp`` has ``stages_per_rank`` of them.  A schedule emits the tasks of every rank:
F (forward), B (backward), or B in two parts: I (gradients of the stage's inputs) and W (gradients of its weights).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Task(NamedTuple):
    """``kind`` F, B, I or W, of a stage (0 is the first of the model) and a microbatch."""

    kind: str
    stage: int
    microbatch: int


Timetable = tuple[tuple[Task, ...], ...]
"""The tasks of each rank of a pipeline, in its order."""


def one_stage(microbatches: int) -> Iterator[tuple[str, int]]:
    """1F1B of a single stage is gradient accumulation: one microbatch's activations live at a time.

    ::

        F0 B0 F1 B1 F2 B2
    """
    for m in range(microbatches):
        yield "F", m
        yield "B", m
