"""This runs the forward and backward of a rank's units, and holds what lives between the two."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.core.fields import is_kept
from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.ops.collectives import Moving
from shardwise.ops.env import Env
from shardwise.ops.weight_gradients import GradientFactors
from shardwise.runtime.batch import BatchStates
from shardwise.runtime.gathered import Gathered
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.handles import Handle
from shardwise.runtime.rank_context import RankContext
from shardwise.units.selective_recompute import Tape
from shardwise.units.trace import Trace, Unit
from shardwise.units.unit_backward import Saved, UnitBackward
from shardwise.units.weight_products import Operand


class Arriving:
    """The handle of what a unit of moves has posted; ``arrive`` waits for that and puts it in its place."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive: Callable[[], None] | None = arrive

    def wait(self) -> None:
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()


@dataclass
class Computing(UnitBackward):
    """This runs the units of ``traces``, one trace for each microbatch.  It holds live tensors, saved graphs, pending
    gradients and deferred products by microbatch, and the ``updates`` of buffers, which are written only at the end;
    ``starts`` are, by name, the last batch that has updated a buffer, and the value that it began with.  The
    batches get the values that are kept beside the loss.

    ``received`` are gradients from other ranks; ``position`` is the running instruction's position in its program.
    """

    owner: RankContext
    traces: Sequence[Trace]
    batches: BatchStates
    gathered: Gathered
    gradients: Gradients
    received: dict[Buffer, dict[str, Tensor]] = field(default_factory=dict)
    live: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    moved: dict[tuple[int, int], Sequence[Any]] = field(default_factory=dict)  # what units of moves have returned
    tapes: dict[tuple[int, int], Tape] = field(default_factory=dict)
    deferred: dict[tuple[int, int], deque[GradientFactors]] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    starts: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    position: int = -1

    def __post_init__(self) -> None:
        super().__init__()

    def drop(self) -> None:
        """Drop all that forwards have left."""
        for values in (self.live, self.saved, self.moved, self.tapes):
            values.clear()

    def free(self, buffer: Buffer) -> None:
        """Drop the live tensors of a unit and microbatch."""
        for name in self.traces[buffer.microbatch].units[buffer.index].outputs:
            self.live.pop((name, buffer.microbatch), None)

    def buffer(self, name: str, microbatch: int) -> Tensor:
        """Return the value of a buffer that a microbatch reads: the one that it had when the batch began, or the last
        one where each microbatch writes a value of its own."""
        batch, value = self.starts.get(name, (-1, None))
        if value is not None and batch == self.batches.number(microbatch):
            return value
        return self.updates.get(name, self.owner.memory.buffers[name])

    def update(self, name: str, value: Tensor, microbatch: int) -> None:
        """Take the new value of a buffer."""
        batch = self.batches.number(microbatch)
        if name not in self.traces[microbatch].sequential and self.starts.get(name, (-1,))[0] != batch:
            self.starts[name] = batch, self.updates.get(name, self.owner.memory.buffers[name])
        elif name in self.traces[microbatch].added:
            value = self.updates[name] + (value - self.starts[name][1])
        self.updates[name] = value

    def arguments(self, unit: Unit, microbatch: int, env: Env) -> list[Any]:
        memory, (batch, m) = self.owner.memory, self.batches.place(microbatch)
        return [
            *(self.gathered[n] for n in unit.parameters),
            *(self.buffer(n, microbatch) for n in unit.buffers),
            *map(memory.resident, unit.constants),
            *(batch.rows_of(n, m, env) for n in unit.fields),
            *(self.live[n, k] for n in unit.inputs for k in self.sources(unit, n, microbatch)),
        ]

    def sources(self, unit: Unit, name: str, microbatch: int) -> range:
        """Return the microbatches whose values a unit takes as an input."""
        return unit.sources(name in self.traces[microbatch].shared, microbatch, len(self.batches.traces))

    def forward(self, one: Instruction) -> Handle | None:
        """Run FORWARD or RECOMPUTE; return a handle where it only posts what other ranks have to do with it."""
        unit, m = self.traces[one.microbatch].units[one.unit], one.microbatch
        if unit.moves is not None:
            return self.move(one, unit)
        batch, number = self.batches.place(m)
        batch.version = self.gathered.version = one.version
        env = unit.place(batch.env(number), len(self.batches.traces))
        env.ordinal, env.meanwhile = unit.ordinal, self.flush if env.tensor else None
        env.again = again = one.op is Op.RECOMPUTE
        left = {buffer.kind for buffer in one.writes} if unit.differentiable else set()
        keep, record = BufferKind.SAVED in left, BufferKind.KEPT in left
        env.tape = self.tapes.pop((unit.index, m), None)
        if record:
            env.tape = self.tapes[unit.index, m] = Tape()
        arguments = self.arguments(unit, m, env)
        function = unit.training_function if (keep or record) and unit.training_function is not None else unit.function
        with env.tape.record() if record else self.autograd(keep):
            outputs = function(env, *unit.merged(arguments))
        own = len(unit.outputs) + len(unit.updates)
        outputs, operands = outputs[:own], outputs[own:]
        if keep:
            kept = [one._replace(x=self.gathered.keep(one.x)) for one in map(Operand._make, operands)]
            leaves = arguments[: len(unit.parameters)]
            self.saved[unit.index, m] = Saved.of(unit, outputs, kept, leaves, self.gathered.holds)
        if not again or any(buffer.kind == BufferKind.ACTIVATION for buffer in one.writes):
            self.publish(unit, m, outputs)
        if again:
            return None
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "output", [*outputs])
        for name, value in zip(unit.updates, outputs[len(unit.outputs) :], strict=True):
            new = self.gathered.own(value.detach(), update=True)
            if is_kept(name):
                batch.keep(name, number, new)
            else:
                self.update(name, new, m)
        return None

    def publish(self, unit: Unit, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Make a unit's outputs live, and add its loss to the batch's."""
        for name, value, grad in zip(unit.outputs, outputs, unit.output_grads, strict=False):
            detached = self.gathered.own(value.detach())
            if name == "loss":
                batch, number = self.batches.place(microbatch)
                batch.loss += detached.to(batch.wide) * batch.weight(number)
            else:
                self.live[name, microbatch] = detached.requires_grad_() if grad else detached

    @contextmanager
    def autograd(self, keep: bool) -> Iterator[None]:
        """Let autograd record if ``keep``, and then keep references to gathered parameters."""
        with torch.set_grad_enabled(keep), self.gathered.references() if keep else nullcontext():
            yield

    # ---- units of moves --------------------------------------------------------------------------------------------

    def move(self, one: Instruction, unit: Unit) -> Handle | None:
        """Post the FORWARD or RECOMPUTE of a unit of moves; its outputs are live after the handle's wait."""
        batch, number = self.batches.place(one.microbatch)
        env = batch.env(number)
        env.lane, env.posts = str(Lane.MOVE), True  # also where gradients alone travel
        moving = unit.function(env, *self.arguments(unit, one.microbatch, env))
        self.moved[unit.index, one.microbatch] = [x.back if isinstance(x, Moving) else None for x in moving]

        def arrive() -> None:
            found = [x.result() if isinstance(x, Moving) else x for x in moving]
            if self.owner.inspect is not None and one.op is Op.FORWARD:
                self.owner.inspect(position, "output", found)
            self.publish(unit, one.microbatch, found)

        position = self.position
        return self.under_way(one, arrive)

    def move_back(self, one: Instruction, unit: Unit) -> Handle | None:
        """Post the BACKWARD of a unit of moves."""
        assert unit.moves is not None
        m, position = one.microbatch, self.position
        batch, number = self.batches.place(m)
        env = batch.env(number)
        ways = self.moved.pop((unit.index, m))
        moving: list[tuple[str, Any]] = []
        for name, source, back, learns in zip(unit.outputs, unit.moves.inputs, ways, unit.output_grads, strict=True):
            if learns and (gradient := self.pending.pop((name, m), None)) is not None:
                moving.append((source, gradient if back is None else Moving(env, back(gradient))))
            gradient = None

        def arrive() -> None:
            while moving:
                name, x = moving.pop(0)
                gradient = x.result() if isinstance(x, Moving) else x
                if self.owner.inspect is not None:
                    self.owner.inspect(position, "gradient", [gradient])
                self.pass_on((name, m), gradient)

        return self.under_way(one, arrive)

    @staticmethod
    def under_way(one: Instruction, arrive: Callable[[], None]) -> Handle | None:
        """Return a handle for what a unit of moves has posted; on the compute lane it ends at once."""
        if one.lane is not Lane.COMPUTE:
            return Arriving(arrive)
        arrive()
        return None

    # ---- backward --------------------------------------------------------------------------------------------------

    def backward(self, one: Instruction) -> Handle | None:
        """Run BACKWARD, or, as BACKWARD_INPUT, all of it but the weight gradients of products; return a handle where it
        only posts what other ranks have to do with it."""
        unit, m = self.traces[one.microbatch].units[one.unit], one.microbatch
        self.gathered.version, self.microbatch = one.version, m
        self.gradients.begin(one)
        for buffer in one.reads:
            if buffer.kind == BufferKind.RECEIVED:
                for name, grad in self.received[buffer].items():
                    self.pass_on((name, m), grad)
        if unit.moves is not None:
            return self.move_back(one, unit)
        defer = None
        if one.op is not Op.BACKWARD:
            defer = self.defer(self.deferred.setdefault((unit.index, m), deque()))
        wanted = [n for n, g in zip(unit.inputs, unit.input_grads, strict=True) if g]
        live = {(n, k): self.live[n, k] for n in wanted for k in self.sources(unit, n, m)}
        self.run_backward(unit, partial(self.take, unit.index, m), live, self.seed, defer)
        return None

    def solve(self, outputs: Sequence[Any], wanted: Sequence[Any], seeds: Sequence[Tensor]) -> Sequence[Tensor | None]:
        # Otherwise autograd would run a device's work in a thread of its own, to which each Python hook would have to
        # hand the interpreter's lock.
        with torch.autograd.set_multithreading_enabled(False):
            grads: Sequence[Tensor | None] = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "gradient", [g for g in grads if g is not None])
        return grads

    def take(self, unit: int, microbatch: int) -> Saved:
        """Return what a forward has saved, with gathered parameters in place of the references to them."""
        outputs, operands, leaves = self.saved.pop((unit, microbatch))
        return Saved(outputs, [one._replace(x=self.gathered.resolve(one.x)) for one in operands], leaves)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        self.gradients.add(name, gradient)

    def seed(self, name: str, value: Tensor) -> Tensor | None:
        if name == "loss":
            batch, m = self.batches.place(self.microbatch)
            return batch.seed(m, value)
        return self.pending.pop((name, self.microbatch), None)

    def backward_weight(self, one: Instruction) -> None:
        """Compute the weight gradients that BACKWARD_INPUT has deferred."""
        self.gradients.begin(one)
        factors = self.deferred.pop((one.unit, one.microbatch))
        while factors:
            self.gradients.add_product(factors.popleft())

    def multiply(self, factors: GradientFactors) -> None:
        if self.owner.inspect is not None:
            self.owner.inspect(self.position, "gradient", [factors.dy])
        self.gradients.add_product(factors)

    def defer(self, held: deque[GradientFactors]) -> Callable[[GradientFactors], None]:
        """Return a function that keeps factors for later; it copies those in a slot, as the slot may be reused."""
        own = self.gathered.own

        def add(factors: GradientFactors) -> None:
            if self.owner.inspect is not None:
                self.owner.inspect(self.position, "gradient", [factors.dy])
            held.append(factors._replace(dy=own(factors.dy), x=own(factors.x)))

        return add
