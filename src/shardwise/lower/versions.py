"""Several batches in one program: when the weights are updated, which version of them each microbatch uses, and where
old versions are kept.

A program of one batch ends with its update. Under ``norm = "post-validate"`` a rank computes one batch after the other,
and an update by a stage's own norm is validated in the next batch (:mod:`shardwise.lower.validate`). Under an
asynchronous schedule microbatches of later batches are in the pipeline when a batch is updated; a stage keeps the
weights with which it began them (weight stashing: Narayanan et al., PipeDream, arXiv 1806.03377, section 3.3) in slots
of a pool. Versions and batches are counted from the start of the program, when the pipeline is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.core.instruction import OP_INFO, BufferKind, Instruction, Op
from shardwise.core.plan import Plan
from shardwise.core.timetable import Task
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.slots import SlotSpan, assign
from shardwise.lower.stages import StageSplit
from shardwise.parallel.overlap import Group, neighbours, paired, together
from shardwise.parallel.pipeline import PIPELINE
from shardwise.parallel.versions import double_buffered_version, stashed_version
from shardwise.units.trace import Bucket

BACKWARD = ("B", "I", "W")  # the kinds of tasks that are a backward or a part of one


def steady_batches(plan: Plan) -> int:
    """Return the number of batches of a program that shows all that a whole window does; it is 1 if each batch has a
    program of its own.
    """
    if plan.asynchronous:
        return asynchronous_batches(plan.pipeline.window, plan.mesh.axis_size(PIPELINE), plan.microbatches)
    return min(plan.pipeline.window, 3) if plan.post_validates else 1


def asynchronous_batches(window: int, ranks: int, microbatches: int) -> int:
    """Return the same number for an asynchronous schedule."""
    return min(window, _reported(ranks, microbatches) + 3)


def _reported(ranks: int, microbatches: int) -> int:
    return 1 + -(-(ranks - 1) // microbatches)


@dataclass(frozen=True)
class Versions:
    """The versions of the weights that the stages of ``cut`` use in ``batches`` batches; microbatches are numbered
    through all batches."""

    cut: StageSplit
    plan: Plan
    batches: int

    def batch(self, microbatch: int) -> int:
        """Return the batch of a microbatch."""
        return microbatch // self.plan.microbatches

    def version(self, microbatch: int, stage: int) -> int:
        """Return the version of the weights, a number of updates, that a stage uses for a microbatch."""
        if self.plan.stages_alone:
            return stashed_version(microbatch, stage, self.cut.stages, self.plan.pipeline.vertical_sync)
        if self.plan.double_buffered:
            return double_buffered_version(microbatch, self.plan.microbatches)
        return self.batch(microbatch)

    @property
    def reported(self) -> int:
        """How many batches after a batch's update its loss and norm are reported, so that all stages have updated by
        then: the first stage is last, by as many microbatches as there are stages after it."""
        return _reported(self.cut.ranks, self.plan.microbatches) if self.plan.asynchronous else 0

    def validates(self, batch: int) -> bool:
        """Whether stages update after a batch by their own norms, before the norm of all is known; they never do after
        the last batch, with which the program ends.
        """
        return self.plan.post_validates and batch + 1 < self.batches

    def tasks(self, rank: int) -> list[Task]:
        """Return the tasks of a rank in its order: batch after batch, or overlapping under an asynchronous schedule."""
        if self.plan.asynchronous:
            return [*self.cut.tasks(self.plan.microbatches * self.batches)[rank]]
        one = self.cut.tasks(self.plan.microbatches)[rank]
        return [
            task._replace(microbatch=task.microbatch + k * self.plan.microbatches)
            for k in range(self.batches)
            for task in one
        ]

    def groups(self, rank: int) -> list[Group]:
        """Return the tasks of a rank, those in groups that run in pairs."""
        if self.plan.tensor.overlap == "none":
            return [(task,) for task in self.tasks(rank)]
        tasks = self.tasks(rank)
        if self.cut.ranks == 1:
            phases = any(unit.exchanges for unit in self.cut.units)
            return [*neighbours(tasks if phases else together(tasks))]
        number, batches = self.plan.microbatches, range(self.batches)
        one = self._paired[rank]
        return [
            tuple(task._replace(microbatch=task.microbatch + k * number) for task in group)
            for k in batches for group in one
        ]  # fmt: skip

    @cached_property
    def _paired(self) -> tuple[tuple[Group, ...], ...]:
        return paired(self.cut.tasks(self.plan.microbatches))

    def ends(self, draft: ProgramDraft) -> list[int]:
        """Return for each batch the position after which a rank updates its weights.

        It is the batch's last backward, or its last instruction if there is no backward. Under 2BW it is as late as
        possible, before the first forward that needs the new weights, so that the sum of the norm over all stages,
        which starts when the gradients are complete, can overlap with computing.
        """
        last = len(draft.compute) - 1
        if self.batches == 1:
            return [last]
        backward = any(OP_INFO[one.op].task in BACKWARD for one in draft.compute)
        found = [0] * self.batches
        first: dict[int, int] = {}
        for position, one in enumerate(draft.compute):
            if one.microbatch >= 0 and (OP_INFO[one.op].task in BACKWARD or not backward):
                found[self.batch(one.microbatch)] = position
            if one.op is Op.FORWARD:
                first.setdefault(one.version, draft.task_of(position))
        if self.plan.double_buffered:
            found = [first.get(batch + 1, last + 1) - 1 for batch in range(self.batches)]
        return found


def stash(
    draft: ProgramDraft, buckets: Sequence[Bucket], ends: Sequence[int]
) -> tuple[list[list[Instruction]], tuple[tuple[int, ...], ...]]:
    """Return, for each batch, the copies to make before its update of weights that are read in this version after it,
    and the pool of their slots."""
    spans: list[SlotSpan] = []
    uses: list[tuple[int, list[int]]] = []
    for bucket in buckets:
        readers = draft.readers(BufferKind.PARAM.of(bucket.index))
        for version, end in enumerate(ends if bucket.learns else ()):
            late = [i for i in readers if i > end and draft.compute[i].version == version]
            if late:
                spans.append(SlotSpan(bucket.index, bucket.nbytes, end + 1, late[-1]))
                uses.append((version, late))
    slots, pool = assign(spans)
    found: list[list[Instruction]] = [[] for _ in ends]
    for span, (version, late), slot in zip(spans, uses, slots, strict=True):
        param, place = BufferKind.PARAM.of(span.bucket), BufferKind.STASH.of(slot)
        copy = Instruction(Op.STASH, bucket=span.bucket, slot=slot, version=version, reads=(param,), writes=(place,))
        found[version].append(copy)
        for position in late:
            draft.rename(position, param, place)
        draft.edit(late[-1], add_frees=(place,))
    return found, pool
