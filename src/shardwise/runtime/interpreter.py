"""The interpreter: one step of one rank, instruction by instruction.  There is no other control flow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core.instruction import Buffer, Instruction, Op
from shardwise.core.layout import shard_range
from shardwise.core.program import Program
from shardwise.parallel.data import SHARDS
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator, Handle
from shardwise.runtime.gathered import Gathered
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.messages import Messages
from shardwise.trace.casts import cast_field
from shardwise.trace.multiply import Factors
from shardwise.trace.ops import Env
from shardwise.trace.products import Operand, watch
from shardwise.trace.recall import Tape
from shardwise.trace.trace import Parameter, Trace
from shardwise.trace.units import Unit

if TYPE_CHECKING:
    from shardwise.runtime.recorder import Recorder


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
    number of ranks that have been asked to stop, the same on all.  Under fp16 ``scale`` is what the loss was multiplied by, and
    ``overflows`` the number of skipped steps in a row.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    weight: Tensor
    stop: Tensor
    scale: Tensor | None = None
    overflows: Tensor | None = None


@dataclass
class Interpreter:
    """Runs programs of a rank.  ``progress(position, instruction)`` is called before each instruction.

    ``axes`` are those of the batch.  ``learning`` are the indices of all buckets that learn, on whatever rank; ``counted`` those whose norm
    this rank counts: of several ranks that have a bucket one does.  ``apart``: parameters that no backward of a step reaches on any rank take no step.  ``strict``
    fills memory with NaN as soon as the program says that its content has ended.
    """

    comm: Communicator
    memory: RankMemory
    axes: tuple[str, ...]
    seed: int
    learning: tuple[int, ...]
    counted: tuple[int, ...]
    clip_norm: float | None = None
    progress: Callable[[int, Instruction], None] | None = None
    inspect: Callable[[int, str, list[Tensor]], None] | None = None  # (position, what, values): looks at what units produce
    keep_gradients: dict[str, Tensor] | None = (
        None  # filled with each step's whole gradients, before clipping; on all ranks or none
    )
    apart: bool = False
    strict: bool = False
    offload: bool = False  # of activations
    recorder: Recorder | None = None

    def run(self, traces: Sequence[Trace], program: Program, given: StepInput) -> StepResult:
        """Execute ``program`` on one batch; ``traces`` has one trace for each microbatch, alike but for static numbers of rows."""
        memory = self.memory
        memory.slots.reserve(program.slots, memory.buckets)
        memory.unreduced.reserve(program.unreduced, memory.buckets)
        return _Step(self, traces, given).run(program)


class _Saved(NamedTuple):
    """What a forward leaves for its backward: outputs with gradients, operands of products, and the parameters' leaves."""

    outputs: list[Tensor]
    operands: list[Operand]  # with references to gathered parameters
    leaves: list[Tensor]


