"""The interpreter: a program of one rank, instruction by instruction.  There is no other control flow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core.instruction import Instruction, Op
from shardwise.core.program import Program
from shardwise.runtime.batch import Batch, StepInput, StepResult
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator, Handle
from shardwise.runtime.gathered import Gathered
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.messages import Messages
from shardwise.trace.multiply import Factors
from shardwise.trace.ops import Env
from shardwise.trace.products import Operand, watch
from shardwise.trace.recall import Tape
from shardwise.trace.trace import Trace
from shardwise.trace.units import Unit

if TYPE_CHECKING:
    from shardwise.runtime.recorder import Recorder


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
    # Gets the whole gradients of each batch, before clipping; on all ranks or none.
    keep_gradients: list[dict[str, Tensor]] | None = None
    apart: bool = False
    strict: bool = False
    offload: bool = False  # of activations
    recorder: Recorder | None = None

    def run(self, traces: Sequence[Trace], program: Program, given: StepInput) -> StepResult:
        """Execute a ``program`` of one batch; ``traces`` has one trace for each microbatch, alike but for static numbers of rows."""
        (result,) = self.results(traces, program, iter([given]))
        return result

    def results(self, traces: Sequence[Trace], program: Program, given: Iterator[StepInput]) -> Iterator[StepResult]:
        """Execute a program of several batches, taken from ``given`` when they begin; the results as they become known.

        The program has to be run to its end: other ranks wait.  ``traces`` are those of a batch.
        """
        memory = self.memory
        for pool, wanted in (
            (memory.slots, program.slots),
            (memory.unreduced, program.unreduced),
            (memory.stashes, program.stashes),
        ):
            pool.reserve(wanted, memory.buckets)
        return _Run(self, traces, program, given).run()


class _Saved(NamedTuple):
    """What a forward leaves for its backward: outputs with gradients, operands of products, and the parameters' leaves."""

    outputs: list[Tensor]
    operands: list[Operand]  # with references to gathered parameters
    leaves: list[Tensor]


