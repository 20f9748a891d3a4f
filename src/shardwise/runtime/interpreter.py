"""The interpreter: one step of one rank, instruction by instruction.  There is no other control flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.core.instruction import Instruction, Lane, Op
from shardwise.core.layout import shard_range
from shardwise.core.program import Program
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.communicator import Communicator, Handle
from shardwise.trace.casts import cast_field
from shardwise.trace.ops import Env
from shardwise.trace.products import accumulate as accumulate_product
from shardwise.trace.recall import Tape
from shardwise.trace.trace import Trace
from shardwise.trace.units import Unit


@dataclass
class Memory:
    """What a rank keeps between steps."""

    buckets: list[BucketMemory]
    leaves: dict[str, Tensor]  # every parameter by name: views of buckets, and frozen ones
    buffers: dict[str, Tensor]
    halted: Tensor  # 1 after a non-finite norm: further steps are skipped until the host has looked


@dataclass
class StepInput:
    """One rank's part of a batch: rows of its microbatches one after the other, of a batch of ``rows`` rows in all.

    ``stop``: this rank has been asked to stop after the step, or soon after.
    """

    fields: Mapping[str, Tensor]
    rows: int
    step: int
    lr: float
    stop: bool = False


@dataclass
class StepResult:
    """Device tensors of a step: the loss of the whole batch, the gradient norm before clipping, and whether it was skipped.

    ``weight`` is what the loss is a mean over: the batch's targets if it is a mean cross-entropy, else its rows.  ``stop`` is the
    number of ranks that have been asked to stop, the same on all.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    weight: Tensor
    stop: Tensor


@dataclass
class Interpreter:
    """Runs programs of a rank.  ``progress(position, instruction)`` is called before each instruction."""

    comm: Communicator
    memory: Memory
    axes: tuple[str, ...]
    seed: int
    clip_norm: float | None = None
    progress: Callable[[int, Instruction], None] | None = None
    inspect: Callable[[int, str, list[Tensor]], None] | None = None  # (position, what, values): looks at what units produce
    keep_gradients: dict[str, Tensor] | None = None  # filled with each step's gradients, before clipping

    def run(self, traces: Sequence[Trace], program: Program, given: StepInput) -> StepResult:
        """Execute ``program`` on one batch; ``traces`` has one trace for each microbatch, alike but for static numbers of rows."""
        return _Step(self, traces, given).run(program)


