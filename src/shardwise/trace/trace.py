"""The trace of a model: its units, parameters and buckets, and how its loss weighs microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.flat import FlatBuffer
from shardwise.core.layout import Layout
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import OTHERS
from shardwise.parallel.data import SHARDS
from shardwise.trace.assignment import Tensors
from shardwise.trace.capture import Captured, LossFunction, Uncapturable, capture
from shardwise.trace.casts import GRADIENT_DTYPE, cast_buffer, cast_field, shadow_dtype
from shardwise.trace.decisions import Decisions
from shardwise.trace.functional import Normal, functionalise
from shardwise.trace.loss import Targets, mean_cross_entropy, summands, targets_of, unweighted
from shardwise.trace.normalise import normalise
from shardwise.trace.opaque import first_loss, opaque_unit
from shardwise.trace.price import Seconds
from shardwise.trace.rules import find
from shardwise.trace.schema import op_name
from shardwise.trace.shard import shard
from shardwise.trace.units import Unit, split
from shardwise.trace.work import Repeats

DECAY = "decay"
"""The group of parameters with weight decay in a flat buffer."""
HOST_READS = frozenset({"transformers::grouped_mm_fallback"})
"""Ops that read values on the host: this one multiplies experts one by one, where there is no kernel for all of them."""

CaptureKey = tuple[str, bool, tuple[str, ...], int | None]
"""Precision, training, the fields that are all ones, static rows: what the graph of a module, loss and batch depends on."""
Captures = dict[CaptureKey, Normal]

NOTHING_LEARNS = (
    "model: no trainable parameter has a gradient, for the loss depends on none; legal: a loss made of the model's output, and "
    "parameters with requires_grad"
)


@dataclass(frozen=True)
class Parameter:
    """A parameter as it takes part in computing: tied ones once, under the first of their names.

    ``shape`` is that of the whole; ``layout`` says what of it each rank has over the tensor-parallel axes, None: all of it.  Over those
    of ``summed`` its gradient leaves backward as a partial sum, as it does over the axes of the batch.
    :class:`ShardwiseError` for a layout of another shape, with partial sums, or over other axes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    units: tuple[int, ...]
    layout: Layout | None = None
    summed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.layout is not None and (self.layout.shape != self.shape or self.layout.partial or set(self.axes) & set(OTHERS)):
            raise ShardwiseError(
                f"parameter {self.name} of shape {self.shape} cannot lie as {self.layout}; legal: a layout of its shape without partial "
                f"axes, sharded over none of {', '.join(OTHERS)}"
            )

    @property
    def numel(self) -> int:
        """Of the whole."""
        return int(torch.Size(self.shape).numel())

    @property
    def placed(self) -> Layout:
        """Its layout, also where that is to be replicated."""
        return Layout.replicated(self.shape) if self.layout is None else self.layout

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard it, sorted."""
        return () if self.layout is None else tuple(sorted(self.layout.sharding_axes))

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The shape of what ``rank`` has of it."""
        return self.placed.local_shape(mesh, rank)


