"""The programs of a traced model, which are made when they are first needed, and their communicators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from shardwise.core.check import check
from shardwise.core.communicators import Members, communicators
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Axes
from shardwise.core.part import STEP, Part
from shardwise.core.program import Program
from shardwise.lower.exchanged import adds_rows_alike, inside, over_batch, parted
from shardwise.lower.messages import renamed
from shardwise.lower.step import lower
from shardwise.lower.traced_model import TracedModel
from shardwise.lower.versions import steady_batches
from shardwise.parallel.data import SHARDS
from shardwise.parallel.pipeline import PIPELINE
from shardwise.units.trace import Trace


@dataclass(eq=False)
class LoweredModel(TracedModel):
    """A traced model with its programs: they depend on the number of microbatches, which a batch of few rows can make
    smaller."""

    _programs: dict[tuple[Trace, int, int, Part | None], tuple[Program, ...]] = field(default_factory=dict)

    def programs_for(self, traces: Sequence[Trace], batches: int = 1, part: Part | None = STEP) -> tuple[Program, ...]:
        """Return :meth:`programs` of batches whose microbatches have these traces: they differ in numbers of rows, and
        may pass other tensors from stage to stage.

        Raises :class:`ConfigError` where other stages pass something, or where they are cut into other units."""
        programs = self.programs(traces[0], len(traces), batches, part)
        if all(one is traces[0] for one in traces):  # each step asks for them
            return programs
        key = (tuple(traces), batches, part)
        with self._lock:
            if key not in self._renamed:
                if len({tuple(unit.differentiable for unit in one.units) for one in traces}) > 1:
                    wrong = "by the way that forward takes for their rows some are cut into other units than others"
                    raise ConfigError.on("microbatches", wrong, "1")
                cuts = [self.stages_of(one) for one in traces]
                same = all(cut.sent == cuts[0].sent for cut in cuts)
                found = programs if same else renamed(programs, cuts)
                if found is None:
                    rows = " and ".join(str(one.rows) for one in dict.fromkeys(traces))
                    wrong = f"some have {rows} rows, and in these not the same stages pass something on"
                    raise ConfigError.on("microbatches", wrong, "a number that divides the rows of each batch")
                if not same:
                    check(found, self.plan.mesh)
                self._renamed[key] = found
            return self._renamed[key]

    @cached_property
    def _renamed(self) -> dict[tuple[tuple[Trace, ...], int, Part | None], tuple[Program, ...]]:
        """The results of :meth:`programs_for` so far, for microbatches of several traces."""
        return {}

    def programs(
        self, one: Trace, microbatches: int, batches: int = 1, part: Part | None = STEP
    ) -> tuple[Program, ...]:
        """Return the checked programs of a trace for ``batches`` batches of ``microbatches`` microbatches each. They
        run a ``part`` of a step, or, if that is None, only compute what forward does."""
        part = part if self.training else None
        key = (one, microbatches, batches, part)
        with self._lock:
            if key not in self._programs:
                self._check_placed(one, self.buckets)
                plan = self.plan.replace(microbatches=microbatches)
                programs = lower(
                    one,
                    plan,
                    buckets=self.buckets,
                    cut=self.stages_of(one),
                    training=part is not None,
                    batches=batches,
                    part=part or STEP,
                )
                check(programs, plan.mesh)
                self._programs[key] = programs
        return self._programs[key]

    def communicators(self, traces: Sequence[Trace], batches: int = 1, part: Part | None = STEP) -> tuple[Members, ...]:
        """Return the communicators of a batch whose microbatches have these traces, those inside units included."""
        key: tuple[Trace | int | Part | None, ...] = (*traces, batches, part)
        if key not in self._communicators:
            within = inside(self.plan.mesh, dict.fromkeys(traces))
            programs = self.programs_for(traces, batches, part)
            self._communicators[key] = communicators(programs, self.plan.mesh, within)
        return self._communicators[key]

    @cached_property
    def _communicators(self) -> dict[tuple[Trace | int | Part | None, ...], tuple[Members, ...]]:
        """The results of :meth:`communicators` so far: ranks that are threads of one process share them."""
        return {}

    @cached_property
    def first_communicators(self) -> tuple[Members, ...]:
        """The communicators that training, evaluation and the collection of whole states are expected to need.

        Evaluation is taken to be training without backward: it is captured when it is first needed, and may then turn
        out to need more.
        """
        one, plan = self.general, self.plan
        programs = [*self.programs(one, plan.microbatches, steady_batches(plan))]
        for due in dict.fromkeys(map(plan.local.due, range(2 * plan.local.steps))):
            programs += self.programs(one, plan.microbatches, part=replace(STEP, outer=due))
        if self.training:
            programs += lower(one, plan, buckets=self.buckets, cut=self.stages_of(one), training=False)
        return communicators(programs, plan.mesh, self.beside_programs(one))

    def beside_programs(self, one: Trace) -> list[tuple[Axes, str]]:
        """Return the axes and lane of the collectives that are in no program of the trace: those inside its units, and
        those that collect whole states.
        """
        whole = dict.fromkeys(((SHARDS,), (PIPELINE,), *(b.axes for b in one.buckets)))
        return [*inside(self.plan.mesh, [one]), *((axes, "state") for axes in whole)]

    @cached_property
    def alike_over_batch(self) -> bool:
        """Whether ranks along the batch axes may run different traces, one with masks and another without: both traces
        communicate the same over these axes, in the same order, and nothing inside units."""
        axes, both = parted(self.plan), self._every
        if not axes or len(both) == 1:
            return True
        if any(axes.intersection(own) for own, _ in inside(self.plan.mesh, both)):
            return False
        first, second = (over_batch(self.plan, self.programs(one, self.plan.microbatches)) for one in both)
        return first == second

    def apart_from(self, other: Self) -> bool:
        """Whether in a step some ranks may run this, and some ``other``, which is for rows of another shape."""
        return (
            self.general.checks is None
            and adds_rows_alike(self.plan, [*self._every, *other._every])
            and (
                self is other
                or over_batch(self.plan, self.programs(self.general, self.plan.microbatches))
                == over_batch(self.plan, other.programs(other.general, self.plan.microbatches))
            )
        )

    @property
    def _every(self) -> list[Trace]:
        """The general trace, and the one for masks that are all ones."""
        return [self.general, *([self.trace(self.masks, None)] if self.masks else [])]
