"""Several batches in one program: when each is updated, which version of the weights its microbatches use, and where
old ones stay.

A program of one batch ends with its update.  Under ``norm = "post-validate"`` one batch follows the other; an update by
a stage's own norm is validated in the next (:mod:`shardwise.lower.validate`).  Under an asynchronous schedule
microbatches of the next batches are under way when a batch is updated; a stage keeps the weights that they have begun
with (weight stashing: Narayanan et al., PipeDream, arXiv 1806.03377, section 3.3), in slots of a pool.  Versions and
batches are counted from the begin of the program, which finds the pipeline empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.instruction import OP_INFO, BufferKind, Instruction, Op
from shardwise.core.plan import Plan
from shardwise.core.timetable import Task
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.slots import SlotSpan, assign
from shardwise.lower.stages import StageSplit
from shardwise.parallel.pipeline import PIPELINE
from shardwise.parallel.versions import double_buffered_version, stashed_version
from shardwise.units.trace import Bucket

BACKWARD = ("B", "I", "W")  # the tasks that are a backward, or a half of one


def steady(plan: Plan) -> int:
    """So many batches of a window show all that a longer one does; a plan whose batches do not overlap has windows of
    one.
    """
    if plan.asynchronous:
        return steady_batches(plan.pipeline.window, plan.mesh.axis_size(PIPELINE), plan.microbatches)
    return min(plan.pipeline.window, 3) if plan.post_validates else 1


def steady_batches(window: int, ranks: int, microbatches: int) -> int:
    """The same of an asynchronous schedule's numbers."""
    return min(window, _reported(ranks, microbatches) + 3)


def _reported(ranks: int, microbatches: int) -> int:
    return 1 + -(-(ranks - 1) // microbatches)


@dataclass(frozen=True)
class Versions:
    """The versions of weights that ``batches`` batches of ``microbatches`` microbatches use on the stages of a cut;
    microbatches are numbered on from batch to batch."""

    cut: StageSplit
    plan: Plan
    microbatches: int
    batches: int

    def batch(self, microbatch: int) -> int:
        """The batch of a microbatch."""
        return microbatch // self.microbatches

    def version(self, microbatch: int, stage: int) -> int:
        """The number of updates in the weights that a stage uses for a microbatch, forward and backward."""
        if self.plan.stages_alone:
            return stashed_version(microbatch, stage, self.cut.stages, self.plan.pipeline.vertical_sync)
        if self.plan.double_buffered:
            return double_buffered_version(microbatch, self.microbatches)
        return self.batch(microbatch)

    @property
    def reported(self) -> int:
        """So many batches after its own update comes that before which all stages have a batch's loss and norm: the
        first stage is the last to update, by as many microbatches as there are stages behind it."""
        return _reported(self.cut.ranks, self.microbatches) if self.plan.asynchronous else 0

    def validates(self, batch: int) -> bool:
        """Whether stages update a batch by their own norms, before that of all is known: not the last, with which the
        program ends.
        """
        return self.plan.post_validates and batch + 1 < self.batches

    def tasks(self, rank: int) -> list[Task]:
        """What a rank computes, in its order: of batch after batch, or as they overlap."""
        if self.plan.asynchronous:
            return [*self.cut.tasks(self.microbatches * self.batches)[rank]]
        one = self.cut.tasks(self.microbatches)[rank]
        return [
            task._replace(microbatch=task.microbatch + k * self.microbatches)
            for k in range(self.batches)
            for task in one
        ]

    def ends(self, draft: ProgramDraft) -> list[int]:
        """For each batch the position after which a rank updates its weights.

        That is its last backward, or where there is none all that it computes.  Under 2BW it is as late as can be,
        before the first forward that needs the new weights: until then the norm over all stages is known: its sum
        begins where the gradients are complete.
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
    """The copies to make before each update of what is read in its old version after it, and their slots."""
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
