"""From a trace and a plan to the program of a step: one small pass each for computing, reductions, the step itself, and waits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Buffer, Instruction, Lane, Op
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.lower.waits import derive_waits
from shardwise.parallel.data import batch_axes, reductions
from shardwise.parallel.schedule import one_stage
from shardwise.trace.trace import Bucket, Trace

LOSS = Buffer("loss")
WEIGHT = Buffer("weight")
NORM = Buffer("norm")


def lower(trace: Trace, plan: Plan, *, training: bool = True) -> tuple[Program, ...]:
    """The programs of all classes of ranks; under data parallelism there is one class.

    Without ``training`` they compute the loss of a batch and nothing else.
    """
    instructions = _Lowering(trace, plan, training).run()
    return (Program("all ranks", (), tuple(derive_waits(instructions))),)


@dataclass
class _Lowering:
    trace: Trace
    plan: Plan
    training: bool = True

    def run(self) -> list[Instruction]:
        if not self.training:
            return [*self.count(), *self.reduce(self.evaluate())]
        compute = self.compute()
        return [*self.count(), *self.reduce(compute), *self.finish()]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a in batch_axes(self.plan) if self.plan.mesh.axis_size(a) > 1)

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
                first = tuple(b.index for b in self.buckets(u) if b.index not in written)
                written |= set(first)
                out.append(self.backward(u, m, first))
        unwritten = {b.index for b in self.trace.buckets} - written
        if unwritten:
            raise ShardwiseError(f"no backward writes the gradients of buckets {sorted(unwritten)}")
        return out

    def evaluate(self) -> list[Instruction]:
        """FORWARD alone."""
        return [self.forward(u, m) for m in range(self.plan.microbatches) for u in range(len(self.trace.units))]

    def buckets(self, unit: int) -> list[Bucket]:
        return [b for b in self.trace.buckets if unit in b.units]

    def recomputed(self, unit: int) -> bool:
        """The last unit's backward comes right after its forward: nothing would be saved by running it twice."""
        return self.plan.recompute != "none" and unit != len(self.trace.units) - 1

    def forward(self, u: int, m: int) -> Instruction:
        unit = self.trace.units[u]
        reads = [Buffer("param", b.index) for b in self.buckets(u)]
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
        reads = [Buffer("saved", u, m), *(Buffer("param", b.index) for b in self.buckets(u))]
        reads += [WEIGHT] if "loss" in unit.outputs else [Buffer("gradient", u, m)]
        writes = [Buffer("grad", b.index) for b in self.buckets(u)]
        grads = dict(zip(unit.inputs, unit.input_grads, strict=True))
        writes += [Buffer("gradient", p, m) for p in self.producers(u) if any(grads.get(n) for n in self.trace.units[p].outputs)]
        axes = self.axes if unit.collectives else ()
        return Instruction(Op.BACKWARD, unit=u, microbatch=m, axes=axes, reads=tuple(reads), writes=tuple(writes), first=first)

    def producers(self, u: int) -> list[int]:
        """The units whose live tensors unit ``u`` reads."""
        wanted = set(self.trace.units[u].inputs)
        return [p.index for p in self.trace.units[:u] if wanted & set(p.outputs)]

    # ---- communication ---------------------------------------------------------------------------------------------

    def count(self) -> list[Instruction]:
        """The weights of the microbatches, first of all: their sum over ranks runs under the first forward."""
        if self.trace.targets is None:
            return []
        return [Instruction(Op.COUNT, axes=self.axes, lane=Lane.REDUCE, writes=(WEIGHT,))]

    def reduce(self, compute: list[Instruction]) -> list[Instruction]:
        """Put each bucket's reduction right after the backward that completes its gradient, and the loss's after the last forward."""
        last = {buffer: i for i, one in enumerate(compute) for buffer in one.writes}
        after: dict[int, list[Instruction]] = {}
        for bucket in self.trace.buckets if self.training else ():
            grad = Buffer("grad", bucket.index)
            for collective in reductions(self.plan, bucket.parameters[0].name, bucket.numel):
                if collective.kind != "all_reduce":
                    raise ShardwiseError(f"bucket {bucket.index}: {collective.kind} of gradients cannot be lowered yet")
                after.setdefault(last[grad], []).append(
                    Instruction(
                        Op.REDUCE, bucket=bucket.index, axes=collective.axes, lane=Lane.REDUCE, reads=(grad,), writes=(grad,)
                    )
                )
        if self.axes:
            after.setdefault(last[LOSS], []).append(
                Instruction(Op.REDUCE, axes=self.axes, lane=Lane.REDUCE, reads=(LOSS,), writes=(LOSS,))
            )
        return [one for i, each in enumerate(compute) for one in (each, *after.get(i, ()))]

    def finish(self) -> list[Instruction]:
        """The norm over all gradients, which decides clipping and skipping, then one step for each bucket."""
        buckets = self.trace.buckets
        norm = Instruction(Op.NORM, reads=tuple(Buffer("grad", b.index) for b in buckets), writes=(NORM,))
        steps = [
            Instruction(
                Op.STEP,
                bucket=b.index,
                reads=(Buffer("grad", b.index), NORM),
                writes=(Buffer("param", b.index), Buffer("state", b.index)),
            )
            for b in buckets
        ]
        return [norm, *steps]
