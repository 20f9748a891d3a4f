"""A model made ready for a plan: its traces and programs, shared by all thread ranks of a process and made when first
needed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.backend import Backend, Kind
from shardwise.capture.capture import LossFunction
from shardwise.core.check import check
from shardwise.core.communicators import Members, communicators
from shardwise.core.devices import DeviceModel
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.instruction import Lane
from shardwise.core.layout import Layout
from shardwise.core.mesh import Axes
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.core.rates import Machine, Rates, rates
from shardwise.core.tensor_options import tensor_axes
from shardwise.initial.values import Values
from shardwise.lower.stages import StageSplit, Weights, weights_of
from shardwise.lower.step import lower
from shardwise.lower.versions import steady
from shardwise.measure.fp16_check import check_kernels
from shardwise.measure.unit_traffic import communicating_axes
from shardwise.ops.collectives import Env
from shardwise.parallel.data import REPLICAS, SHARDS, batch_axes
from shardwise.parallel.pipeline import PIPELINE
from shardwise.parallel.tensor import axes_across
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.trace import Bucket, Parameter, Trace
from shardwise.units.tracing import Captures, trace

MASKS = ("attention_mask",)


@dataclass
class Compiled:
    """Traces of ``module`` under ``plan``: a general one, and one for batches whose masks are all ones.

    A capture with a static batch dim fits microbatches of one size; other sizes (the last batch of an epoch) are
    captured when they come.  Programs depend on the number of microbatches, which a batch of few rows can make smaller.

    ``initial`` has the values that training starts from; without it they are those of ``module``, which may be on the
    meta device otherwise.  ``module`` is replaced by a copy that shares its parameters if its buffers start from other
    values than they have.  A model that cannot be captured is made as a whole if its parameters are on the meta device,
    and says so.

    Stages of pipelines, and a solver of tensor plans, go by devices of ``kind`` ("gpu" or "cpu"; None: that of
    ``device``), of which ``per_host`` in turn are on one host (None: all), and by their ``rates`` (None: those of
    ``model``, or assumed of the kind), for batches of ``batch_rows`` rows (None: as many as the example has).  With
    ``like`` it decides nothing: what is decided there is done here.
    """

    module: nn.Module
    plan: Plan
    example: Mapping[str, Tensor]
    loss: LossFunction | None = None
    device: torch.device = torch.device("cpu")
    training: bool = True
    initial: Mapping[str, Tensor] | None = None
    rates: Rates | None = None
    batch_rows: int | None = None
    kind: Kind | None = None
    model: DeviceModel | None = None
    per_host: int | None = None
    like: Compiled | None = None
    _values: Values | None = None
    _traces: dict[tuple[tuple[str, ...], int | None], Trace] = field(default_factory=dict)
    _weights: dict[int, Weights] = field(
        default_factory=dict
    )  # of the units of a trace, which is not let go of meanwhile
    _captures: Captures = field(default_factory=dict)  # which serve all plans
    _programs: dict[tuple[Trace, int, int], tuple[Program, ...]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _evaluation: Compiled | None = None
    _stages: dict[str, int] = field(default_factory=dict)  # of the units of the training trace, by name
    buckets: list[Bucket] = field(default_factory=list)  # of the training trace, whose memory evaluation uses too
    _axes: Mapping[str, int] = field(default_factory=dict)  # those of tensor parallelism in the training trace

    def __post_init__(self) -> None:
        sizes = {name: value.shape[:1] for name, value in self.example.items()}
        if not sizes or len(set(sizes.values())) != 1 or next(iter(sizes.values())) == ():
            raise ConfigError(
                f"batch: every field needs the same number of rows in its first dim; found {_shapes(self.example)}"
            )
        if self._values is None:
            given = self.initial
            self._values = Values.of_module(self.module) if given is None else Values.of_mapping(self.module, given)
            self.module = self._values.structure()
        self.general = self._general()
        self.buckets, self._axes = self.buckets or self.general.buckets, self._axes or self.general.tensor
        self._check_placed(self.general, self.like.buckets if self.like is not None else ())
        self._stages = self._stages or StageSplit.of(self.general, self.plan, weights=self.unit_weights).names
        if self.training and self.plan.numeric.precision == "fp16" and self.device.type == "cpu":
            check_kernels(self.general, self.module, self.example)
        self.masks = tuple(m for m in MASKS if m in self.example) if self.general.opaque is None else ()
        if self.masks and _layout(self.trace(self.masks, None)) != _layout(self.general):
            self.masks = ()  # a parameter that only the mask reaches: one trace must serve all batches

    @property
    def values(self) -> Values:
        """The values that training starts from."""
        assert self._values is not None
        return self._values

    def _general(self) -> Trace:
        found = self.trace((), None)
        if found.opaque is None or not any(p.is_meta for p in self.module.parameters()) or self.values.missing:
            return found
        StageSplit.of(found, self.plan)  # has no stages, if some are asked for: nothing is made then
        # Its code may hold tensors that nobody else sees, and is tried on a first batch.
        self.module = self.values.whole()
        self._values = Values.of_module(self.module)
        self._traces.clear()
        self._captures = {}
        found = self.trace((), None)
        found.notes.append("initial weights: every rank builds the whole model, since it could not be captured without")
        return found

    def release(self) -> None:
        """Let go of the parameters' values, which only an engine's start needs: a module that nobody else holds is
        given back.

        Not of a model that was not captured, which runs itself.
        """
        if self.general.opaque is None and not all(p.is_meta for p in self.module.parameters()):
            with suppress(Exception):  # a module that cannot be copied (it has a lock, a file) stays as it is
                self.module = self.values.bare()
                self.initial, self._values = None, Values.of_module(self.module)

    def evaluation(self) -> Compiled:
        """The same model in evaluation mode, under the same plan; captured when first needed."""
        with self._lock:
            if self._evaluation is None:
                like = None if self.like is None else self.like.evaluation()
                self._evaluation = replace(
                    self, training=False, like=like, _traces={}, _programs={}, _lock=threading.RLock(), _evaluation=None
                )
            return self._evaluation

    def under(self, plan: Plan) -> Compiled:
        """The same model under another plan; captures serve both, and traces where nothing they depend on differs."""
        return self._under(plan, None)

    def decided(self, plan: Plan) -> Compiled:
        """The same model under a plan that differs in precision or dropout: what a solver decides for this one is done
        there too.
        """
        same = traced_for(plan, self.per_host) == traced_for(self.plan, self.per_host)
        return self._under(plan, self if solves(plan) and not same else self.like)

    def _under(self, plan: Plan, like: Compiled | None) -> Compiled:
        same = like is self.like and traced_for(plan, self.per_host) == traced_for(self.plan, self.per_host)
        traces, weights = (self._traces, self._weights) if same else ({}, {})
        buckets, axes = (self.buckets, self._axes) if same else ([], {})
        return replace(
            self, plan=plan, like=like, buckets=buckets, _axes=axes, _traces=traces, _weights=weights, _programs={},
            _stages={},
            _lock=threading.RLock(), _evaluation=None,
        )  # fmt: skip

    @cached_property
    def alike_over_batch(self) -> bool:
        """Whether ranks along the batch axes may take different ones of the traces that masks make possible: all of
        them exchange the same over these axes, in the same order, and nothing inside of units."""
        axes = {axis for axis in batch_axes(self.plan.mesh) if self.plan.mesh.axis_size(axis) > 1}
        both = [self.general, *([self.trace(self.masks, None)] if self.masks else [])]
        if not axes or len(both) == 1:
            return True
        if any(axes.intersection(inside) for inside, _ in self._inside(both)):
            return False
        exchanged = [
            [
                [(i.op, i.bucket, i.axes, i.lane, i.scatters) for i in program.instructions if axes & set(i.axes)]
                for program in self.programs(one, self.plan.microbatches)
            ]
            for one in both
        ]
        return exchanged[0] == exchanged[1]

    def unit_weights(self) -> Weights:
        """By which the general trace is cut into stages."""
        key = id(self.general)
        if key not in self._weights:
            self._weights[key] = weights_of(self.general, self.devices, self.own_rates())
        return self._weights[key]

    @property
    def devices(self) -> Kind:
        """The kind of the devices that it is made for."""
        return self.kind or Backend.of(self.device).kind

    def own_rates(self) -> Rates:
        """What the devices and links are taken to do, in the precision of the plan."""
        across = axes_across(self.plan.mesh, self.per_host or self.plan.mesh.size)
        return self.rates or rates(self.devices, self.plan.numeric.precision, across, self.model)

    def trace(self, ones: tuple[str, ...], rows: int | None) -> Trace:
        """The trace for microbatches of ``rows`` rows whose fields ``ones`` are all ones."""
        symbolic = self._traces.get((ones, None))
        if symbolic is not None and (symbolic.rows is None or rows is None or symbolic.rows == rows):
            return symbolic
        key = (ones, rows)
        with self._lock:
            if key not in self._traces:
                numeric, rule = self.plan.numeric, self.plan.data.rule
                self._traces[key] = trace(
                    self.module, self.example, loss=self.loss, precision=numeric.precision, training=self.training,
                    dropout=numeric.dropout, device=self.device, ones=ones, rows=rows, group=rule,
                    tensor=self._tensors(ones, rows), captures=self._captures,
                )  # fmt: skip
        return self._traces[key]

    def _tensors(self, ones: tuple[str, ...], rows: int | None) -> TensorParallelSpec:
        """What tensor parallelism does; where parameters lie is the same in all traces."""
        known = [p for b in self.buckets for p in b.parameters]
        layouts = {p.name: p.layout for p in known} if known else None
        axes = self._axes or {axis: self.plan.mesh.axis_size(axis) for axis in tensor_axes(self.plan.mesh)}
        summed = {p.name: p.summed for p in known}
        machine = self._machine() if axes else None
        decided, options = None if self.like is None else self.like.trace(ones, rows).decisions, self.plan.tensor
        return TensorParallelSpec(axes, options.recipe, layouts, options.plan, options.pins, machine, summed, decided)

    @property
    def microbatch_rows(self) -> int:
        """The rows of each microbatch on all ranks together."""
        whole = self.batch_rows or next(iter(self.example.values())).shape[0]
        return max(-(-whole // self.plan.microbatches), 1)

    def _machine(self) -> Machine:
        """What a solver of tensor plans goes by; parameters count as ones of the last rule, the optimizer as Adam."""
        plan, size = self.plan, 8 if self.plan.numeric.precision == "fp64" else 4
        rows = -(-self.microbatch_rows // plan.mesh.axis_size((SHARDS, REPLICAS)))
        rule, shards = plan.data.parameters[-1], plan.mesh.axis_size(SHARDS)
        gradient = size / (shards if rule.grad == "S" else 1)
        state = 0.0 if plan.memory.offloads_optimizer else 2 * size / (shards if rule.state == "S" else 1)
        live = 0 if plan.memory.recompute == "full" else min(plan.mesh.axis_size(PIPELINE), plan.microbatches)
        return Machine(self.own_rates(), rows, plan.tensor.bytes or None, gradient + state, live, self.devices)

    def cut(self, one: Trace, plan: Plan | None = None) -> StageSplit:
        """The stages of a trace, by default under its own plan: those of the training trace, whose units may have other
        numbers.
        """
        if plan is None or plan is self.plan:
            return StageSplit.of(one, self.plan, self._stages)
        return StageSplit.of(one, plan, StageSplit.of(self.general, plan, weights=self.unit_weights).names)

    def programs(self, one: Trace, microbatches: int, batches: int = 1) -> tuple[Program, ...]:
        """The checked programs of a trace for batches of ``microbatches`` microbatches."""
        key = (one, microbatches, batches)
        with self._lock:
            if key not in self._programs:
                self._check_placed(one, self.buckets)
                plan = self.plan.replace(microbatches=microbatches)
                programs = lower(
                    one, plan, buckets=self.buckets, cut=self.cut(one), training=self.training, batches=batches
                )
                check(programs, plan.mesh)
                self._programs[key] = programs
        return self._programs[key]

    def communicators(self, traces: Sequence[Trace], batches: int = 1) -> tuple[Members, ...]:
        """What the programs of a batch whose microbatches have these traces communicate through, and their units
        inside.
        """
        inside = self._inside(dict.fromkeys(traces))
        return communicators(self.programs(traces[0], len(traces), batches), self.plan.mesh, inside)

    def first_communicators(self) -> tuple[Members, ...]:
        """What training and evaluation are expected to communicate through, and what collects whole states.

        Evaluation is taken to be training without backward: it is captured when first needed, and may turn out to need
        more then.
        """
        one, plan = self.general, self.plan
        programs = [*self.programs(one, plan.microbatches, steady(plan))]
        if self.training:
            programs += lower(one, plan, buckets=self.buckets, cut=self.cut(one), training=False)
        return communicators(programs, plan.mesh, self.beside_programs(one))

    def beside_programs(self, one: Trace) -> list[tuple[Axes, str]]:
        """Axes and lane of the collectives that no program of the trace has: inside of its units, and where whole
        states are collected.
        """
        whole = dict.fromkeys(((SHARDS,), (PIPELINE,), *(b.axes for b in one.buckets)))
        return [*self._inside([one]), *((axes, "state") for axes in whole)]

    def _inside(self, traces: Iterable[Trace]) -> list[tuple[Axes, str]]:
        """Axes and lane of the collectives inside of units, and of those that count targets."""
        mesh, found = self.plan.mesh, dict[tuple[Axes, str], None]()
        rows = tuple(axis for axis in batch_axes(self.plan.mesh) if mesh.axis_size(axis) > 1)
        for one in traces:
            parts, last = mesh.axis_size(rows), mesh.places(mesh.size - 1, tuple(one.tensor))  # it has most of all
            env = Env(axes=rows, parts=parts, index=parts - 1, rows=one.rows or 0, tensor=last)
            graphs = [unit.graph for unit in one.units] + ([one.targets.graph] if one.targets is not None else [])
            for graph in graphs:
                axes = communicating_axes(graph, env) if graph is not None else ()
                found |= dict.fromkeys((each, str(Lane.COMPUTE)) for each in axes)
        return list(found)

    @staticmethod
    def _check_placed(one: Trace, buckets: Sequence[Bucket]) -> None:
        """:class:`ShardwiseError` where a trace takes parameters to lie, or their gradients to be partial sums,
        otherwise than the buckets, which all traces share."""
        here = {p.name: p for b in buckets for p in b.parameters}
        for other in (p for b in one.buckets for p in b.parameters):
            own = here.get(other.name, other)
            if (own.placed, own.summed) != (other.placed, other.summed):
                raise ShardwiseError(
                    f"parameter {other.name} lies as {_lying(own)} in training, and as {_lying(other)} in another trace"
                )


def _lying(one: Parameter) -> str:
    return f"{one.placed}, its gradient summed over {', '.join(one.summed)}," if one.summed else str(one.placed)


def solves(plan: Plan) -> bool:
    """Whether a solver decides on ops and parameters."""
    return plan.tensor.plan == "auto" and bool(tensor_axes(plan.mesh))


def traced_for(plan: Plan, per_host: int | None = None) -> tuple[Any, ...]:
    """What a trace depends on; parameters of different rules do not share a bucket, and are sharded over the
    tensor-parallel axes.
    """
    mesh, rules = plan.mesh, plan.data.parameters
    solved: tuple[Any, ...] = ()
    if plan.tensor.plan == "auto":
        across = axes_across(mesh, per_host or mesh.size)
        solved = (plan.microbatches, mesh.axis_size((SHARDS, REPLICAS)), across)
    sizes = tuple((axis, mesh.axis_size(axis)) for axis in tensor_axes(mesh))
    return plan.numeric, plan.tensor, solved, sizes, rules if len(rules) > 1 else ()


def _layout(one: Trace) -> list[list[tuple[str, Layout, tuple[str, ...]]]]:
    return [[(p.name, p.placed, p.summed) for p in b.parameters] for b in one.buckets]


def _shapes(batch: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items()) or "no fields"
