"""This module has the traits of each pipeline schedule.  Other modules ask for a trait and never compare names.

The order in which the ranks compute under a schedule is in ``parallel/schedule.py``, the versions of the weights in
``parallel/versions.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Weights = Literal["newest", "stashed", "double-buffered"]
"""This says which weights a microbatch uses.

Under "newest" these include all updates so far, because the pipeline is empty when weights are updated.  Under
"stashed" each stage updates by itself after every microbatch, and keeps the old versions with which the microbatches
under way have begun.  Under "double-buffered" all stages update after every batch, and the next batch still uses the
version before, so that two versions are kept.
"""


@dataclass(frozen=True, slots=True)
class Schedule:
    """These are the traits of the schedule called ``name``.

    ``stages_per_rank`` is the number of stages that each rank has, or the least number if ``more_stages`` are allowed.
    At most ``max_microbatches`` microbatches (None: any number) and at least ``min_microbatches_per_rank`` per rank are
    legal.  Stages go round over the ranks, or down and up again if ``v_shaped``.  ``splits`` says that backward is
    split into I and W; under ``dualpipe-v`` some backwards are whole.
    """

    name: str
    stages_per_rank: int = 1
    more_stages: bool = False
    max_microbatches: int | None = None
    min_microbatches_per_rank: int = 0
    v_shaped: bool = False
    splits: bool = False
    weights: Weights = "newest"

    def takes(self, stages_per_rank: int) -> bool:
        """Return whether this number of stages per rank is legal."""
        return stages_per_rank == self.stages_per_rank or (self.more_stages and stages_per_rank > self.stages_per_rank)

    @property
    def asynchronous(self) -> bool:
        """Return whether weights are updated while microbatches of other batches are in the pipeline."""
        return self.weights != "newest"

    @property
    def stages_alone(self) -> bool:
        """Return whether each stage updates its weights by itself, without waiting for the others."""
        return self.weights == "stashed"

    @property
    def double_buffered(self) -> bool:
        """Return whether the next batch still uses the weights from before a batch's update, as 2BW does."""
        return self.weights == "double-buffered"


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("naive", max_microbatches=1),
        Schedule("gpipe"),
        Schedule("1f1b"),
        Schedule("interleaved", stages_per_rank=2, more_stages=True),
        Schedule("zb-h1", splits=True),
        Schedule("zb-h2", splits=True),
        Schedule("zbv", stages_per_rank=2, v_shaped=True, splits=True),
        Schedule("dualpipe-v", stages_per_rank=2, v_shaped=True, splits=True),
        Schedule("pipedream", weights="stashed"),
        # With fewer microbatches in a batch than ranks, three batches would be in the pipeline at once.
        Schedule("pipedream-2bw", min_microbatches_per_rank=1, weights="double-buffered"),
    )
}
"""These schedules have an order of their own; the keys are their names."""

AUTO = "auto"
"""The timetable of this schedule is part of the plan: it was found for measured times (``estimate/search.py``), or the
user wrote it."""


def traits(name: str) -> Schedule:
    """Return the traits of the schedule of that name; :data:`AUTO` is synchronous, and its timetable says the rest."""
    return Schedule(AUTO) if name == AUTO else SCHEDULES[name]
