"""Measure what each unit's instructions do to a rank's memory: they run on the meta device under a storage tracker.

``unit_work.py`` runs FORWARD, RECOMPUTE and BACKWARD of one unit.  Equal units (the same code on arguments of the same
shapes, strides and sharing) run once: the results of the others are made in the form of the first one's.  Parameters,
buffers, constants and batch fields are given and count nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.capture.casts import COMPUTE_DTYPE
from shardwise.core.errors import ConfigError
from shardwise.graph.schema import tensors_in
from shardwise.graph.torch_private import storage_key
from shardwise.measure.meta_run import (
    META,
    MetaRun,
    Places,
    UnitRun,
    check_numbers,
    largest_sizes,
    storages,
    without,
)
from shardwise.measure.storage_tracker import StorageTracker
from shardwise.measure.unit_work import MetaStep, UnitWork
from shardwise.ops.weight_gradients import GradientFactors, Kernels
from shardwise.units.batch_sums import SUM_BYTES, flattened
from shardwise.units.trace import NOT_CAPTURED, Trace, Unit


@dataclass(frozen=True)
class Way:
    """These are the bytes on one of the ways from FORWARD to BACKWARD.  ``kept`` is what FORWARD leaves beside live
    outputs, and ``saved`` what BACKWARD finds, including ``kept``; the two are equal where nothing is computed again.
    ``deferred`` is what the first part of a backward in two parts leaves for the second, ``at_once`` that of it which
    no pending gradient has too, for a second part that follows at once; ``inputs`` and ``weights`` are the peaks of
    these parts.  ``hosted`` is what the host has beside these bytes, where activations are
    offloaded, ``held`` the part of ``kept`` that live outputs have too, and ``remade`` what RECOMPUTE makes of outputs
    that end before BACKWARD.  All other fields are peaks."""

    forward: int = 0
    kept: int = 0
    recompute: int = 0
    saved: int = 0
    backward: int = 0
    inputs: int = 0
    deferred: int = 0
    at_once: int = 0
    weights: int = 0
    hosted: int = 0
    held: int = 0
    remade: int = 0


@dataclass(frozen=True)
class Flight:
    """These are the bytes of a unit of moves in one direction: what is there from the post to the arrival, and the peak
    of the arrival, both beyond what was there before the post."""

    posted: int = 0
    arriving: int = 0


@dataclass(frozen=True)
class UnitMemory:
    """These are the bytes of one unit on one rank for one microbatch.

    Every storage belongs to one buffer of the program: a live tensor to the unit that made it, whoever else keeps it;
    what autograd keeps beside outputs and inputs to ``saved``; a gradient to the earliest unit that waits for it, or
    to the deferred weight gradients that do, which come after all of these.  A peak is the most that an instruction
    adds to what was alive before it, and includes what it leaves.
    """

    index: int
    name: str
    outputs: int = 0  # bytes of live outputs that the unit made itself
    updates: int = 0  # bytes of new values of buffers, kept until the step ends
    # bytes that BACKWARD leaves pending, by input of the unit, and of an exchange also by microbatch
    gradients: tuple[int, ...] = ()
    input_gradients: tuple[int, ...] = ()  # bytes that BACKWARD_INPUT leaves pending, by input of the unit
    alone: int = 0  # the peak of a FORWARD that keeps nothing for any backward
    none: Way = Way()  # the way without RECOMPUTE
    again: Way = Way()  # the way with RECOMPUTE as in the plan's ``recompute``, if it has one
    there: Flight = Flight()  # a unit of moves has these, and no ways
    back: Flight = Flight()
    unknown: tuple[str, ...] = ()  # ops whose memory is a guess or left out
    # the same for a microbatch that adds to gradients of what all microbatches share, if that is different
    later: UnitMemory | None = None


@dataclass(frozen=True)
class Profile:
    """This is the memory of all units for one microbatch, and the peak of making its parts of sums over the batch."""

    units: tuple[UnitMemory, ...]
    count: int = 0
    sums: int = 0  # the bytes of these sums, of the batch or of one microbatch


def profile(
    trace: Trace, rows: int, parts: int = 1, device: str = "cpu", *, microbatches: int = 1, index: int | None = None,
    gradient_dtypes: Mapping[str, torch.dtype] = MappingProxyType({}), split: bool = False,
    tensor: Places | None = None, recompute: str = "none", batch: int | None = None, offload: bool = False,
) -> Profile:  # fmt: skip
    """Return the bytes of each unit of ``trace`` for a microbatch of ``rows`` rows on rank ``index`` of ``parts``.

    Without ``index`` it is the last rank, which has the most rows; ``tensor`` is its place on the axes of tensor
    parallelism, by default the last.  ``device`` is "cpu" or "gpu", whichever is present here; ``microbatches`` is the
    number in a step, whose batch has ``batch`` rows (by default as many in each).  ``gradient_dtypes`` maps parameters
    to the dtypes of the buffers to which backward writes their gradients, where these are not the bucket's ``wide``;
    with ``split``, backwards in two parts are run too; ``recompute`` is a plan's, and ``offload`` says whether it
    offloads activations.  Raises :class:`ConfigError` for numbers that the trace cannot take.
    """
    places = check_numbers("memory", trace, rows, parts, device, tensor)
    if index is not None and not 0 <= index < parts:
        raise ConfigError(f"memory: rank {index} of {parts} does not exist; legal: 0 to {parts - 1}")
    if trace.opaque is not None:
        return Profile(tuple(UnitMemory(u.index, u.name, unknown=(NOT_CAPTURED,)) for u in trace.units))
    alone = (trace.cuts_batch or microbatches == 1) and trace.precision != "fp16"
    run = MetaRun(
        trace, rows, parts, device, index, tensor=places, kind=device, alone=alone, microbatches=microbatches,
        batch=batch,
    )  # fmt: skip
    with largest_sizes():
        profiler = _Profiler(trace, run, microbatches, gradient_dtypes, split, recompute, offload)
        whole = replace(run.env, rows=batch or rows * microbatches, window=None) if trace.cuts_batch else run.env
        sums = SUM_BYTES * sum(stage.numel(whole) for stage in (trace.sums.stages if trace.sums is not None else ()))
        return Profile(tuple(profiler.measured()), _count(trace, run), sums)


def _count(trace: Trace, run: MetaRun) -> int:
    peak = 0
    for stage in () if trace.sums is None else trace.sums.stages:
        kinds = (("p", stage.leaves), ("b", stage.buffers))
        values = [run.leaf(kind, name) for kind, names in kinds for name in names]
        values += [torch.empty_like(c, device=META) for c in stage.constants]
        values += [run.leaf("f", name) for name in stage.fields]
        tracker = StorageTracker(META.type)
        with tracker, torch.no_grad():
            flattened(UnitRun(run).forward(stage.graph, values), stage.floats)
        peak = max(peak, tracker.peak)
    return peak


# ---- equal units -----------------------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """This is a tensor's form; ``source`` is its storage: the index of a known tensor, or -1, -2, … for new ones."""

    source: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    grad: bool