@dataclass(frozen=True)
class Bucket:
    """Parameters that share a flat buffer: those of one unit and dtype, or those that the same several units share.

    Frozen ones have buckets of their own, which do not learn; so have those that ``trace`` was told to keep apart, and those that are
    sharded over other ``axes``, or whose gradients are ``summed`` over others: a bucket's elements belong to as many ranks each.
    """

    index: int
    parameters: tuple[Parameter, ...]
    units: tuple[int, ...]
    dtype: torch.dtype
    learns: bool = True
    axes: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Of whole parameters."""
        return sum(p.numel for p in self.parameters)

    @property
    def nbytes(self) -> int:
        """Of whole parameters in the dtype that computes, without padding."""
        return self.numel * self.dtype.itemsize

    @property
    def wide(self) -> torch.dtype:
        """The dtype of gradients, masters and optimizer state."""
        return GRADIENT_DTYPE.get(self.dtype, self.dtype)

    def layout(self, choice: OptimizerChoice, mesh: Mesh, rank: int) -> FlatBuffer:
        """Where what ``rank`` has of the parameters lies in a flat buffer, those with weight decay first; equal ranges over ``dp``.

        It is the same for ranks that differ in other axes than the bucket's.
        """
        groups = [DECAY if self.learns and choice.decays(p.name, p.shape) else "plain" for p in self.parameters]
        items = [(p.name, p.local_shape(mesh, rank), group) for p, group in zip(self.parameters, groups, strict=True)]
        return FlatBuffer.pack(items, mesh.axis_size(SHARDS), self.dtype.itemsize)


@dataclass(frozen=True)
class Beside:
    """Bytes that a rank keeps beside its buckets: of a row of the batch, of the model's buffers, and, on the host, of the parameters
    that no unit reads."""

    row: int = 0
    buffers: int = 0
    unused: int = 0


class Repeated(NamedTuple):
    """An op without a rule of the module at ``path``, which every rank computes whole, so many ``times`` in a microbatch: what that takes a rank."""

    op: str
    path: str
    times: int
    flops: float
    bytes: float


@dataclass
class Trace:
    """What the rest of shardwise knows of a model.

    ``rows`` is None where the batch dim is symbolic; otherwise the graph takes microbatches of just so many rows.  ``opaque`` is None, or
    why the model was not captured and is one unit.  ``frozen`` parameters have no gradient and take no step.  ``tensor`` are the axes of
    tensor parallelism that its graphs are for, each with its number of ranks; ``decided`` says of parameters, by axis, which pin or op made them
    lie as they do, where users pin some.  ``predicted()`` are the seconds of a microbatch, by which a solver of tensor plans goes, and ``decisions`` what one
    has chosen.
    ``replicated`` are the ops without a rule, as (op, module path).
    """

    units: list[Unit]
    buckets: list[Bucket]
    frozen: tuple[str, ...]
    fields: tuple[str, ...]
    targets: Targets | None
    precision: str
    rows: int | None = None
    opaque: str | None = None
    notes: list[str] = field(default_factory=list)
    replicated: Sequence[tuple[str, str]] = ()
    collectives: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    ones: tuple[str, ...] = ()
    beside: Beside = Beside()
    tensor: Mapping[str, int] = field(default_factory=dict)
    decided: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    predicted: Callable[[], Seconds] | None = None
    repeats: Repeats | None = None
    decisions: Decisions | None = None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Those that learn."""
        return tuple(p for b in self.buckets if b.learns for p in b.parameters)

    def everywhere(self, rows: int) -> list[str]:
        """The ops without a rule, a line for each, with what they cost of a microbatch of ``rows`` rows."""
        return [
            f"computed whole on every rank: {one.op} in {one.path or 'the model'} ({one.times}x): of {rows} rows "
            f"{one.flops:,.0f} FLOPs and {one.bytes:,.0f} bytes of memory traffic"
            for one in self.without_rule(rows)
        ]

    def host_reads(self) -> list[str]:
        """The ops that read values on the host: on a GPU each makes it wait for the device."""
        graphs = [unit.graph for unit in self.units if unit.graph is not None]
        return sorted({op_name(node) for graph in graphs for node in graph.nodes} & HOST_READS)

    def without_rule(self, rows: int) -> list[Repeated]:
        """The ops without a rule that cost something."""
        found = self.repeats(rows) if self.repeats is not None else {}
        return [Repeated(op, path, times, *work.total) for (op, path), (times, work) in found.items()]


def trace(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss: LossFunction | None = None,
    precision: str = "fp32",
    training: bool = True,
    dropout: str = "exact",
    device: torch.device | None = None,
    ones: tuple[str, ...] = (),
    rows: int | None = None,
    opaque: bool = True,
    group: Callable[[str], Hashable] | None = None,
    tensor: Tensors | None = None,
    captures: Captures | None = None,
) -> Trace:
    """Trace ``module`` on rows like those of ``batch``, sharded over the axes of the batch.

    Args:
        loss: called as ``loss(output, fields)``; without it the module returns its loss.
        ones: fields that are known to be all ones in the batches that will use this trace.
        rows: ask for a static graph of so many rows.
        group: parameters (by name) for which it differs never share a bucket.
        tensor: what tensor parallelism does to it; a model that cannot be captured takes none.
        opaque: whether a model that cannot be captured becomes one unit; otherwise :class:`Uncapturable` is raised.
        captures: what earlier traces of this module, loss and batch have captured; what this one does is put there.
    """
    try:
        normal = _normal(module, batch, loss, (precision, training, ones, rows), {} if captures is None else captures)
        captured = normal.captured
        entropy = mean_cross_entropy(normal)
        sharded = shard(
            normal,
            find,
            counted=entropy if unweighted(entropy) else None,
            summands=summands(normal),
            dropout=dropout,
            device=device,
            tensor=tensor,
        )
        targets = targets_of(sharded, entropy) if entropy is not None else None
    except Uncapturable as error:
        if not opaque:
            raise
        if tensor is not None and tensor.axes:
            raise ConfigError(
                f"tp: the model could not be captured, so nothing inside it can be sharded: {error}; legal: tp = 1"
            ) from error
        return _opaque(module, batch, loss, precision, training, str(error), group, device or torch.device("cpu"))
    units = split(sharded)
    used = dict.fromkeys(name for unit in units for name in unit.parameters)  # in the same order in every process
    learning = _learning(units, captured)
    if training and not learning:
        raise ConfigError(NOTHING_LEARNS)
    buckets = _buckets(units, module, precision, learning, group, sharded.layouts, sharded.summed)
    return Trace(
        units, buckets, tuple(n for n in used if n not in learning), tuple(batch), targets, precision, captured.rows, None,
        [*captured.notes, *sharded.notes], tuple(sharded.replicated), sharded.collectives, ones, _beside(module, batch, buckets, precision),
        sharded.tensor, sharded.decided, sharded.predicted, sharded.repeats, sharded.decisions,
    )  # fmt: skip


