"""Lower a trace and a plan to the programs of a step, in small passes: computing, messages, reductions, gathers,
stashes, the update, and waits.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.local_options import ISLANDS
from shardwise.core.mesh import Coordinates
from shardwise.core.part import STEP, Part
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.core.tensor_options import tensor_axes
from shardwise.lower.compute import Compute
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.gather import gather
from shardwise.lower.messages import messages
from shardwise.lower.outer import fragments, outer_step
from shardwise.lower.reduce import Reductions
from shardwise.lower.refused import refuse
from shardwise.lower.stages import StageSplit
from shardwise.lower.tied import check_tied, parts, shared, tied
from shardwise.lower.versions import Versions, stash
from shardwise.lower.waits import derive_waits
from shardwise.parallel.data import batch_axes, placement
from shardwise.parallel.pipeline import PIPELINE, stages_at
from shardwise.parallel.whole_tensors import parted_over
from shardwise.units.trace import Bucket, Trace


def lower(
    trace: Trace, plan: Plan, *, buckets: Sequence[Bucket] | None = None, cut: StageSplit | None = None,
    training: bool = True,
    batches: int = 1,
    part: Part = STEP,
) -> tuple[Program, ...]:  # fmt: skip
    """Return the programs of ``batches`` batches, one for each rank of the pipeline: ranks that differ in other axes
    run the same program.

    ``buckets`` are by default those of the trace, and ``cut`` has the stages that follow from the plan and the units'
    costs. Without ``training`` the programs only compute the loss of a batch; in training they run a ``part`` of its
    step. Raises :class:`ConfigError` if the stages
    cannot compute the model.
    """
    cut = StageSplit.of(trace, plan) if cut is None else cut
    refuse(trace, plan, cut, training)
    cut.check()
    buckets = trace.buckets if buckets is None else buckets
    if training:
        check_tied(plan, cut, buckets)
    versions = Versions(cut, plan, batches)
    each = [_Lowering(trace, plan, buckets, training, cut, rank, versions, part) for rank in range(cut.ranks)]
    if not part.computes:
        return tuple(one.update_alone() for one in each)
    drafts = [one.draft() for one in each]
    cuts = messages(drafts, cut, versions)
    return tuple(one.program(draft, at) for one, draft, at in zip(each, drafts, cuts, strict=True))


@dataclass
class _Lowering:
    """Makes the program of one rank of the pipeline."""

    trace: Trace
    plan: Plan
    buckets: Sequence[Bucket]
    training: bool
    cut: StageSplit
    rank: int
    versions: Versions
    part: Part = STEP

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which a microbatch's rows are sharded."""
        return tuple(a for a in batch_axes(self.plan.mesh) if self.plan.mesh.axis_size(a) > 1)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes over which the ranks of one stage differ; collectives inside units run over them."""
        return (*self.axes, *tensor_axes(self.plan.mesh))

    @property
    def all_axes(self) -> tuple[str, ...]:
        """The axes over which losses and norms are summed."""
        return (*((PIPELINE,) if self.cut.ranks > 1 else ()), *self.stage_axes)

    @cached_property
    def used(self) -> list[list[Bucket]]:
        """The buckets of each unit's parameters."""
        holder = {p.name: b for b in self.buckets for p in b.parameters}
        found = [{holder[n].index: holder[n] for n in unit.parameters if n in holder} for unit in self.trace.units]
        return [[used[i] for i in sorted(used)] for used in found]

    @cached_property
    def own(self) -> list[Bucket]:
        """The buckets that this rank has."""
        return self.cut.own(self.buckets, self.rank)

    def draft(self) -> ProgramDraft:
        """Return a draft with the compute instructions and the activations that they free."""
        compute = Compute(
            self.trace, self.plan, self.cut, self.rank, self.versions, self.training, self.used, self.stage_axes
        )
        draft = ProgramDraft([], [])
        counted = 0
        for group in compute.groups():
            draft.tasks.append(len(draft.compute))
            if self.versions.batch(group[0].microbatch) == counted:
                sums = self.count(counted)
                draft.turns += [len(draft.compute)] * len(sums)
                draft.compute += sums
                counted += 1
            compute.add(group, draft)
        if self.training:
            self.check_written(compute.written)
        compute.free_activations(draft)
        return draft

    def check_written(self, written: Container[tuple[int, int]]) -> None:
        batches = range(self.versions.batches)
        wanted = {(b.index, batch) for b in self.own if b.learns for batch in batches}
        if unwritten := sorted({one[0] for one in wanted if one not in written}):
            raise ShardwiseError(f"no backward writes the gradients of buckets {unwritten}")

    def program(self, draft: ProgramDraft, validations: Sequence[int]) -> Program:
        """Return the program: the draft with reductions, gathers, stashes and the update. ``validations`` are the
        positions before which updates by this rank's own norm are validated.
        """
        versions, own = self.versions, self.own if self.training else []
        ends = versions.ends(draft)
        reductions = Reductions(draft, self.plan, self.buckets, versions.batch, ends, self.part)
        slots = gather(draft, self.plan, self.buckets, ends)
        copies, stashes = stash(draft, own, ends)
        for batch, end in enumerate(ends):
            summed = BufferKind.LOSS.of(version=batch)
            loss = [self.sum_over(self.all_axes, summed)] if self.all_axes else []
            if self.cut.ranks == 1:  # a pipeline's ranks sum the loss together, in `early` below
                draft.after[draft.writers(summed)[-1]] += loss
                loss = []
            complete = reductions.put(batch)
            for position, send in parts(self.cut, self.rank, own, complete) if self.part.completes else ():
                draft.after[position].append(send)
            # 2BW leaves time between the last gradient and the update, in which the sums over stages run.
            early = max(complete.values(), default=end) if self.training and self.plan.double_buffered else end
            draft.after[early] += [*loss, *(tied(self.cut, self.rank, own) if self.part.completes else ())]
            if self.training and self.part.updates:
                draft.after[early] += self.norm(batch)
                sent, taken = self.outer(batch)
                draft.after[-1][:0] = sent
                draft.after[end] += [*self.finish(batch, copies[batch]), *taken]
            if self.training and versions.validates(batch):
                at = draft.before[validations[batch]]
                at[:0] = [self.validate(batch), *self.reports(batch)]
            else:
                draft.after[end] += self.reports(batch)
        instructions = tuple(derive_waits(draft.instructions()))
        return Program(*self.place, instructions, slots, reductions.pool, stashes, versions.batches)

    @property
    def place(self) -> tuple[str, Coordinates]:
        """The name and the coordinates of the ranks that run the program."""
        if self.cut.ranks == 1:
            return "all ranks", ()
        return stages_at(self.cut.home, self.rank), ((PIPELINE, self.rank),)

    def update_alone(self) -> Program:
        """Return the program of an update by gradients that earlier programs have completed."""
        sent, taken = self.outer(0)
        instructions = [*sent, *self.norm(0), *self.finish(0, ()), *taken, self.report(0)]
        return Program(*self.place, tuple(derive_waits(instructions)))

    # ---- the rest of a batch -----------------------------------------------------------------------------------------

    def count(self, batch: int) -> list[Instruction]:
        """Return COUNT, which makes the sums that follow from fields alone; it comes first, so that its sum over ranks
        runs under the first forward."""
        sums = self.trace.sums
        if sums is None:
            return []
        reads = tuple(
            BufferKind.PARAM.of(b.index) for b in self.own if any(p.name in sums.leaves for p in b.parameters)
        )
        writes = (BufferKind.WEIGHT.of(version=batch),)
        return [Instruction(Op.COUNT, version=batch, axes=self.axes, lane=Lane.REDUCE, reads=reads, writes=writes)]

    def norm(self, batch: int) -> list[Instruction]:
        """Return NORM over the gradients of which this rank is the first holder, and the sum of norms over ranks."""
        held = {b.index: ranks for b, ranks in shared(self.cut, self.rank, self.own)}
        counted = [b for b in self.own if b.learns and held.get(b.index, (self.rank,))[0] == self.rank]
        norm, axes = BufferKind.NORM.of(version=batch), self.deciding(batch)
        reads = tuple(BufferKind.GRAD.of(b.index) for b in counted)
        taken = Instruction(Op.NORM, version=batch, reads=reads, writes=(norm,))
        return [taken, *([self.sum_over(axes, norm)] if axes else [])]

    def deciding(self, batch: int) -> tuple[str, ...]:
        """Return the axes over which ranks decide on an update together."""
        return self.stage_axes if self.plan.stages_alone or self.versions.validates(batch) else self.all_axes

    def finish(self, batch: int, copies: Sequence[Instruction]) -> list[Instruction]:
        """Return DECIDE, by which the norm decides on clipping and skipping, and a STEP for each bucket.

        If stages do not wait for each other, each decides by its own norm, and the norm over all stages is summed
        later.
        """
        learning = [b for b in self.own if b.learns]
        norm, verdict = BufferKind.NORM.of(version=batch), BufferKind.VERDICT.of(version=batch)
        after = tuple(a for a in self.all_axes if a not in self.deciding(batch))
        return [
            Instruction(Op.DECIDE, version=batch, reads=(norm,), writes=(verdict,)),
            *([self.sum_over(after, norm)] if after else []),
            *copies,
            *([self.backup(b, batch) for b in learning] if self.versions.validates(batch) else []),
            *([self.commit(learning, batch, verdict)] if self.plan.serving.apart else []),
            *(self.update(b, batch, verdict) for b in learning if not self.plan.serving.apart),
        ]

    def update(self, bucket: Bucket, batch: int, verdict: Buffer) -> Instruction:
        """Return STEP; it writes the gradient too, which the fused optimizer clips in place.  Where ranks have to put
        whole tensors together for it, it communicates."""
        param, state, grad = (kind.of(bucket.index) for kind in (BufferKind.PARAM, BufferKind.STATE, BufferKind.GRAD))
        axes: tuple[str, ...] = ()
        if self.plan.data.updates == "tensors":
            rule = placement(self.plan, bucket.parameters[0].name, bucket.table)
            axes = parted_over(self.plan.mesh, rule, bucket.axes)
        return Instruction(
            Op.STEP, bucket=bucket.index, version=batch, axes=axes, lane=Lane.REDUCE if axes else Lane.COMPUTE,
            reads=(grad, verdict), writes=(param, state, grad),
        )  # fmt: skip

    @staticmethod
    def commit(buckets: Sequence[Bucket], batch: int, verdict: Buffer) -> Instruction:
        """Return COMMIT, after which servers may still read the gradients."""
        grads = tuple(BufferKind.GRAD.of(b.index) for b in buckets)
        return Instruction(Op.COMMIT, version=batch, lane=Lane.REDUCE, reads=(*grads, verdict), writes=grads)

    @staticmethod
    def backup(bucket: Bucket, batch: int) -> Instruction:
        """Return BACKUP, a copy of what STEP changes."""
        reads = BufferKind.PARAM.of(bucket.index), BufferKind.STATE.of(bucket.index)
        writes = (BufferKind.BACKUP.of(bucket.index),)
        return Instruction(Op.BACKUP, bucket=bucket.index, version=batch, reads=reads, writes=writes)

    def outer(self, batch: int) -> tuple[list[Instruction], list[Instruction]]:
        """Return what an outer step puts before everything else, and what comes after the update.  In it islands also
        learn whether any of their ranks was asked to stop."""
        if not self.part.outer:
            return [], []
        streams, place = self.plan.local.streams, fragments(self.buckets, self.plan.local)
        met = [b for b in self.own if place.get(b.index) in self.part.outer]
        sent, taken = outer_step(met, streams)
        stop = self.sum_over((ISLANDS,), BufferKind.LOSS.of(version=batch))
        return (sent, [stop, *taken]) if streams else ([], [stop, *sent, *taken])

    def validate(self, batch: int) -> Instruction:
        """Return VALIDATE; it reads gradients too, for the update may have to be made again."""
        learning = [b.index for b in self.own if b.learns]
        backups = tuple(BufferKind.BACKUP.of(index) for index in learning)
        norm, verdict = BufferKind.NORM.of(version=batch), BufferKind.VERDICT.of(version=batch)
        reads = (norm, *backups, *(BufferKind.GRAD.of(index) for index in learning))
        return Instruction(Op.VALIDATE, version=batch, reads=reads, writes=(verdict,), frees=backups)

    def reports(self, batch: int) -> list[Instruction]:
        """Return the reports of the batches that all stages have finished when this rank updates ``batch``."""
        last, late = self.versions.batches - 1, self.versions.reported
        due = range(batch - late, last + 1) if batch == last else range(batch - late, batch - late + 1)
        return [self.report(k) for k in due if k >= 0]

    def report(self, batch: int) -> Instruction:
        decided = self.training and self.part.updates
        kinds = (BufferKind.LOSS, BufferKind.NORM, BufferKind.VERDICT) if decided else (BufferKind.LOSS,)
        reads = tuple(kind.of(version=batch) for kind in kinds)
        frees = (*reads, BufferKind.WEIGHT.of(version=batch), BufferKind.BATCH.of(version=batch))
        return Instruction(Op.REPORT, version=batch, reads=reads, frees=frees)

    @staticmethod
    def sum_over(axes: tuple[str, ...], buffer: Buffer) -> Instruction:
        return Instruction(
            Op.REDUCE, version=buffer.version, axes=axes, lane=Lane.REDUCE, reads=(buffer,), writes=(buffer,)
        )
