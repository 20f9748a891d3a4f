"""This module has the options of a plan for pipelines: which rank over the axis ``pp`` computes what, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.core.errors import ConfigError, check_count, check_value
from shardwise.core.options import check_options, count, word
from shardwise.core.schedules import AUTO, SCHEDULES, traits
from shardwise.core.timetable import read

Norm = Literal["barrier", "post-validate"]


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """These options say how the microbatches of a step go through the stages of a pipeline.

    Each rank has ``stages_per_rank`` stages and computes in the order of ``schedule``.  ``stages`` has the number of
    units in each stage; by default these balance the stages' costs.  Schedule "auto" goes by ``timetable``, a text for
    each rank (``core/timetable.py``) such as "F0.0 F0.1 B0.0 B0.1": kinds, stages and microbatches in the
    order in which the rank computes them.

    Under ``norm = "post-validate"`` stages update by the norm of their own gradients and go on with the next batch;
    once the norm over all stages is known, a stage that should have clipped or skipped undoes its update (Qi et al.,
    arXiv 2401.10241, section 4).  There, and under an asynchronous schedule, the pipeline is empty after every
    ``window`` batches.  With ``vertical_sync`` all stages of PipeDream use the first stage's version of the weights.
    """

    schedule: str = word("1f1b", (*SCHEDULES, AUTO))
    stages_per_rank: int = count(1)
    stages: tuple[int, ...] = ()
    timetable: tuple[str, ...] = ()
    norm: Norm = word("barrier", get_args(Norm))
    window: int = count(32)
    vertical_sync: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        legal = "the number of units in each stage, such as [3, 3]"
        check_value("stages", self.stages, isinstance(self.stages, tuple | list), legal)
        object.__setattr__(self, "stages", tuple(self.stages))
        for number in self.stages:
            check_count("stages", number)
        self._check_timetable()
        check_value("vertical_sync", self.vertical_sync, isinstance(self.vertical_sync, bool), "true, false")
        if self.vertical_sync and not traits(self.schedule).stages_alone:
            others = ", ".join(f'"{other.name}"' for other in SCHEDULES.values() if other.stages_alone)
            wrong = f'true is not legal with schedule "{self.schedule}"'
            raise ConfigError.on("vertical_sync", wrong, f"false, or schedule {others}.")

    def _check_timetable(self) -> None:
        """Check that there is a timetable exactly under "auto"; :meth:`check_ranks` checks what it says."""
        if self.timetable and self.schedule != AUTO:
            wrong = f'"{self.schedule}" has its own'
            raise ConfigError.on("timetable", wrong, 'schedule = "auto" with a timetable.')
        if not self.timetable and self.schedule == AUTO:
            texts = 'one text for each rank over pp, such as "F0.0 F0.1 B0.0 B0.1"'
            legal = f"{texts}, or `shardwise train`, which measures the stages and finds one."
            raise ConfigError.on("schedule", '"auto" needs a timetable', legal)
        if isinstance(self.timetable, list) or not self.timetable:
            object.__setattr__(self, "timetable", tuple(self.timetable or ()))

    def check_ranks(self, ranks: int, microbatches: int) -> None:
        """Raise :class:`ConfigError` unless ``ranks`` over pp can compute a step of ``microbatches`` in this way."""
        each, kind = self.stages_per_rank, traits(self.schedule)
        if self.stages and len(self.stages) != ranks * each:
            wrong = f"{list(self.stages)} are {len(self.stages)} stages"
            raise ConfigError.on("stages", wrong, f"{ranks * each}, for {ranks} ranks over pp with {each} each.")
        if self.timetable:
            read(self.timetable, ranks, each, microbatches)
        if not kind.asynchronous or ranks == 1:
            return
        illegal = f'not legal with schedule "{self.schedule}"'
        if self.norm != "barrier":
            wrong = f'"{self.norm}" is {illegal}, which has no barrier to do without'
            raise ConfigError.on("norm", wrong, '"barrier".')
        if kind.stages_alone and microbatches != 1:
            wrong = f"{microbatches} is {illegal}, which updates after each microbatch"
            raise ConfigError.on("microbatches", wrong, "1, with batches as large as a microbatch shall be.")
