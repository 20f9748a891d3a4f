"""From a trace and a plan to the program of a step: one small pass each for computing, reductions, the step itself, and waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Buffer, Instruction, Lane, Op
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.lower.draft import Draft
from shardwise.lower.gather import gather
from shardwise.lower.reduce import reduce
from shardwise.lower.waits import derive_waits
from shardwise.parallel.data import batch_axes
from shardwise.parallel.schedule import one_stage
from shardwise.trace.trace import Bucket, Trace

LOSS = Buffer("loss")
WEIGHT = Buffer("weight")
NORM = Buffer("norm")
PASSING = ("activation", "kept", "saved", "gradient", "putoff")
"""Kinds of buffers that live within a step."""


def lower(trace: Trace, plan: Plan, *, buckets: Sequence[Bucket] | None = None, training: bool = True) -> tuple[Program, ...]:
    """The programs of all classes of ranks; under data parallelism there is one class.

    ``buckets`` are by default those of the trace.  Without ``training`` the programs compute the loss of a batch and nothing else.
    """
    lowering = _Lowering(trace, plan, trace.buckets if buckets is None else buckets, training)
    draft = Draft([*lowering.count(), *(lowering.compute() if training else lowering.evaluate())])
    lowering.free_activations(draft)
    lowering.reduce_loss(draft)
    unreduced = reduce(draft, plan, lowering.buckets)
    slots = gather(draft, plan, lowering.buckets)
    instructions = [*draft.instructions(), *(lowering.finish() if training else ())]
    return (Program("all ranks", (), tuple(derive_waits(instructions)), slots, unreduced),)


@dataclass
class _Lowering:
    trace: Trace
    plan: Plan
    buckets: Sequence[Bucket]
    training: bool = True

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in batch_axes(self.plan) if self.plan.mesh.axis_size(a) > 1)

    @cached_property
    def used(self) -> list[list[Bucket]]:
        """The buckets of each unit's parameters."""
        holder = {p.name: b for b in self.buckets for p in b.parameters}
        found = [{holder[n].index: holder[n] for n in unit.parameters if n in holder} for unit in self.trace.units]
        return [[used[i] for i in sorted(used)] for used in found]

    # ---- computing -------------------------------------------------------------------------------------------------

    def compute(self) -> list[Instruction]:
        """FORWARD, RECOMPUTE and BACKWARD of every unit and microbatch, in the schedule's order."""
        out: list[Instruction] = []
        written: set[int] = set()
        units = self.trace.units
        for kind, m in one_stage(self.plan.microbatches):
            if kind == "F":
                out += [self.forward(u, m) for u in range(len(units))]
                continue
            for u in reversed(range(len(units))):
                if not units[u].differentiable:
                    continue
                if self.recomputed(u):
                    out.append(self.recompute(u, m))
                first = tuple(b.index for b in self.used[u] if b.learns and b.index not in written)
                written |= set(first)
                out.append(self.backward(u, m, first))
        unwritten = {b.index for b in self.buckets if b.learns} - written
        if unwritten:
            raise ShardwiseError(f"no backward writes the gradients of buckets {sorted(unwritten)}")
        return out

    def evaluate(self) -> list[Instruction]:
        """FORWARD alone."""
        return [self.forward(u, m) for m in range(self.plan.microbatches) for u in range(len(self.trace.units))]

    def recomputed(self, unit: int) -> bool:
        """The last unit's backward comes right after its forward: nothing would be saved by running it twice."""
        return self.plan.recompute != "none" and unit != len(self.trace.units) - 1

    def forward(self, u: int, m: int) -> Instruction:
        unit = self.trace.units[u]
        reads = [Buffer("param", b.index) for b in self.used[u]]
        reads += [Buffer("activation", p, m) for p in self.producers(u)]
        if "loss" in unit.outputs and self.trace.targets is not None:
            reads.append(WEIGHT)
        writes = [Buffer("activation", u, m)]
        if self.training and unit.differentiable:
            writes += self.kept(u, m) if self.recomputed(u) else [Buffer("saved", u, m)]
        if "loss" in unit.outputs:
            writes.append(LOSS)
        axes = self.axes if unit.collectives else ()
        return Instruction(Op.FORWARD, unit=u, microbatch=m, axes=axes, reads=tuple(reads), writes=tuple(writes))

    def recompute(self, u: int, m: int) -> Instruction:
        again = self.forward(u, m)
        return replace(again, op=Op.RECOMPUTE, reads=(*again.reads, *self.kept(u, m)), writes=(Buffer("saved", u, m),))

    def kept(self, u: int, m: int) -> list[Buffer]:
        """What FORWARD leaves for RECOMPUTE inside a unit."""
        return [Buffer("kept", u, m)] if self.plan.recompute == "selective" else []

    def backward(self, u: int, m: int, first: tuple[int, ...]) -> Instruction:
        unit = self.trace.units[u]
        reads = [Buffer("saved", u, m), *(Buffer("param", b.index) for b in self.used[u])]
        reads += [Buffer("activation", p, m) for p in self.producers(u)]  # autograd keeps inputs
        reads += [WEIGHT] if "loss" in unit.outputs else [Buffer("gradient", u, m)]
        writes = [Buffer("grad", b.index) for b in self.used[u] if b.learns]
        grads = dict(zip(unit.inputs, unit.input_grads, strict=True))
        writes += [Buffer("gradient", p, m) for p in self.producers(u) if any(grads.get(n) for n in self.trace.units[p].outputs)]
        axes = self.axes if unit.collectives else ()
        return Instruction(Op.BACKWARD, unit=u, microbatch=m, axes=axes, reads=tuple(reads), writes=tuple(writes), first=first)

    def producers(self, u: int) -> list[int]:
        """The units whose live tensors unit ``u`` reads."""
        wanted = set(self.trace.units[u].inputs)
        return [p.index for p in self.trace.units[:u] if wanted & set(p.outputs)]

    # ---- the rest of the step ----------------------------------------------------------------------------------------

    def count(self) -> list[Instruction]:
        """The weights of the microbatches, first of all: their sum over ranks runs under the first forward."""
        targets = self.trace.targets
        if targets is None:
            return []
        reads = tuple(Buffer("param", b.index) for b in self.buckets if any(p.name in targets.leaves for p in b.parameters))
        return [Instruction(Op.COUNT, axes=self.axes, lane=Lane.REDUCE, reads=reads, writes=(WEIGHT,))]

    def free_activations(self, draft: Draft) -> None:
        """What a unit leaves for others ends with its backward, or with the last that reads it where it has none."""
        last: dict[Buffer, int] = {}
        for position, one in enumerate(draft.compute):
            for buffer in (*one.reads, *one.writes):
                if buffer.kind in PASSING:
                    last[buffer] = position
            if one.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                last[Buffer("activation", one.unit, one.microbatch)] = position
        for buffer, position in last.items():
            draft.edit(position, add_frees=(buffer,))

    def reduce_loss(self, draft: Draft) -> None:
        if self.axes:
            draft.after[draft.last([LOSS])].append(self.sum_over(self.axes, LOSS))

    def finish(self) -> list[Instruction]:
        """The norm over all gradients, which decides clipping and skipping, then one step for each bucket."""
        learning = [b for b in self.buckets if b.learns]
        norm = Instruction(Op.NORM, reads=tuple(Buffer("grad", b.index) for b in learning), writes=(NORM,))
        decide = Instruction(Op.DECIDE, reads=(NORM,), writes=(NORM,))
        steps = [
            Instruction(
                Op.STEP,
                bucket=b.index,
                reads=(Buffer("grad", b.index), NORM),
                writes=(Buffer("param", b.index), Buffer("state", b.index)),
            )
            for b in learning
        ]
        return [norm, *([self.sum_over(self.axes, NORM)] if self.axes else []), decide, *steps]

    @staticmethod
    def sum_over(axes: tuple[str, ...], buffer: Buffer) -> Instruction:
        return Instruction(Op.REDUCE, axes=axes, lane=Lane.REDUCE, reads=(buffer,), writes=(buffer,))