def _normal(
    module: nn.Module, batch: Mapping[str, Tensor], loss: LossFunction | None, key: CaptureKey, captures: Captures
) -> Normal:
    """The graph that is sharded, which is the same under all plans; nobody changes it."""
    if key not in captures:
        precision, training, ones, rows = key
        normal = functionalise(capture(module, batch, loss=loss, precision=precision, training=training, ones=ones, rows=rows))
        normalise(normal)
        captures[key] = normal
    return captures[key]


def _beside(module: nn.Module, batch: Mapping[str, Tensor], buckets: list[Bucket], precision: str) -> Beside:
    def nbytes(values: Iterable[Tensor]) -> int:
        return sum(v.numel() * v.element_size() for v in values)

    with torch.no_grad():
        rows = [cast_field(torch.empty_like(v[:1], device="meta"), precision) for v in batch.values()]
        buffers = [cast_buffer(torch.empty_like(b, device="meta"), precision) for _, b in module.named_buffers()]
    placed = {p.name for b in buckets for p in b.parameters}
    return Beside(nbytes(rows), nbytes(buffers), nbytes(p for n, p in module.named_parameters() if n not in placed))


def _learning(units: list[Unit], captured: Captured) -> set[str]:
    """Parameters that a gradient reaches: trainable, and on a differentiable path to the loss."""
    found = set()
    for unit in units:
        assert unit.graph is not None
        output = next(n for n in unit.graph.nodes if n.op == "output")
        useful = {n for n, good in zip(output.args[0], unit.output_grads, strict=False) if good}
        stack, seen = list(useful), set()
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(i for i in node.all_input_nodes if i.op == "placeholder" or i.meta.get("grad"))
        places = [n for n in unit.graph.nodes if n.op == "placeholder"][1:]
        found |= {
            name for name, place in zip(unit.parameters, places, strict=False) if place in seen and captured.trainable[name]
        }
    return found


def _buckets(
    units: list[Unit], module: nn.Module, precision: str, learning: set[str], group: Callable[[str], Hashable] | None,
    layouts: Mapping[str, Layout] = MappingProxyType({}), summed: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> list[Bucket]:  # fmt: skip
    """``layouts``: of the parameters that are sharded, by name; ``summed``: the axes over which their gradients are partial sums."""
    own = dict(module.named_parameters(remove_duplicate=False))
    users: dict[str, tuple[int, ...]] = {}
    for unit in units:
        for name in unit.parameters:
            users[name] = (*users.get(name, ()), unit.index)
    groups: dict[tuple[Any, ...], list[Parameter]] = {}
    for name in own:  # the module's own order
        if name in users:
            if name in learning and own[name].is_complex():
                raise ConfigError(
                    f"model: parameter {name} is {own[name].dtype}, which no fused optimizer steps; legal: a real one with a last dim of 2, "
                    "read through torch.view_as_complex"
                )
            dtype = shadow_dtype(module, name, own[name], precision)
            one = Parameter(name, tuple(own[name].shape), dtype, users[name], layouts.get(name), summed.get(name, ()))
            key = (users[name], dtype, name in learning, one.axes, one.summed, group(name) if group is not None else None)
            groups.setdefault(key, []).append(one)
    # Those of one unit in the order of the module, so that all processes agree.
    ordered = sorted(groups, key=lambda k: (k[0][0], len(k[0]), k[0], str(k[1]), not k[2], k[3:5]))
    return [Bucket(i, tuple(groups[k]), *k[:5]) for i, k in enumerate(ordered)]


def _opaque(
    module: nn.Module, batch: Mapping[str, Tensor], loss: LossFunction | None, precision: str, training: bool, reason: str,
    group: Callable[[str], Hashable] | None, device: torch.device,
) -> Trace:  # fmt: skip
    unit = opaque_unit(module, tuple(batch), loss, precision, training)
    real = not any(p.is_meta for p in module.parameters())
    if real and not first_loss(unit, module, batch, precision, device).requires_grad and training:
        raise ConfigError(NOTHING_LEARNS)
    trainable = {n: p.requires_grad for n, p in module.named_parameters()}
    learning = {n for n, good in trainable.items() if good}
    notes = [
        f"not captured, trains as one unit: {reason}",
        "lost with it: overlap of reductions with backward, per-unit recomputation, and any mixing of rows other than BatchNorm's "
        "(a loss that is not a mean of rows, negatives of the same batch) is computed on each rank's own rows",
        "branches that depend on values are decided by each rank's own rows",
    ]
    buckets = _buckets([unit], module, precision, learning, group)
    return Trace(
        [unit], buckets, tuple(n for n in trainable if n not in learning), tuple(batch), None, precision, None, reason, notes,
        beside=_beside(module, batch, buckets, precision),
    )  # fmt: skip
