"""A model traced for a plan, for batches of one form: its traces are made when they are first needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Self

import torch
from torch import Tensor, nn

from shardwise.backend import Backend, Kind
from shardwise.capture.casts import COMPUTE_DTYPE, cast_field
from shardwise.capture.coins import Drawing
from shardwise.capture.example import example_rows
from shardwise.capture.hooks import UserHooks
from shardwise.capture.host_draws import joined
from shardwise.capture.in_form import InForm
from shardwise.capture.outputs import Wanted
from shardwise.capture.settling import settle
from shardwise.capture.state import kept_tensors
from shardwise.capture.varying import Varying
from shardwise.capture.wrapped import LossFunction, Resized, rows_in
from shardwise.core.collector import old_objects_passed_by
from shardwise.core.devices import DeviceModel
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.fields import has_rows
from shardwise.core.layout import Layout, shard_sizes
from shardwise.core.links import LinkProfile
from shardwise.core.numeric_options import scalar_bytes
from shardwise.core.plan import Plan
from shardwise.core.rates import Rates, SolverObjective, rates
from shardwise.core.structure import like
from shardwise.core.tensor_options import tensor_axes
from shardwise.graph.captured import Uncapturable
from shardwise.graph.layouts import check_layout
from shardwise.initial.copies import refuse_unready
from shardwise.initial.values import Values
from shardwise.lower import named_sizes
from shardwise.lower.stages import StageSplit, Weights, weights_of
from shardwise.measure.fp16_check import check_kernels
from shardwise.parallel.data import REPLICAS, SHARDS
from shardwise.parallel.pipeline import PIPELINE
from shardwise.parallel.tensor import axes_across
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.parts_trial import parts_agree
from shardwise.units.trace import Bucket, Parameter, Trace
from shardwise.units.tracing import Captures, trace

MASKS = ("attention_mask",)
NO_STEP = Drawing(0, 0)  # of a model that reads no random numbers


@dataclass(eq=False)
class TracedModel:
    """The traces of ``module`` under ``plan``: a general one, and one for batches whose masks are all ones.

    A capture with a static batch dim fits microbatches of one size; other sizes (the last batch of an epoch) are
    captured when they come. With ``varies``, the largest size of each dim that may vary by "FIELD.DIM",
    ``example`` gets these sizes.

    ``initial`` gives the values that training starts from; ``module`` may then be on the meta device. By default they
    are the values of ``module``. If buffers start from other values than they have, ``module`` is replaced by a copy
    that shares its parameters. If the model cannot be captured and its parameters are on the meta device, the whole
    model is built, which a note of the trace says.

    Pipeline stages and the solver of tensor plans assume devices of ``kind`` ("gpu" or "cpu"; None: that of
    ``device``), ``per_host`` on each host (None: one host has all), with ``rates`` (None: those of ``model``, or those
    assumed for the kind), the measured ``links`` (None: those of the rates) and batches of ``batch_rows`` rows (None:
    as many as the example has). With ``like`` nothing is decided here: the decisions of ``like`` are used. Raises
    :class:`ConfigError` if the fields of ``example`` differ in rows.
    """

    module: nn.Module
    plan: Plan
    example: Mapping[str, Tensor]
    loss: LossFunction | None = None
    device: torch.device = torch.device("cpu")
    training: bool = True
    initial: Mapping[str, Tensor] | None = None
    rates: Rates | None = None
    links: LinkProfile | None = None
    batch_rows: int | None = None
    kind: Kind | None = None
    model: DeviceModel | None = None
    per_host: int | None = None
    like: Self | None = None
    _values: Values | None = None
    _traces: dict[tuple[tuple[str, ...], int | None], Trace] = field(default_factory=dict)
    _weights: dict[int, Weights] = field(default_factory=dict)  # the costs of the general trace's units, by its id
    _captures: Captures = field(default_factory=dict)  # all plans share them
    _lock: threading.RLock = field(default_factory=threading.RLock)
    wanted: Wanted = "loss"  # whether its units give the outputs of the model too
    _stages: dict[str, int] = field(default_factory=dict)  # the stages of the training trace's units, by name
    buckets: list[Bucket] = field(default_factory=list)  # those of the training trace; evaluation uses their memory
    loss_weight: str | None = None  # of a model that is not captured, if a trial is not to find it
    hooks: UserHooks | None = None  # those of the user's parameters
    varies: Mapping[str, int] = field(default_factory=dict)
    _varying: Varying = field(default_factory=Varying)
    parts: tuple[Trace, ...] = ()  # of the microbatches of a batch, where each decides in another way
    _axes: Mapping[str, int] = field(default_factory=dict)  # the axes of tensor parallelism in the training trace

    def __post_init__(self) -> None:
        refuse_unready(self.module)
        for name, value in self.example.items():
            check_layout("batch", f'field "{name}"', value, not has_rows(name))
        self.loss = InForm.of(self.loss, self.example)
        if self.training:
            named_sizes.check_fields(self.varies, self.example)
        counts = {name: value.shape[:1] for name, value in self.example.items() if has_rows(name)}
        if not counts or len(set(counts.values())) != 1 or next(iter(counts.values())) == ():
            raise ConfigError(
                f"batch: every field needs the same number of rows in its first dim; found {_shapes(self.example)}"
            )
        sizes = named_sizes.sizes_of(self.varies, self.example)
        if sizes:
            self._varying.add({name: frozenset(dims) for name, dims in sizes.items()})
            if self.training:
                named_sizes.check_sizes(self.example, sizes)
            others = named_sizes.as_large(self.example, sizes)
            self.example = named_sizes.enlarged(self.example, sizes)
        if self.hooks is None:
            self.hooks = UserHooks.of(self.module)
        first = self._values is None
        if self._values is None:
            given = self.initial
            self._values = Values(self.module) if given is None else Values.of_mapping(self.module, given)
            self.module = self._values.structure()
        try:
            self.general = self._general(first)
        except ConfigError as error:
            if not sizes or not others:
                raise
            hint = f"{others[0]} is as large as what varies names: if both vary, name both"
            raise ConfigError(f"{error} ({hint})") from error
        self.buckets, self._axes = self.buckets or self.general.buckets, self._axes or self.general.tensor
        self._check_placed(self.general, self.like.buckets if self.like is not None else ())
        self._stages = self._stages or StageSplit.of(self.general, self.plan, weights=self.unit_weights).names
        if self.training and self.plan.numeric.precision == "fp16" and self.device.type == "cpu":
            check_kernels(self.general, self.module, self.example)
        self.masks = tuple(m for m in MASKS if m in self.example) if self.general.opaque is None else ()
        if self.general.checks is not None:
            self.masks = ()
        self._try_own_numbers()
        if self.masks and not _alike(self.trace(self.masks, None), self.general):
            self.masks = ()  # only the mask reaches some parameter, or some sum, so one trace must serve all batches

    @property
    def values(self) -> Values:
        """The values that training starts from."""
        assert self._values is not None
        return self._values

    @property
    def checks_numbers(self) -> bool:
        """Whether microbatches are right only where each row looks up its own elements."""
        return self.plan.microbatches > 1 and not self.general.cuts_batch and self.general.own_numbers is not None

    def _try_own_numbers(self) -> None:
        """Let microbatches be refused where a trial does not show that rows which look up their own elements compute
        the same in them."""
        rows = rows_in(self.example)
        sizes = tuple(shard_sizes(rows, min(self.plan.microbatches, rows)))
        if self.checks_numbers and len(sizes) > 1 and not self._agree(sizes):
            for one in self._traces.values():
                one.own_numbers = None

    def _general(self, first: bool) -> Trace:
        found = self._settled() if first else self.trace((), None)
        if found.opaque is None or not any(p.is_meta for p in self.module.parameters()) or self.values.missing:
            return found
        StageSplit.of(found, self.plan)  # raises if the plan has stages, before the model is built
        # The model's code may hold tensors that are not registered, and it is run on a first batch.
        self.module = self.values.whole()
        self._values = Values(self.module)
        self._traces.clear()
        self._captures = {}
        found = self.trace((), None)
        found.notes.append("initial weights: every rank builds the whole model, since it could not be captured without")
        return found

    def _settled(self) -> Trace:
        """Return the trace of the model as it is once forward has run, where that gives buffers other shapes."""
        try:
            return self.trace((), None)
        except Resized:
            real = not any(p.is_meta for p in self.module.parameters())
            names = settle(self.module, self.example, self.loss, self.training) if real else []
            if not names:
                raise
        found = self.trace((), None)
        found.notes.append(f"a first forward gave {', '.join(names)} another shape, as on one device")
        return found

    @property
    def notes(self) -> list[str]:
        """What a user should know of the captured model and of what the plan makes of it."""
        pipelined = self.plan.mesh.axis_size(PIPELINE) > 1
        called = self.loss.notes(self.module) if isinstance(self.loss, InForm) else []
        return [*called, *self.general.notes, *self.general.notes_of_microbatches(self.plan.microbatches, pipelined)]

    def release(self) -> None:
        """Release the parameters' values, which only the start of an engine needs, so that their memory is freed if
        nobody else holds the module. A model that was not captured keeps them, for its module runs; either has tensors
        of its own from now on, so that what becomes of the user's does not matter.
        """
        if not all(p.is_meta for p in self.module.parameters()):
            kept = kept_tensors(self.module)
            self.module = self.values.bare(kept) if self.general.opaque is None else self.values.beside(kept)
            self.initial, self._values = None, Values(self.module)

    def _check_learning(self, other: Trace, fewer: bool = False) -> None:
        """Raise :class:`ConfigError` where other parameters learn by another computation with this model; ``fewer`` may
        learn by it."""
        here, there = ({p.name for b in one if b.learns for p in b.parameters} for one in (
            self.buckets, other.buckets,
        ))  # fmt: skip
        if others := sorted(there - here if fewer else here ^ there):
            wrong = f"{others[0]} has a gradient in one step and none in another"
            raise ConfigError(f"model: {wrong}; legal: a loss in every step that depends on the same parameters")

    @staticmethod
    def _check_placed(one: Trace, buckets: Sequence[Bucket]) -> None:
        """Raise :class:`ShardwiseError` if a trace and the buckets, which all traces share, differ in the layout of a
        parameter or in the axes over which its gradient is a partial sum."""
        here = {p.name: p for b in buckets for p in b.parameters}
        for other in (p for b in one.buckets for p in b.parameters):
            own = here.get(other.name, other)
            if (own.placed, own.summed) != (other.placed, other.summed):
                raise ShardwiseError(
                    f"parameter {other.name} lies as {_lying(own)} in training, and as {_lying(other)} in another trace"
                )

    def unit_weights(self) -> Weights:
        """Return the costs of the general trace's units in FLOPs, by which it is cut into stages."""
        key = id(self.general)
        if key not in self._weights:
            self._weights[key] = weights_of(self.general, self.devices, self.device_rates())
        return self._weights[key]

    @property
    def devices(self) -> Kind:
        """The kind of device that the model is compiled for."""
        return self.kind or Backend.of(self.device).kind

    def device_rates(self, across: Iterable[str] | None = None) -> Rates:
        """Return the rates of the devices in the precision of the plan, and of links, measured or assumed; ``across``
        are the axes that reach over hosts, by default those of tensor parallelism that do."""
        mesh = self.plan.mesh
        if across is None:
            across = axes_across(mesh, self.per_host or mesh.size)
        found = self.rates or rates(self.devices, self.plan.numeric.precision, across, self.model)
        return found if self.links is None else self.links.applied(found, mesh.size)

    def trace(self, ones: tuple[str, ...], rows: int | None) -> Trace:
        """Return the trace for microbatches of ``rows`` rows (None: any) whose fields ``ones`` are all ones."""
        symbolic = self._traces.get((ones, None))
        if symbolic is not None and (symbolic.rows is None or rows is None or symbolic.rows == rows):
            return symbolic
        key = (ones, rows)
        with self._lock:
            if key not in self._traces:
                with old_objects_passed_by():
                    self._traces[key] = self._traced(ones, rows)
            found = self._traces[key]  # one that failed is kept, too: each rank of this process asks for it
            if found.opaque is not None and any(one.opaque is None for one in self._traces.values()):
                wrong = f"{rows} rows at a time cannot be captured: {found.opaque}"
                raise ConfigError.on("microbatch", wrong, "other numbers of rows, such as those of the first batch")
        return found

    def _traced(self, ones: tuple[str, ...], rows: int | None) -> Trace:
        """Return a new trace.  Where forward reads values of the batch, one for fewer rows goes the way of the whole
        batch, and, if it cannot, the way of its own rows: always where it reads sizes, which are others."""
        checks = [one.checks for one in self._traces.values() if one.checks is not None]
        if rows is None or not checks:
            return self._traced_as(self.example, ones, rows)
        if rows == rows_in(self.example) or not any(one.sized for one in checks):
            try:
                return self._traced_as(self.example, ones, rows, opaque=False)
            except Uncapturable:
                pass
        return self._traced_as(example_rows(self.example, rows), ones, rows)

    def _traced_as(
        self, example: Mapping[str, Tensor], ones: tuple[str, ...], rows: int | None, opaque: bool = True,
        apart: bool = False,
    ) -> Trace:  # fmt: skip
        """Return a new trace; one that is ``apart`` is of rows that decide in another way than those of others."""
        numeric, rule = self.plan.numeric, self.plan.data.rule
        captures = {} if apart else self._captures
        varying = self._varying.another_way(self._varying.drawing) if apart else self._varying
        return trace(
            self.module, example, loss=self.loss, precision=numeric.precision, training=self.training,
            dropout=numeric.dropout, device=self.device, ones=ones, rows=rows, group=rule, first=not self.buckets,
            tensor=self._tensors(ones, rows), captures=captures, varying=varying,
            opaque=opaque, loss_weight=self.loss_weight, over_batch=self.plan.exchanges_microbatches,
            wanted=self.wanted, segments=self.plan.tensor.overlap == "pairs",
            dense=tuple(self.hooks.parameters) if self.hooks and self.plan.data.tables == "rows" else None,
        )  # fmt: skip

    def traces_of(self, ones: tuple[str, ...], sizes: Sequence[int], rows: int) -> list[Trace]:
        """Return the traces for microbatches of these sizes of a batch of ``rows`` rows."""
        return [*self.parts] or [self.trace_of(ones, size, rows) for size in sizes]

    def trace_of(self, ones: tuple[str, ...], size: int, rows: int) -> Trace:
        """Return the trace for a microbatch of ``size`` rows of a batch of ``rows`` rows."""
        return self.trace(ones, rows if self.general.cuts_batch else size)

    def _tensors(self, ones: tuple[str, ...], rows: int | None) -> TensorParallelSpec:
        """Return what tensor parallelism shards; the layouts of parameters are the same in all traces."""
        known = [p for b in self.buckets for p in b.parameters]
        layouts = {p.name: p.layout for p in known} if known else None
        axes = self._axes or {axis: self.plan.mesh.axis_size(axis) for axis in tensor_axes(self.plan.mesh)}
        summed = {p.name: p.summed for p in known}
        machine = self._machine() if axes else None
        decided, options = None if self.like is None else self.like.trace(ones, rows).decisions, self.plan.tensor
        return TensorParallelSpec(
            axes, options.recipe, layouts, options.plan, options.pins, machine, summed, decided, options.context,
            options.experts,
        )  # fmt: skip

    @property
    def microbatch_rows(self) -> int:
        """The number of rows of each microbatch, on all ranks together."""
        whole = self.batch_rows or rows_in(self.example)
        return max(-(-whole // self.plan.microbatches), 1)

    def _machine(self) -> SolverObjective:
        """Return the solver's model of the machine; it takes all parameters to be under the last rule, with Adam."""
        plan, size = self.plan, scalar_bytes(self.plan.numeric.precision)
        rows = -(-self.microbatch_rows // plan.mesh.axis_size((SHARDS, REPLICAS)))
        rule, shards = plan.data.parameters[-1], plan.mesh.axis_size(SHARDS)
        gradient = size / (shards if rule.grad == "S" else 1)
        state = 0.0 if plan.memory.offloads_optimizer else 2 * size / (shards if rule.state == "S" else 1)
        live = 0 if plan.memory.recompute == "full" else min(plan.mesh.axis_size(PIPELINE), plan.microbatches)
        summed = COMPUTE_DTYPE[plan.data.reduce].itemsize if plan.data.reduce != "auto" else None
        return SolverObjective(
            self.device_rates(), rows, plan.tensor.bytes or None, gradient + state, live, self.devices, summed
        )

    def stages_of(self, one: Trace, plan: Plan | None = None) -> StageSplit:
        """Return the stages of a trace under ``plan``, by default its own; units have the training trace's stages."""
        if plan is None or plan is self.plan:
            return StageSplit.of(one, self.plan, self._stages)
        return StageSplit.of(one, plan, StageSplit.of(self.general, plan, weights=self.unit_weights).names)

    def drawn(
        self, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor], drawing: Drawing
    ) -> Mapping[str, Tensor]:
        """Return the fields that forward draws in Python in the step of ``drawing`` for a ``batch``, all rows of it on
        the host."""
        rows = rows_in(batch)
        sizes = shard_sizes(rows, min(self.plan.microbatches, rows))
        if self.general.cuts_batch or len(sizes) == 1:
            sizes, traces = [rows], [self.trace((), rows)]
        else:  # each microbatch is a batch of its own
            traces = self.traces_of((), sizes, rows)
        parts, first = list[Mapping[str, Tensor]](), 0
        for size, one in zip(sizes, traces, strict=True):
            fields = {n: v[first : first + size] if has_rows(n) else v for n, v in batch.items()}
            fields = {name: cast_field(value, one.precision) for name, value in fields.items()}
            parts.append({} if one.draws is None else one.draws.of(like(fields, batch), buffers, drawing, first))
            first += size
        return parts[0] if len(parts) == 1 else joined(parts)

    def _agree(self, sizes: tuple[int, ...]) -> bool:
        """Return whether a trial shows that the loss of the example is that of its microbatches, of these sizes."""
        with self._lock:
            if sizes not in self._agreed:
                drawing = None
                if (draws := self.general.draws) is not None:
                    values = self.drawn(self.example, dict(self.module.named_buffers()), NO_STEP)
                    drawing = partial(draws.given_rows, values)
                self._agreed[sizes] = parts_agree(
                    self.module, self.example, sizes, self.loss, self.plan.numeric.precision, self.training, drawing
                )
            return self._agreed[sizes]

    @cached_property
    def _agreed(self) -> dict[tuple[int, ...], bool]:
        """Whether microbatches of these sizes have made the loss of the example."""
        return {}


def _lying(one: Parameter) -> str:
    return f"{one.placed}, its gradient summed over {', '.join(one.summed)}," if one.summed else str(one.placed)


def _layout(one: Trace) -> list[list[tuple[str, Layout, tuple[str, ...]]]]:
    return [[(p.name, p.placed, p.summed) for p in b.parameters] for b in one.buckets]


def _alike(one: Trace, other: Trace) -> bool:
    """Whether one step can have microbatches with each of two traces."""
    sums = one.sums is other.sums if one.sums is None else one.sums.like(other.sums)
    return _layout(one) == _layout(other) and sums and one.cuts_batch == other.cuts_batch


def _shapes(batch: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items()) or "no fields"
