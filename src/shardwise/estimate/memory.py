"""The bytes of everything that a program names, from the trace, the plan and the table of kernels alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.core.instruction import Buffer, Instruction, Op
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.estimate.states import Widths, bucket_states, step_peak, widths
from shardwise.estimate.timeline import Made
from shardwise.parallel.data import batch_axes
from shardwise.trace.profile import Profile, UnitMemory
from shardwise.trace.trace import DECAY, Bucket, Trace

COUNTER = 8  # bytes of a number of targets, int64


def states(trace: Trace, plan: Plan, choice: OptimizerChoice, index: int = 0) -> dict[Buffer, int]:
    """Model states of rank ``index`` of the batch axes by buffer, with masters under ``state``."""
    found: dict[Buffer, int] = {}
    for bucket, row, parts in _rows(trace, plan):
        size = bucket_states(bucket.layout(choice, parts), row, parts, index % parts, _widths(choice, bucket))
        sizes = (("param", size.parameters), ("grad", size.gradients), ("state", size.optimizer))
        found |= {Buffer(kind, bucket.index): n for kind, n in sizes}
    return found


def steps(trace: Trace, plan: Plan, choice: OptimizerChoice, device: str = "cpu", index: int = 0) -> dict[int, int]:
    """The peak of each bucket's STEP on rank ``index``."""
    found: dict[int, int] = {}
    for bucket, _, parts in _rows(trace, plan):
        layout = bucket.layout(choice, parts)
        segments = layout.shard(parts, index % parts).segments(layout)
        own = [(group == DECAY, stop - start) for group, start, stop in segments]
        found[bucket.index] = step_peak(choice, own, _widths(choice, bucket), bucket.wide.itemsize, device)
    return found


def _rows(trace: Trace, plan: Plan) -> Iterator[tuple[Bucket, tuple[str, str, str], int]]:
    """Each bucket with its row of the data-parallel table and the number of ranges into which it is cut."""
    for bucket in trace.buckets:
        rule = plan.rule(bucket.parameters[0].name)
        row = (rule.rest, rule.grad, rule.state)
        yield bucket, row, plan.mesh.axis_size(batch_axes(plan)) if "S" in row else 1


def _widths(choice: OptimizerChoice, bucket: Bucket) -> Widths:
    return widths(choice, bucket.dtype.itemsize, bucket.wide.itemsize)


@dataclass
class ProgramSizes:
    """:class:`Sizes` of a program over units that were profiled.

    Args:
        program: its instructions.
        traces: one for each microbatch, as the engine chooses them.
        profiles: likewise, of each microbatch's own number of rows.
        persistent: model states by buffer, pools of slots, and whatever else is there from step to step.
        steps: the peak of each bucket's STEP.
    """

    program: Sequence[Instruction]
    traces: Sequence[Trace]
    profiles: Sequence[Profile]
    persistent: Mapping[Buffer, int]
    steps: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recomputed = {(one.unit, one.microbatch) for one in self.program if one.op is Op.RECOMPUTE}
        self.producers = [{n: u.index for u in t.units for n in u.outputs} for t in self.traces]
        self.scalar = 8 if self.traces[0].precision == "fp64" else 4

    def unit(self, one: Instruction) -> UnitMemory:
        return self.profiles[one.microbatch].units[one.unit]

    def made(self, one: Instruction) -> Made:
        """What the instruction leaves, by buffer and part."""
        u, m = one.unit, one.microbatch
        if one.op is Op.COUNT:
            return {b: {"counts": COUNTER * len(self.traces)} for b in one.writes}
        if one.op is Op.RECOMPUTE:
            return {Buffer("saved", u, m): {"": self.unit(one).saved_again}}
        if one.op is Op.BACKWARD:
            return self.gradients(one)
        return self.forward(one) if one.op is Op.FORWARD else {}

    def forward(self, one: Instruction) -> Made:
        memory, unit = self.unit(one), self.traces[one.microbatch].units[one.unit]
        made: dict[Buffer, Mapping[str, int]] = {Buffer("activation", one.unit, one.microbatch): {"": memory.outputs}}
        if self.saves(one):
            made[Buffer("saved", one.unit, one.microbatch)] = {"": memory.saved}
        if memory.updates:
            made[Buffer("update", one.unit)] = {"": memory.updates}
        if "loss" in unit.outputs and self.traces[0].targets is not None:
            made[Buffer("weight")] = {"shares": self.scalar * len(self.traces)}
        return made

    def gradients(self, one: Instruction) -> Made:
        memory, m = self.unit(one), one.microbatch
        made: dict[Buffer, dict[str, int]] = {}
        for name, size in zip(self.traces[m].units[one.unit].inputs, memory.gradients, strict=False):
            if size:
                made.setdefault(Buffer("gradient", self.producers[m][name], m), {})[name] = size
        return made

    def peak(self, one: Instruction) -> int:
        """The most that the instruction adds to what was alive before it."""
        if one.op is Op.STEP:
            return self.steps.get(one.bucket, 0)
        if one.op is Op.COUNT:
            number = len(self.traces)  # of scalars, and then their stack
            return max(COUNTER * (number - 1) + max(p.count for p in self.profiles), COUNTER * 2 * number)
        if one.op not in (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD):
            return 0
        memory = self.unit(one)
        if one.op is Op.RECOMPUTE:
            return memory.recompute
        if one.op is Op.FORWARD:
            return memory.forward if self.saves(one) else memory.forward_alone
        return memory.backward_again if (one.unit, one.microbatch) in self.recomputed else memory.backward

    def saves(self, one: Instruction) -> bool:
        """Whether a FORWARD is followed by BACKWARD with nothing run again."""
        return any(b.kind == "saved" for b in one.writes)