@dataclass
class _Run:
    """The values of a program: live tensors, saved graphs, pending gradients and put-off products by unit and microbatch."""

    owner: Interpreter
    traces: Sequence[Trace]  # of the microbatches of a batch
    program: Program
    given: Iterator[StepInput]
    batches: dict[int, Batch] = field(default_factory=dict)  # under way
    live: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], _Saved] = field(default_factory=dict)
    tapes: dict[tuple[int, int], Tape] = field(default_factory=dict)
    pending: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    putoff: dict[tuple[int, int], deque[Factors]] = field(default_factory=dict)
    handles: dict[int, tuple[Instruction, Handle]] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        comm, owner, instructions = self.owner.comm, self.owner, self.program.instructions
        self.memory = owner.memory
        self.each = [*self.traces] * self.program.batches  # of all microbatches
        stashed = {one.bucket for one in instructions if one.op is Op.STASH}
        self.gathered = Gathered(self.memory, comm, owner.strict, owner.offload, stashed)
        self.gradients = Gradients(self.memory, comm, owner.strict)
        self.messages = Messages(comm, self.gradients, self.each, self.live, self.pending, owner.strict)
        # Where a stage decides for itself the norms of all are summed after that.
        norms = [one for one in instructions if one.op is Op.DECIDE or (one.op is Op.REDUCE and one.reads[0].kind == "norm")]
        self.alone = bool(norms) and norms[-1].op is Op.REDUCE
        scaling = self.memory.loss_scale
        self.scales = [] if scaling is None else [scaling.scale.clone()]  # by version of the weights
        self.batch(0)

    def batch(self, number: int) -> Batch:
        """A batch of the program."""
        if number not in self.batches:
            self.batches[number] = Batch(self.owner, self.traces, next(self.given))
        return self.batches[number]

    def place(self, microbatch: int) -> tuple[Batch, int]:
        """A microbatch's batch, and its number in there."""
        number, m = divmod(microbatch, len(self.traces))
        return self.batch(number), m

    def run(self) -> Iterator[StepResult]:
        owner = self.owner
        advance = getattr(owner.comm, "progress", None)
        # Not kept: a cycle would hold the batch and the buffers' new values until Python looks for cycles.
        run_op = {
            Op.FORWARD: self.forward, Op.RECOMPUTE: self.forward, Op.BACKWARD: self.backward, Op.BACKWARD_INPUT: self.backward,
            Op.BACKWARD_WEIGHT: self.backward_weight, Op.COUNT: self.count, Op.GATHER: self.gather, Op.ROUND: self.gradients.round,
            Op.REDUCE: self.reduce, Op.ADD: self.add, Op.NORM: self.take_norm, Op.DECIDE: self.decide, Op.STASH: self.gathered.stash,
            Op.STEP: self.update, Op.SEND: self.post, Op.RECEIVE: self.post, Op.REPORT: self.report,
        }  # fmt: skip
        skip = self.memory.halted
        for position, one in enumerate(self.program.instructions):
            if owner.progress is not None:
                owner.progress(position, one)
            for at in one.waits:
                self.wait(at)
            self.position = position
            if owner.recorder is None:
                run_op[one.op](one)
            else:
                owner.recorder.run(position, one, run_op[one.op])
            if position not in self.handles:
                self.free(one)
            if advance is not None and self.handles:
                advance()
            if one.op is Op.REPORT:
                over = self.batches.pop(one.version)
                skip = over.skip if self.program.batches == 1 else skip
                yield over.result(self.alone)
        for at in list(self.handles):
            self.wait(at)
        self.commit_buffers(skip)

    def wait(self, at: int) -> None:
        """Wait for an instruction and all before it in its queue: the latest of a queue stands for them in ``waits``."""
        queue = self.program.instructions[at].queue
        for earlier in [p for p, (one, _) in self.handles.items() if p <= at and one.queue == queue]:
            one, handle = self.handles.pop(earlier)
            handle.wait()
            if self.owner.recorder is not None:
                self.owner.recorder.arrived(earlier)
            self.free(one)

    def free(self, one: Instruction) -> None:
        """What ends with a completed instruction."""
        for buffer in one.frees:
            if buffer.kind in ("slot", "stash"):
                self.gathered.free(buffer)
            elif buffer.kind == "unreduced":
                self.gradients.free(buffer)
            elif buffer.kind == "activation":
                for name in self.each[buffer.microbatch].units[buffer.index].outputs:
                    self.live.pop((name, buffer.microbatch), None)
            elif buffer.kind == "received":
                self.messages.free(buffer)

    # ---- computing -------------------------------------------------------------------------------------------------

    def arguments(self, unit: Unit, microbatch: int, env: Env) -> list[Any]:
        memory, (batch, m) = self.memory, self.place(microbatch)
        return [
            *(self.gathered[n] for n in unit.parameters),
            *(self.updates.get(n, memory.buffers[n]) for n in unit.buffers),
            *unit.constants,
            *(batch.rows_of(n, m, env) for n in unit.fields),
            *(self.live[n, microbatch] for n in unit.inputs),
        ]

    def forward(self, one: Instruction) -> None:
        unit, m = self.each[one.microbatch].units[one.unit], one.microbatch
        batch, number = self.place(m)
        if self.scales:
            batch.scale = self.scales[one.version]
        self.gathered.version = one.version
        env = batch.env(number)
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
                batch.loss += detached.to(batch.wide) * batch.weight(number)
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
        unit, m = self.each[one.microbatch].units[one.unit], one.microbatch
        self.gathered.version = one.version
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

    def seed(self, name: str, microbatch: int, value: Tensor) -> Tensor | None:
        if name == "loss":
            batch, m = self.place(microbatch)
            return batch.seed(m, value)
        return self.pending.pop((name, microbatch), None)

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

    # ---- messages, reductions, the update ------------------------------------------------------------------------------

    def post(self, one: Instruction) -> None:
        """A message between stages."""
        env = None
        if one.microbatch >= 0:  # gradients of buckets are of none
            batch, m = self.place(one.microbatch)
            env = batch.env(m)
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
            return
        batch = self.batch(one.version)
        x = batch.norms if one.writes[0].kind == "norm" else batch.shared
        assert x is not None
        self.sum_over(one, x, one.writes[0].kind)

    def sum_over(self, one: Instruction, x: Tensor, what: str) -> None:
        if one.axes:
            self.handles[self.position] = (one, self.owner.comm.all_reduce(x, one.axes, lane=str(one.lane), what=what))

    def report(self, one: Instruction) -> None:
        """Nothing is left to do: :meth:`run` hands over the result."""

    def count(self, one: Instruction) -> None:
        self.sum_over(one, self.batch(one.version).count(self.gathered), "targets of the microbatches")

    def take_norm(self, one: Instruction) -> None:
        self.batch(one.version).take_norm(self.gradients)

    def decide(self, one: Instruction) -> None:
        self.batch(one.version).decide()
        if self.memory.loss_scale is not None and one.version + 1 < self.program.batches:
            self.scales.append(self.memory.loss_scale.scale.clone())

    def update(self, one: Instruction) -> None:
        self.batch(one.version).update(one)
        self.gradients.spent(one.bucket)

    @torch.no_grad()
    def commit_buffers(self, skip: Tensor) -> None:
        """Buffers written by forward change only if the step was not skipped; those of several batches, unless all has come to a halt."""
        for name, value in self.updates.items():
            buffer = self.memory.buffers[name]
            buffer.copy_(torch.where(skip != 0, buffer, value))
