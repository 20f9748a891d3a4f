"""What each schedule of a pipeline is like.  Whoever has to know asks for a trait here, and never compares names.

The order in which the ranks compute under a schedule is in ``parallel/schedule.py``, the versions of the weights in
``parallel/versions.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Weights = Literal["newest", "stashed", "double-buffered"]
"""Which weights a microbatch uses.

"newest": those of all updates so far, for the pipeline is empty when weights are updated.  "stashed": each stage
updates by itself after every microbatch, and keeps the old versions with which the microbatches under way have begun.
"double-buffered": all stages update after every batch, and the next batch still uses the version before, so that two
versions are kept.
"""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The traits of the schedule called ``name``.

    ``stages_per_rank`` is the number of stages that each rank has, or the least number under ``more_stages``.  Legal
    are at most ``most`` microbatches (None: any number) and at least ``each`` for every rank.  Stages go round over the
    ranks, or, if ``v_shaped``, down and up again.  ``splits`` says that backward is in two halves, I and W; under
    ``dualpipe-v`` some backwards are whole.
    """

    name: str
    stages_per_rank: int = 1
    more_stages: bool = False
    most: int | None = None
    each: int = 0
    v_shaped: bool = False
    splits: bool = False
    weights: Weights = "newest"

    def takes(self, stages_per_rank: int) -> bool:
        """Is this number of stages legal?"""
        return stages_per_rank == self.stages_per_rank or (self.more_stages and stages_per_rank > self.stages_per_rank)

    @property
    def asynchronous(self) -> bool:
        """Whether weights are updated while microbatches of other batches are in the pipeline."""
        return self.weights != "newest"

    @property
    def stages_alone(self) -> bool:
        """Whether each stage updates its weights by itself, without waiting for the others."""
        return self.weights == "stashed"

    @property
    def double_buffered(self) -> bool:
        """Whether a batch is updated only before the next but one needs its weights."""
        return self.weights == "double-buffered"


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("naive", most=1),
        Schedule("gpipe"),
        Schedule("1f1b"),
        Schedule("interleaved", stages_per_rank=2, more_stages=True),
        Schedule("zb-h1", splits=True),
        Schedule("zb-h2", splits=True),
        Schedule("zbv", stages_per_rank=2, v_shaped=True, splits=True),
        Schedule("dualpipe-v", stages_per_rank=2, v_shaped=True, splits=True),
        Schedule("pipedream", weights="stashed"),
        # With fewer microbatches in a batch than ranks, microbatches of three batches are in the pipeline at once.
        Schedule("pipedream-2bw", each=1, weights="double-buffered"),
    )
}
"""The schedules that have an order of their own, by name."""

AUTO = "auto"
"""The schedule whose timetable a plan carries itself: one found for measured times (``estimate/search.py``), or the
user's own."""


def traits(name: str) -> Schedule:
    """What the schedule of that name is like; :data:`AUTO` is synchronous, and its timetable says the rest."""
    return Schedule(AUTO) if name == AUTO else SCHEDULES[name]