@dataclass
class _Step:
    """The values of one step: live tensors, saved graphs, pending gradients and put-off products by unit and microbatch."""

    owner: Interpreter
    traces: Sequence[Trace]
    given: StepInput
    live: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], _Saved] = field(default_factory=dict)
    tapes: dict[tuple[int, int], Tape] = field(default_factory=dict)
    pending: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    putoff: dict[tuple[int, int], deque[Factors]] = field(default_factory=dict)
    handles: dict[int, tuple[Instruction, Handle]] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    counts: Tensor | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        comm = self.owner.comm
        self.microbatches = len(self.traces)
        self.memory = self.owner.memory
        self.gathered = Gathered(self.memory, comm, self.owner.strict, self.owner.offload)
        self.gradients = Gradients(self.memory, comm, self.owner.strict)
        self.messages = Messages(comm, self.gradients, self.traces, self.live, self.pending, self.owner.strict)
        self.parts = comm.mesh.axis_size(self.owner.axes)
        self.index = comm.mesh.index(comm.rank, self.owner.axes)
        self.fields = {k: cast_field(v, self.traces[0].precision).to(comm.device) for k, v in self.given.fields.items()}
        # A wish to stop travels with the loss: all ranks learn of it in the same step, at no cost.
        self.shared = torch.zeros(2, dtype=self.wide, device=comm.device)
        self.loss, stop = self.shared
        if self.given.stop:
            stop.fill_(1.0)
        self.norm = torch.zeros((), dtype=self.wide, device=comm.device)
        self.norms: Tensor | None = None  # by rank and bucket; under ``apart`` also whether each parameter was reached
        self.coefficient: Tensor | None = None
        self.skip = self.memory.halted
        self.scale = None if self.memory.loss_scale is None else self.memory.loss_scale.scale.clone()
        self.unreached: dict[str, Tensor] = {}  # 1 for parameters that no rank has a gradient of
        self.start: list[int] = []
        taken = 0
        for m in range(self.microbatches):
            self.start.append(taken)
            a, b = self.env(m).range()
            taken += b - a

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.traces[0].precision == "fp64" else torch.float32

    def run(self, program: Program) -> StepResult:
        owner = self.owner
        advance = getattr(owner.comm, "progress", None)
        # Not kept: a cycle would hold the batch and the buffers' new values until Python looks for cycles.
        run_op = {
            Op.FORWARD: self.forward, Op.RECOMPUTE: self.forward, Op.BACKWARD: self.backward, Op.BACKWARD_INPUT: self.backward,
            Op.BACKWARD_WEIGHT: self.backward_weight, Op.COUNT: self.count, Op.GATHER: self.gather, Op.ROUND: self.gradients.round,
            Op.REDUCE: self.reduce, Op.ADD: self.add, Op.NORM: self.take_norm, Op.DECIDE: self.decide, Op.STEP: self.update,
            Op.SEND: self.post, Op.RECEIVE: self.post,
        }  # fmt: skip
        for position, one in enumerate(program.instructions):
            if owner.progress is not None:
                owner.progress(position, one)
            for at in one.waits:
                self.wait(at, program)
            self.position = position
            if owner.recorder is None:
                run_op[one.op](one)
            else:
                owner.recorder.run(position, one, run_op[one.op])
            if position not in self.handles:
                self.free(one)
            if advance is not None and self.handles:
                advance()
        for at in list(self.handles):
            self.wait(at, program)
        self.commit_buffers()
        fp16 = (
            () if self.scale is None or self.memory.loss_scale is None else (self.scale, self.memory.loss_scale.overflows.clone())
        )
        return StepResult(self.loss, self.norm, self.skip.clone(), self.amount(), self.shared[1], *fp16)

    def amount(self) -> Tensor:
        """What the batch weighs among others."""
        # Not torch.tensor: a copy to the GPU that the host waits for.
        return torch.full((), self.given.rows, device=self.owner.comm.device) if self.counts is None else self.counts.sum()

    def wait(self, at: int, program: Program) -> None:
        """Wait for an instruction and all before it in its queue: the latest of a queue stands for them in ``waits``."""
        queue = program.instructions[at].queue
        for earlier in [p for p, (one, _) in self.handles.items() if p <= at and one.queue == queue]:
            one, handle = self.handles.pop(earlier)
            handle.wait()
            if self.owner.recorder is not None:
                self.owner.recorder.arrived(earlier)
            self.free(one)

    def free(self, one: Instruction) -> None:
        """What ends with a completed instruction."""
        for buffer in one.frees:
            if buffer.kind == "slot":
                self.gathered.free(buffer)
            elif buffer.kind == "unreduced":
                self.gradients.free(buffer)
            elif buffer.kind == "activation":
                for name in self.traces[buffer.microbatch].units[buffer.index].outputs:
                    self.live.pop((name, buffer.microbatch), None)
            elif buffer.kind == "received":
                self.messages.free(buffer)

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
            *(self.gathered[n] for n in unit.parameters),
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
        with env.tape.record() if record else self.autograd(keep):
            outputs = function(env, *arguments)
        own = len(unit.outputs) + len(unit.updates)
        outputs, operands = outputs[:own], outputs[own:]
        if keep:
            good = [o for o, g in zip(outputs, unit.output_grads, strict=False) if g]
            kept = [one._replace(x=self.gathered.keep(one.x)) for one in map(Operand._make, operands)]
            self.saved[unit.index, m] = _Saved(good, kept, arguments[: len(unit.parameters)])
        if again:
            return
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "output", [*outputs])
        for name, value, grad in zip(unit.outputs, outputs, unit.output_grads, strict=False):
            detached = self.gathered.own(value.detach())
            if name == "loss":
                self.loss += detached.to(self.wide) * self.weight(m)
            else:
                self.live[name, m] = detached.requires_grad_() if grad else detached
        for name, value in zip(unit.updates, outputs[len(unit.outputs) :], strict=True):
            self.updates[name] = self.gathered.own(value.detach(), update=True)

    def saves(self, one: Instruction, unit: Unit, kind: str) -> bool:
        return unit.differentiable and any(b.kind == kind for b in one.writes)

    @contextmanager
    def autograd(self, keep: bool) -> Iterator[None]:
        """Whether autograd follows, and how it keeps parameters if it does."""
        with torch.set_grad_enabled(keep), self.gathered.references() if keep else nullcontext():
            yield

    def backward(self, one: Instruction) -> None:
        """BACKWARD, or all of it but the weight gradients of products."""
        unit, m = self.traces[one.microbatch].units[one.unit], one.microbatch
        self.gradients.begin(one)
        for buffer in one.reads:
            if buffer.kind == "received":
                self.take_gradients(self.messages.received[buffer], m)
        add = self.multiply if one.op is Op.BACKWARD else self.put_off(self.putoff.setdefault((unit.index, m), deque()))
        outputs, operands, leaves = self.saved.pop((unit.index, m))
        names = [n for n, g in zip(unit.outputs, unit.output_grads, strict=True) if g]
        seeds = [
            (value, seed) for name, value in zip(names, outputs, strict=True) if (seed := self.seed(name, m, value)) is not None
        ]
        parameters = {n: leaf for n, leaf in zip(unit.parameters, leaves, strict=True) if leaf.requires_grad}
        live = [n for n, g in zip(unit.inputs, unit.input_grads, strict=True) if g]
        later = watch(unit.products, [p._replace(x=self.gathered.resolve(p.x)) for p in operands], add)
        wanted: list[Any] = [*parameters.values(), *(self.live[n, m] for n in live), *(p.y for _, p in later)]
        kept, given = zip(*seeds, strict=True)
        del operands  # each X ends when it has been multiplied
        grads = torch.autograd.grad(kept, wanted, given, allow_unused=True)
        del outputs, kept, seeds
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "gradient", [g for g in grads if g is not None])
        own, rest = grads[: len(parameters)], grads[len(parameters) :]
        for name, grad in zip(parameters, own, strict=True):
            if grad is not None:
                self.gradients.add(name, grad)
        for (name, operand), dy in zip(later, rest[len(live) :], strict=True):
            if dy is not None:
                add(operand.factors(name, dy))
        for name, grad in zip(live, rest[: len(live)], strict=True):
            if grad is not None:
                self.take_gradients({name: grad}, m)

    def take_gradients(self, grads: Mapping[str, Tensor], m: int) -> None:
        """Add to what waits for the units that made these live tensors."""
        for name, grad in grads.items():
            before = self.pending.get((name, m))
            self.pending[name, m] = grad if before is None else before + grad

    def seed(self, name: str, m: int, value: Tensor) -> Tensor | None:
        if name == "loss":
            weight = self.weight(m)
            return (weight if self.scale is None else weight * self.scale).to(value.dtype)
        return self.pending.pop((name, m), None)

    def backward_weight(self, one: Instruction) -> None:
        """The weight gradients that BACKWARD_INPUT has put off."""
        self.gradients.begin(one)
        factors = self.putoff.pop((one.unit, one.microbatch))
        while factors:
            self.gradients.add_product(factors.popleft())

    def multiply(self, factors: Factors) -> None:
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "gradient", [factors.dy])
        self.gradients.add_product(factors)

    def put_off(self, held: deque[Factors]) -> Callable[[Factors], None]:
        """Keeps factors for later; copies what lies in a slot, which may hold another bucket by then."""
        own = self.gathered.own

        def add(factors: Factors) -> None:
            if self.owner.inspect is not None:
                self.owner.inspect(self.position, "gradient", [factors.dy])
            held.append(factors._replace(dy=own(factors.dy), x=own(factors.x)))

        return add

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
        self.sum_over(one, self.counts, "targets of the microbatches")

    def counted(self, m: int) -> Tensor:
        """Valid targets in this rank's rows of a microbatch."""
        targets, env = self.traces[m].targets, self.env(m)
        assert targets is not None
        memory = self.memory
        values = [*(self.gathered[n] for n in targets.leaves), *(memory.buffers[n] for n in targets.buffers), *targets.constants]
        with torch.no_grad():
            return targets.count(env, *values, *(self.rows_of(n, m, env) for n in targets.fields))

    def post(self, one: Instruction) -> None:
        """A message between stages."""
        env = self.env(max(one.microbatch, 0))  # gradients of buckets are of no microbatch
        handle = self.messages.send(one, env) if one.op is Op.SEND else self.messages.receive(one, env)
        self.handles[self.position] = (one, handle)

    def add(self, one: Instruction) -> None:
        """To a bucket's gradient, from a slot or from another rank."""
        if one.slot >= 0:
            self.gradients.take(one)
        else:
            (value,) = self.messages.received[one.reads[0]].values()
            self.gradients.final(one.bucket).add_(value)

    def gather(self, one: Instruction) -> None:
        self.handles[self.position] = (one, self.gathered.gather(one))

    def reduce(self, one: Instruction) -> None:
        if one.bucket >= 0:
            self.handles[self.position] = (one, self.gradients.reduce(one))
        elif Buffer("loss") in one.writes:
            self.sum_over(one, self.shared, "loss")
        else:
            assert self.norms is not None
            self.sum_over(one, self.norms, "norms")

    def sum_over(self, one: Instruction, x: Tensor, what: str) -> None:
        if one.axes:
            self.handles[self.position] = (one, self.owner.comm.all_reduce(x, one.axes, lane=str(one.lane), what=what))

    def take_norm(self, one: Instruction) -> None:
        """Each rank takes the norms of its own shards, whoever else has them: all kinds of data parallelism get the same bits."""
        owner, nothing = self.owner, torch.zeros((), dtype=self.wide, device=self.owner.comm.device)
        row = torch.stack([self.gradients.norm(b).to(self.wide) if b in owner.counted else nothing for b in owner.learning])
        if owner.apart:
            flags = [float(p.name in self.gradients.reached) for p in self.learning()]
            row = torch.cat([row, torch.tensor(flags, dtype=self.wide).to(row.device)])
        self.norms = torch.zeros(self.parts, row.numel(), dtype=self.wide, device=row.device)
        self.norms[self.index] = row

    def decide(self, one: Instruction) -> None:
        """The norm over every parameter once decides clipping and skipping, without the host."""
        assert self.norms is not None
        learning = len(self.owner.learning)
        shards = self.owner.comm.mesh.axis_size(SHARDS)  # further rows are those of replicas
        self.norm = torch.linalg.vector_norm(self.norms[:shards, :learning])
        bad = (~torch.isfinite(self.norm)).to(torch.float32)
        if self.scale is not None:
            self.norm = self.norm / self.scale
        if self.owner.clip_norm is not None:
            self.coefficient = (self.owner.clip_norm / (self.norm + 1e-6)).clamp(max=1.0)
        if self.scale is not None:
            self.coefficient = self.scale.reciprocal() if self.coefficient is None else self.coefficient / self.scale
        self.skip_if(bad)
        if self.owner.apart:
            unreached = (self.norms[:, learning:].sum(0) == 0).to(torch.float32)
            self.unreached = dict(zip((p.name for p in self.learning()), unreached, strict=True))
        if self.owner.keep_gradients is not None:
            self.keep(self.owner.keep_gradients)

    def learning(self) -> list[Parameter]:
        """The parameters that learn of a model whose ranks have them all."""
        return [p for b in self.owner.learning for p in self.memory.buckets[b].bucket.parameters]

    def skip_if(self, bad: Tensor) -> None:
        """A norm that is not finite skips the step.  Under fp16 the scale may be to blame, and goes down; else all is halted."""
        memory, scaling = self.memory, self.memory.loss_scale
        self.skip = torch.maximum(memory.halted, bad)
        if scaling is not None:
            scaling.update(self.skip)
            bad = (scaling.overflows >= scaling.choice.patience).to(torch.float32)
        torch.maximum(memory.halted, bad, out=memory.halted)

    def keep(self, found: dict[str, Tensor]) -> None:
        """Whole gradients of what was reached, for those who compare."""
        for b in self.memory.buckets.values():
            if b.grad is not None:
                whole = b.whole(b.final_gradient, self.owner.comm, "gradients")
                if self.scale is not None:
                    whole /= self.scale
                found |= {name: g for name, g in b.views(whole).items() if not bool(self.unreached.get(name, 0))}

    def update(self, one: Instruction) -> None:
        bucket, coefficient = self.memory.buckets[one.bucket], self.coefficient
        assert bucket.taken is not None
        if bucket.taken.data_ptr() != bucket.final_gradient.data_ptr():  # the host takes the step
            bucket.taken.copy_(bucket.final_gradient)
        for optimizer, name in bucket.updates:
            skip = self.skip if name is None else torch.maximum(self.skip, self.unreached[name])
            optimizer.step(
                self.given.lr, None if coefficient is None else coefficient.to(bucket.taken.device), skip.to(bucket.taken.device)
            )
        bucket.publish()

    @torch.no_grad()
    def commit_buffers(self) -> None:
        """Buffers written by forward change only if the step was not skipped."""
        for name, value in self.updates.items():
            buffer = self.memory.buffers[name]
            buffer.copy_(torch.where(self.skip != 0, buffer, value))