def _forms(tensors: Sequence[Tensor], known: Sequence[Tensor] = ()) -> tuple[_Form, ...]:
    sources = {storage_key(t): i for i, t in reversed(list(enumerate(known)))}
    new = 0
    found = []
    for t in tensors:
        if (key := storage_key(t)) not in sources:
            new -= 1
            sources[key] = new
        size = t.untyped_storage().nbytes()
        found.append(
            _Form(sources[key], size, t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad)
        )
    return tuple(found)


def _made(forms: Sequence[_Form], known: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return tensors of these forms, on storages of their own where these are new."""
    bases = {f.source: torch.empty(f.nbytes, dtype=torch.uint8, device=META) for f in forms if f.source < 0}
    made = []
    for f in forms:
        base = (known[f.source] if f.source >= 0 else bases[f.source]).untyped_storage()
        tensor = torch.empty(0, dtype=f.dtype, device=META).set_(base, f.offset, f.shape, f.stride)
        made.append(tensor.requires_grad_(f.grad))
    return made


# ---- the run ---------------------------------------------------------------------------------------------------------


class _Profiler:
    """Run all units forward, then all backward with the pending gradients that the later ones left."""

    def __init__(
        self,
        trace: Trace,
        run: MetaRun,
        microbatches: int,
        gradient_dtypes: Mapping[str, torch.dtype],
        split: bool,
        recompute: str,
        offload: bool,
    ) -> None:
        self.trace, self.run, self.split = trace, run, split
        self.ways = {"none": "none"} if recompute == "none" else {"none": "none", "again": recompute}
        self.gradient_dtypes = {p.name: b.wide for b in trace.buckets for p in b.parameters} | dict(gradient_dtypes)
        backend = Backend.of_kind("gpu" if run.device == "gpu" else "cpu")
        kernels = Kernels.of(backend, COMPUTE_DTYPE.get(trace.precision))
        self.step = MetaStep(trace, run, microbatches, self.gradient_dtypes, kernels, offload)
        self.pending: dict[str, Tensor] = {}
        self.forwards: dict[Any, tuple[UnitMemory, tuple[_Form, ...]]] = {}
        self.backwards: dict[Any, tuple[dict[str, Any], tuple[bool, ...], tuple[_Form, ...]]] = {}
        self.producer = {n: u.index for u in trace.units for n in u.outputs}

    def measured(self) -> list[UnitMemory]:
        units = self.trace.units
        found = [self.forward(u) for u in units]
        for u in reversed(units):
            if u.differentiable:
                before = dict(self.pending)
                found[u.index] = one = replace(found[u.index], **self.backward(u))
                if self.trace.shared.intersection(u.inputs) and len(self.run.windows) > 1:
                    found[u.index] = replace(one, later=replace(one, **self.backward_later(u, before)))
        return found

    def backward_later(self, unit: Unit, before: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what :meth:`backward` returns, for a microbatch that finds what the one before it left pending for
        what all microbatches share; ``before`` was pending before that one."""
        after, self.pending = self.pending, {**before}
        self.pending |= {n: after[n] for n in self.trace.shared.intersection(unit.inputs) if n in after}
        fields = self.backward(unit)
        self.pending = after
        return fields

    def key(self, unit: Unit, arguments: Sequence[Tensor]) -> Any:
        products = tuple(n in unit.products and self.gradient_dtypes[n] for n in unit.parameters)
        return unit.code, products, unit.output_grads, unit.outputs.count("loss"), len(unit.updates), _forms(arguments)

    def arguments(self, unit: Unit) -> list[Tensor]:
        return [a for kind in self.run.arguments(unit) for a in kind]

    def forward(self, unit: Unit) -> UnitMemory:
        arguments = self.arguments(unit)
        key = self.key(unit, arguments)
        if key not in self.forwards:
            work, there = UnitWork(self.step, unit, arguments), Flight()
            if unit.moves is None:
                peak, _ = work.forward("alone")
            else:
                peak, *flight = work.move()
                there = Flight(*flight)
            made, updates = work.made()
            memory = UnitMemory(
                unit.index, unit.name, made, updates, alone=peak, there=there,
                unknown=tuple(sorted(work.unit_run.unknown)),
            )  # fmt: skip
            self.forwards[key] = memory, _forms(work.live, arguments)
        memory, forms = self.forwards[key]
        for name, value in zip((n for n in unit.outputs if n != "loss"), _made(forms, arguments), strict=True):
            self.run.live[name] = value
        return replace(memory, index=unit.index, name=unit.name)

    def backward(self, unit: Unit) -> dict[str, Any]:
        """Return the fields of a unit's memory that its backward decides; leave its inputs' gradients pending."""
        arguments = self.arguments(unit)
        given = {n: self.pending.pop(n) for n in unit.outputs if n in self.pending}
        learning = unit.learning(arguments)
        own = self.run.own if unit.exchanges else 0
        before = [self.waiting(n, value, k == own) for (n, k), value in learning.items()]
        producers = [self.producer[n] for n, _ in learning]
        order = sorted(range(len(learning)), key=producers.__getitem__)
        others = storages(self.pending.values())  # a gradient that others wait for too, and longer, is theirs
        key = (
            self.key(unit, arguments), tuple(n in given for n in unit.outputs), _forms([*given.values()]),
            tuple(b is None for b in before), tuple(order), tuple(storage_key(g) in others for g in given.values()),
        )  # fmt: skip
        known = [*arguments, *given.values()]
        if key not in self.backwards:
            fields, grads = self.walk_backward(unit, arguments, given, before)
            fields["gradients"] = _owned(unit, grads, order, {**storages(arguments), **others})
            if self.split and unit.moves is None:
                fields |= self.walk_parts(unit, arguments, given, before, order, fields, others)
            reached = tuple(g is not None for g in grads)
            self.backwards[key] = fields, reached, _forms([g for g in grads if g is not None], known)
        fields, reached, forms = self.backwards[key]
        grads = zip(compress(learning, reached), _made(forms, known), strict=True)
        self.pending |= {n: grad for (n, k), grad in grads if k == own}
        return fields

    def waiting(self, name: str, value: Tensor, own: bool) -> Tensor | None:
        """Return what is pending for an input of a unit; that of another microbatch is as large as its ``value``."""
        known = self.pending.get(name)
        return known if own or known is None else torch.empty_like(value, requires_grad=False)

    def walk_backward(
        self, unit: Unit, arguments: Sequence[Tensor], given: Mapping[str, Tensor], before: Sequence[Tensor | None]
    ) -> tuple[dict[str, Any], list[Tensor | None]]:
        """Return the ways of the unit, and the gradients that are pending after its backward."""
        found: dict[str, Any] = {}
        unknown: set[str] = set()
        if unit.moves is not None:
            work = UnitWork(self.step, unit, arguments)
            work.move()
            with work.tracker:  # what goes back ends where it arrives
                own = dict(zip(given, _made(_forms([*given.values()])), strict=True))
            others = storages(self.pending.values())
            own |= {n: g for n, g in given.items() if storage_key(g) in others}
            peak, *flight, grads = work.move_back(own, before)
            return {"back": Flight(*flight), "none": Way(backward=peak)}, grads
        for name, recompute in self.ways.items():
            work = UnitWork(self.step, unit, arguments)
            forward = self.forwards[self.key(unit, arguments)][0].alone
            kept = again = more = held = remade = 0
            if recompute != "full":
                forward, left = work.forward("save" if recompute == "none" else "record")
                made = sum(work.made())
                kept = left - made
                if unit.passing or (unit.closed and recompute == "selective"):
                    kept += (held := made - work.drop())
            if recompute != "none":
                again, more = work.forward("again")
                remade = work.drop() if unit.passing else 0
            backward, grads = work.backward(given, before)
            saved = kept + more - remade
            found[name] = Way(forward, kept, again, saved, backward, hosted=work.hosted, held=held, remade=remade)
            unknown |= work.unit_run.unknown
        return {**found, "unknown": tuple(sorted(unknown))}, grads

    def walk_parts(
        self, unit: Unit, arguments: Sequence[Tensor], given: Mapping[str, Tensor], before: Sequence[Tensor | None],
        order: Sequence[int], ways: Mapping[str, Any], others: Mapping[int, int],
    ) -> dict[str, Any]:  # fmt: skip
        """Return the ways completed by the peaks of the two parts of a backward, and ``input_gradients``; the storages
        of ``others`` belong to gradients that are pending elsewhere."""
        found: dict[str, Any] = {}
        for name, recompute in self.ways.items():
            work, held = UnitWork(self.step, unit, arguments), deque[GradientFactors]()
            if recompute == "selective":
                work.forward("record")
            work.forward("save" if recompute == "none" else "again")
            if unit.passing:
                work.drop()
            with work.tracker:  # the second part may free what the first was given
                own = dict(zip(given, _made(_forms([*given.values()])), strict=True))
            theirs = storages(own[n] for n, g in given.items() if storage_key(g) in others)
            peak, grads = work.backward(own, before, held)
            tensors = [t for one in held for t in tensors_in((one.dy, one.x, one.rest))]
            elsewhere = storages([*arguments, *work.live])
            deferred = without(storages(tensors), elsewhere)
            found["input_gradients"] = _owned(unit, grads, order, {**elsewhere, **deferred})
            at_once = without(deferred, theirs, storages(g for g in grads if g is not None))
            del tensors, grads, own
            found[name] = replace(
                ways[name], inputs=peak, deferred=sum(deferred.values()), at_once=sum(at_once.values()),
                weights=work.backward_weight(held),
            )  # fmt: skip
        return found


def _owned(
    unit: Unit, grads: Sequence[Tensor | None], order: Sequence[int], elsewhere: Mapping[int, int]
) -> tuple[int, ...]:  # fmt: skip
    """Return bytes by input; a storage that several share belongs to the one wanted last, if not ``elsewhere``."""
    seen = set(elsewhere)
    sizes = [0] * len(grads)
    for i in order:
        grad = grads[i]
        if grad is not None and (key := storage_key(grad)) not in seen:
            seen.add(key)
            sizes[i] = grad.untyped_storage().nbytes()
    left, each = iter(sizes), len(grads) // max(sum(unit.input_grads), 1)
    return tuple(next(left) if g else 0 for g in unit.input_grads for _ in range(each))