@dataclass
class _Step:
    """The values of one step: live tensors, saved graphs and pending gradients by unit and microbatch."""

    owner: Interpreter
    traces: Sequence[Trace]
    given: StepInput
    live: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], tuple[list[Tensor], tuple[Any, ...]]] = field(default_factory=dict)
    tapes: dict[tuple[int, int], Tape] = field(default_factory=dict)
    pending: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    handles: dict[int, tuple[Lane, Handle]] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    counts: Tensor | None = None
    weights: Tensor | None = None
    written: set[str] = field(default_factory=set)  # parameters whose gradient buffer is of this step

    def __post_init__(self) -> None:
        comm = self.owner.comm
        self.microbatches = len(self.traces)
        self.memory = self.owner.memory
        self.gradients = {n: g for b in self.memory.buckets for n, g in b.grads.items()}
        self.parts = comm.mesh.axis_size(self.owner.axes)
        self.index = comm.mesh.index(comm.rank, self.owner.axes)
        self.fields = {k: cast_field(v, self.traces[0].precision).to(comm.device) for k, v in self.given.fields.items()}
        # A wish to stop travels with the loss: all ranks learn of it in the same step, at no cost.
        self.shared = torch.zeros(2, dtype=self.wide, device=comm.device)
        self.loss, stop = self.shared
        if self.given.stop:
            stop.fill_(1.0)
        self.norm = torch.zeros((), dtype=self.wide, device=comm.device)
        self.coefficient: Tensor | None = None
        self.start: list[int] = []
        taken = 0
        for m in range(self.microbatches):
            self.start.append(taken)
            a, b = self.env(m).range()
            taken += b - a
        self.run_op = {
            Op.FORWARD: self.forward, Op.RECOMPUTE: self.forward, Op.BACKWARD: self.backward, Op.COUNT: self.count,
            Op.REDUCE: self.reduce, Op.NORM: self.take_norm, Op.STEP: self.update,
        }  # fmt: skip

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.traces[0].precision == "fp64" else torch.float32

    def run(self, program: Program) -> StepResult:
        owner = self.owner
        advance = getattr(owner.comm, "progress", None)
        for position, one in enumerate(program.instructions):
            if owner.progress is not None:
                owner.progress(position, one)
            for at in one.waits:
                self.wait(at, program)
            self.position = position
            self.run_op[one.op](one)
            if advance is not None and self.handles:
                advance()
        for at in list(self.handles):
            self.wait(at, program)
        self.commit_buffers()
        return StepResult(self.loss, self.norm, self.memory.halted.clone(), self.amount(), self.shared[1])

    def amount(self) -> Tensor:
        """What the batch weighs among others."""
        # Not torch.tensor: a copy to the GPU that the host waits for.
        return torch.full((), self.given.rows, device=self.owner.comm.device) if self.counts is None else self.counts.sum()

    def wait(self, at: int, program: Program) -> None:
        """Wait for an instruction and all before it on its lane: the latest of a lane stands for them in ``waits``."""
        lane = program.instructions[at].lane
        for earlier in [p for p, (of, _) in self.handles.items() if p <= at and of is lane]:
            self.handles.pop(earlier)[1].wait()

    def env(self, m: int) -> Env:
        first, last = shard_range(self.given.rows, self.microbatches, m)
        comm = self.owner.comm
        return Env(
            comm, self.owner.axes, self.parts, self.index, last - first, first, self.owner.seed, self.given.step,
            targets=None if self.counts is None else self.counts[m],
        )  # fmt: skip

    # ---- computing -------------------------------------------------------------------------------------------------

    def rows_of(self, name: str, m: int, env: Env) -> Tensor:
        a, b = env.range()
        return self.fields[name].narrow(0, self.start[m], b - a)

    def arguments(self, unit: Unit, m: int, env: Env) -> list[Any]:
        memory = self.memory
        return [
            *(memory.leaves[n] for n in unit.parameters),
            *(self.updates.get(n, memory.buffers[n]) for n in unit.buffers),
            *unit.constants,
            *(self.rows_of(n, m, env) for n in unit.fields),
            *(self.live[n, m] for n in unit.inputs),
        ]

    def forward(self, one: Instruction) -> None:
        unit, m = self.traces[one.microbatch].units[one.unit], one.microbatch
        env = self.env(m)
        env.ordinal = unit.ordinal
        again = one.op is Op.RECOMPUTE
        keep, record = self.saves(one, unit, "saved"), self.saves(one, unit, "kept")
        env.tape = self.tapes.pop((unit.index, m), None)
        if record:
            env.tape = self.tapes[unit.index, m] = Tape()
        arguments = self.arguments(unit, m, env)
        function = unit.training_function if (keep or record) and unit.training_function is not None else unit.function
        with env.tape.record() if record else torch.set_grad_enabled(keep):
            outputs = function(env, *arguments)
        own = len(unit.outputs) + len(unit.updates)
        outputs, operands = outputs[:own], outputs[own:]
        if keep:
            good = [o for o, g in zip(outputs, unit.output_grads, strict=False) if g]
            self.saved[unit.index, m] = (good, operands)
        if again:
            return
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "output", [*outputs])
        for name, value, grad in zip(unit.outputs, outputs, unit.output_grads, strict=False):
            detached = value.detach()
            if name == "loss":
                self.loss += detached.to(self.wide) * self.weight(m)
            else:
                self.live[name, m] = detached.requires_grad_() if grad else detached
        for name, value in zip(unit.updates, outputs[len(unit.outputs) :], strict=True):
            self.updates[name] = value.detach()

    def saves(self, one: Instruction, unit: Unit, kind: str) -> bool:
        return unit.differentiable and any(b.kind == kind for b in one.writes)

    def backward(self, one: Instruction) -> None:
        unit, m = self.traces[one.microbatch].units[one.unit], one.microbatch
        outputs, operands = self.saved.pop((unit.index, m))
        names = [n for n, g in zip(unit.outputs, unit.output_grads, strict=True) if g]
        seeds = [
            (value, seed) for name, value in zip(names, outputs, strict=True) if (seed := self.seed(name, m, value)) is not None
        ]
        parameters = [n for n in unit.parameters if self.memory.leaves[n].requires_grad]
        live = [n for n, g in zip(unit.inputs, unit.input_grads, strict=True) if g]
        later = self.watch(unit, operands)
        wanted = [*(self.memory.leaves[n] for n in parameters), *(self.live[n, m] for n in live), *(y for _, _, y in later)]
        kept, given = zip(*seeds, strict=True)
        grads = torch.autograd.grad(kept, wanted, given, allow_unused=True)
        del outputs, operands, kept, seeds
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "gradient", [g for g in grads if g is not None])
        own, rest = grads[: len(parameters)], grads[len(parameters) :]
        for name, grad in zip(parameters, own, strict=True):
            if grad is not None:
                self.add_gradient(name, grad)
        for (name, x, _), dy in zip(later, rest[len(live) :], strict=True):
            if dy is not None:
                self.add_product(name, dy, x)
        self.zero_rest(one)
        for name, grad in zip(live, rest[: len(live)], strict=True):
            if grad is not None:
                before = self.pending.get((name, m))
                self.pending[name, m] = grad if before is None else before + grad
        for name in unit.outputs:
            self.live.pop((name, m), None)

    def watch(self, unit: Unit, operands: tuple[Any, ...]) -> list[tuple[str, Tensor, Any]]:
        """Have weight gradients dYᵀX multiplied as soon as backward has dY, while it is in the cache.

        Returns (weight, X, edge of Y) of the linears that backward would not pass, as nothing before them has a gradient.
        """
        later = []
        for name, x, y in zip(unit.products, operands[::2], operands[1::2], strict=bool(unit.products)):
            if not x.requires_grad:
                later.append((name, x, y))
                continue
            x = x.detach()

            def arrive(grads: Sequence[Tensor | None], name: str = name, x: Tensor = x, at: int = y.output_nr) -> None:
                dy = grads[at]
                if dy is not None:
                    self.add_product(name, dy, x)

            y.node.register_prehook(arrive)
        return later

    def seed(self, name: str, m: int, value: Tensor) -> Tensor | None:
        if name == "loss":
            return self.weight(m).to(value.dtype)
        return self.pending.pop((name, m), None)

    def add_gradient(self, name: str, grad: Tensor) -> None:
        """Add to the gradient buffer; the first of a step overwrites what the last step left there."""
        goal = self.gradients[name]
        goal.add_(grad) if name in self.written else goal.copy_(grad)
        self.written.add(name)

    def add_product(self, name: str, dy: Tensor, x: Tensor) -> None:
        """The same with dYᵀX, which is multiplied straight into the buffer."""
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "gradient", [dy])
        accumulate_product(self.gradients[name], dy, x, name in self.written)
        self.written.add(name)

    def zero_rest(self, one: Instruction) -> None:
        """Gradients that the first backward of a bucket has not reached."""
        for index in one.first:
            for name, goal in self.memory.buckets[index].grads.items():
                if name not in self.written:
                    goal.zero_()
                    self.written.add(name)

    # ---- weights, reductions, the step -------------------------------------------------------------------------------

    def weight(self, m: int) -> Tensor:
        """w_m: the microbatch's share of targets, or of rows, as a device tensor."""
        if self.counts is None:
            first, last = shard_range(self.given.rows, self.microbatches, m)
            return torch.full((), (last - first) / self.given.rows, dtype=self.wide, device=self.owner.comm.device)
        if self.weights is None:
            counts = self.counts.to(self.wide)
            self.weights = counts / counts.sum()
        return self.weights[m]

    def count(self, one: Instruction) -> None:
        self.counts = torch.stack([self.counted(m) for m in range(self.microbatches)])
        self.collective(one, self.counts, "targets of the microbatches")

    def counted(self, m: int) -> Tensor:
        """Valid targets in this rank's rows of a microbatch."""
        targets, env = self.traces[m].targets, self.env(m)
        assert targets is not None
        memory = self.memory
        values = [*(memory.leaves[n] for n in targets.leaves), *(memory.buffers[n] for n in targets.buffers), *targets.constants]
        with torch.no_grad():
            return targets.count(env, *values, *(self.rows_of(n, m, env) for n in targets.fields))

    def reduce(self, one: Instruction) -> None:
        if one.bucket < 0:
            self.collective(one, self.shared, "loss")
        else:
            self.collective(one, self.memory.buckets[one.bucket].grad, f"gradient bucket {one.bucket}")

    def collective(self, one: Instruction, x: Tensor, what: str) -> None:
        if one.axes:
            self.handles[self.position] = (one.lane, self.owner.comm.all_reduce(x, one.axes, lane=str(one.lane), what=what))

    def take_norm(self, one: Instruction) -> None:
        """The norm over every parameter once, in at least fp32; decides clipping and skipping without the host."""
        if self.owner.keep_gradients is not None:
            self.owner.keep_gradients |= {n: g.clone() for b in self.memory.buckets for n, g in b.grads.items()}
        squares = [torch.linalg.vector_norm(b.grad) for b in self.memory.buckets]
        self.norm = torch.linalg.vector_norm(torch.stack(squares)).to(self.wide)
        bad = (~torch.isfinite(self.norm)).to(torch.float32)
        torch.maximum(self.memory.halted, bad, out=self.memory.halted)
        if self.owner.clip_norm is not None:
            self.coefficient = (self.owner.clip_norm / (self.norm + 1e-6)).clamp(max=1.0)

    def update(self, one: Instruction) -> None:
        bucket = self.memory.buckets[one.bucket]
        bucket.optimizer.step(self.given.lr, self.coefficient, self.memory.halted)
        bucket.publish()

    @torch.no_grad()
    def commit_buffers(self) -> None:
        """Buffers written by forward change only if the step was not skipped."""
        for name, value in self.updates.items():
            buffer = self.memory.buffers[name]
            buffer.copy_(torch.where(self.memory.halted != 0, buffer, value))
