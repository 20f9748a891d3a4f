"""Run one unit's instructions on the meta device under a storage tracker, as ``runtime/computing.py`` runs them: it
holds the same objects for as long, so the peaks are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.core.memory_options import LEAST_OFFLOAD
from shardwise.graph.torch_private import storage_key
from shardwise.kernels.flop_counter import DeviceForms
from shardwise.measure.meta_run import META, MetaRun, UnitRun, failed_op, storages, without
from shardwise.measure.storage_tracker import StorageTracker
from shardwise.ops.collectives import Moving
from shardwise.ops.weight_gradients import GradientFactors, Kernels, accumulate
from shardwise.units.selective_recompute import Tape, recallable
from shardwise.units.trace import Trace, Unit
from shardwise.units.unit_backward import Saved, UnitBackward
from shardwise.units.weight_products import Operand, expose, find


@dataclass(frozen=True)
class MetaStep:
    """This is what the units of a step share; ``gradient_dtypes`` are those of the buffers of parameters' gradients;
    with ``offload`` the host has what autograd keeps."""

    trace: Trace
    run: MetaRun
    microbatches: int
    gradient_dtypes: Mapping[str, torch.dtype]
    kernels: Kernels
    offload: bool = False


class Hosted(NamedTuple):
    """This stands for a copy on the host of a tensor that is kept for backward."""

    form: Tensor
    learns: bool


class UnitWork(UnitBackward):
    """Run one unit's instructions on one way, as the interpreter does."""

    def __init__(self, step: MetaStep, unit: Unit, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        trace = step.trace
        self.unit, self.arguments, self.kernels = unit, arguments, step.kernels
        self.unit_run = UnitRun(step.run, unit)
        self.forms, self.tracker = DeviceForms(step.run.device), StorageTracker(META.type)
        self.offload, self.gpu = step.offload, step.run.device == "gpu"
        self.hosted = 0  # the bytes that are on the host until backward
        self.resident = {storage_key(p) for p in arguments[: len(unit.parameters)]} if step.offload else set()
        self.live: list[Tensor] = []
        self.updates: list[Tensor] = []
        self.saved: list[Saved] = []
        self.backs: list[Any] = []  # how the gradients of what was moved go back
        self.tape: Tape | None = None
        wide = torch.float64 if trace.precision == "fp64" else torch.float32
        self.loss = torch.empty((), dtype=wide, device=META)
        self.weights = torch.empty(step.microbatches, dtype=wide, device=META) if trace.weighs_targets else None
        self.scale = torch.empty((), dtype=torch.float32, device=META) if trace.precision == "fp16" else None
        trained = dict(zip(unit.parameters, arguments, strict=False))
        dtypes = step.gradient_dtypes
        # The gradient of a table has the rows themselves: nothing is computed.
        tables = {p.name for b in trace.buckets if b.table for p in b.parameters}
        wanted = [n for n in unit.products if n not in tables]
        self.goals = {n: torch.empty(trained[n].shape, dtype=dtypes[n], device=META) for n in wanted}

    def weight(self) -> Tensor:
        """Return the interpreter's w_m: a new scalar, or an element of the tensor of all microbatches' weights."""
        return torch.full((), 1.0, dtype=self.loss.dtype, device=META) if self.weights is None else self.weights[0]

    def seed(self, pending: Mapping[str, Tensor], name: str, value: Tensor) -> Tensor | None:
        if name == "loss":
            weight = self.weight()
            return (weight if self.scale is None else weight * self.scale).to(value.dtype)
        return pending.get(name)

    def forward(self, what: Literal["alone", "save", "record", "again"]) -> tuple[int, int]:
        """Run a FORWARD that keeps nothing ("alone"), what autograd keeps ("save") or what a tape does ("record"), or
        RECOMPUTE ("again"), which reads the tape where there is one.

        Returns the peak bytes and the bytes that are left, both above what was there before.
        """
        unit, env = self.unit, self.unit_run.env
        graph = unit.graph
        assert graph is not None
        own = len(unit.outputs) + len(unit.updates)
        if what != "alone":
            exposed = expose(graph, find(graph, [n in unit.products for n in unit.parameters]))
            graph = recallable(exposed, own, unit.inner)
        env.tape, self.tape, env.again = self.tape, None, what == "again"
        if what == "record":
            env.tape = self.tape = Tape()
        keep = what in ("save", "again")
        before = self.tracker.mark()
        with (
            self.forms,
            self.tracker,
            self.tape.record() if self.tape is not None else torch.set_grad_enabled(keep),
            saved_tensors_hooks(lambda value: self.keep(value.detach()), self.resolve)
            if keep and self.offload
            else nullcontext(),
        ):
            outputs = self.unit_run.forward(graph, unit.merged(self.arguments))
            outputs, operands = outputs[:own], outputs[own:]
            if keep:
                leaves = self.arguments[: len(unit.parameters)]
                kept = [one._replace(x=self.keep(one.x)) for one in map(Operand._make, operands)]
                self.saved = [Saved.of(unit, outputs, kept, leaves)]
                del kept
            if what != "again" or unit.closed:
                self.publish(outputs)
        del outputs, operands
        env.tape, env.again = None, False
        return self.tracker.peak - before, self.tracker.current - before

    def move(self) -> tuple[int, int, int]:
        """Run the FORWARD of a unit of moves, as the interpreter posts it and as it arrives; return the peak of the
        post, the bytes from there to the arrival, and the peak of the arrival."""
        unit, env = self.unit, self.unit_run.env
        assert unit.graph is not None
        before = self.tracker.mark()
        env.posts = True
        with self.forms, self.tracker:
            moving = list(self.unit_run.forward(unit.graph, self.arguments))
            peak, posted = self.tracker.peak, self.tracker.mark()
            found = [one.result() if isinstance(one, Moving) else one for one in moving]
            self.backs = [one.back if isinstance(one, Moving) else None for one in moving]
            self.publish(found)
            arriving = self.tracker.peak
        env.posts = False
        return peak - before, posted - before, arriving - before

    def move_back(
        self, pending: dict[str, Tensor], before: Sequence[Tensor | None]
    ) -> tuple[int, int, int, list[Tensor | None]]:
        """Run the BACKWARD of a unit of moves on the ``pending`` gradients of outputs, which it takes; return what
        :meth:`move` does, and the gradients of inputs, which are added to those ``before``."""
        unit, env = self.unit, self.unit_run.env
        assert unit.moves is not None
        learns = unit.learning(self.arguments)
        for place, old in zip(learns, before, strict=True):
            if old is not None:
                self.pass_on(place, old)
        start = self.tracker.mark()
        with self.forms, self.tracker:
            moving: list[tuple[str, Any]] = []
            for name, source, back in zip(unit.outputs, unit.moves.inputs, self.backs, strict=True):
                if name in pending:
                    gradient = pending.pop(name)
                    moving.append((source, gradient if back is None else Moving(env, back(gradient))))
                    del gradient
            peak, posted = self.tracker.peak, self.tracker.mark()
            while moving:
                source, one = moving.pop(0)
                self.pass_on((source, 0), one.result() if isinstance(one, Moving) else one)
                del one
            arriving = self.tracker.peak
        grads = [self.pending.pop(place, None) for place in learns]
        return peak - start, posted - start, arriving - start, grads

    def keep(self, value: Tensor) -> Any:
        """Return what is kept of ``value`` for backward: what stands for a copy on the host, where it is offloaded."""
        if not self.offload or value.nbytes < LEAST_OFFLOAD or storage_key(value) in self.resident:
            return value
        with self.tracker.paused():
            form = torch.empty_like(value, requires_grad=False)
        size = form.untyped_storage().nbytes()
        self.hosted += 1 << (size - 1).bit_length() if self.gpu else size  # torch rounds pinned memory so
        return Hosted(form, value.requires_grad)

    def resolve(self, kept: Any) -> Any:
        """Return what :meth:`keep` was given, or a copy of it."""
        return torch.empty_like(kept.form).requires_grad_(kept.learns) if isinstance(kept, Hosted) else kept

    def take(self) -> Saved:
        """Return what a forward has saved, with operands that the host had back on the device."""
        outputs, operands, leaves = self.saved.pop()
        return Saved(outputs, [one._replace(x=self.resolve(one.x)) for one in operands], leaves)

    def made(self) -> tuple[int, int]:
        """Return the bytes of live outputs, and those of new values of buffers."""
        given = storages(self.arguments)
        made = without(storages(self.live), given)
        return sum(made.values()), sum(without(storages(self.updates), given, made).values())

    def drop(self) -> int:
        """Drop the live outputs; return the bytes of those that nothing else has."""
        before, self.live = self.tracker.current, []
        return before - self.tracker.current

    def publish(self, outputs: Sequence[Tensor]) -> None:
        unit, self.live = self.unit, []
        for name, value, grad in zip(unit.outputs, outputs, unit.output_grads, strict=False):
            detached = value.detach()
            if name == "loss":
                self.loss += detached.to(self.loss.dtype) * self.weight()
            else:
                self.live.append(detached.requires_grad_() if grad else detached)
        self.updates = [value.detach() for value in outputs[len(unit.outputs) :]]

    def backward(
        self, pending: Mapping[str, Tensor], before: Sequence[Tensor | None], held: deque[GradientFactors] | None = None
    ) -> tuple[int, list[Tensor | None]]:
        """Run BACKWARD on the ``pending`` gradients of outputs; return the peak bytes and the gradients of inputs.

        These are added to those ``before``.  With ``held`` it is BACKWARD_INPUT, which leaves products there.
        """
        self.unit_run.env.meanwhile = self.flush
        unit = self.unit
        live = unit.learning(self.arguments)
        for place, old in zip(live, before, strict=True):
            if old is not None:
                self.pass_on(place, old)
        start = self.tracker.mark()
        with self.forms, self.tracker:
            self.run_backward(unit, self.take, live, partial(self.seed, pending), None if held is None else held.append)
        return self.tracker.peak - start, [self.pending.pop(place, None) for place in live]

    def backward_weight(self, held: deque[GradientFactors]) -> int:
        """Run BACKWARD_WEIGHT; return its peak bytes."""
        start = self.tracker.mark()
        with self.forms, self.tracker:
            while held:
                self.multiply(held.popleft())
        return self.tracker.peak - start

    def multiply(self, factors: GradientFactors) -> None:
        if factors.weight in self.goals:
            accumulate(self.goals[factors.weight], factors, False, self.kernels)

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Do nothing: the gradient is added to a buffer that the program has."""

    def solve(self, outputs: Sequence[Any], wanted: Sequence[Any], seeds: Sequence[Tensor]) -> Sequence[Any]:
        try:
            return torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        except (NotImplementedError, RuntimeError) as error:
            self.unit_run.unknown.add(f"backward of {failed_op(error)}")
            return [torch.empty_like(t) if isinstance(t, Tensor) else None for t in wanted]
