"""What the rest of shardwise knows of a model, as data: its units, parameters and buckets, and how its loss weighs
microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwise.capture.casts import GRADIENT_DTYPE
from shardwise.core.errors import ShardwiseError
from shardwise.core.flat import FlatBuffer
from shardwise.core.layout import Layout
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.tensor_options import OTHERS
from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.schema import op_name
from shardwise.ops.collectives import Env
from shardwise.parallel.data import SHARDS
from shardwise.shard.assignment import Decisions
from shardwise.shard.sizes import local_shape
from shardwise.shard.solver.cost_model import Seconds
from shardwise.shard.solver.op_cost import Repeats
from shardwise.units.microbatch_weights import Targets

DECAY = "decay"
"""The group of parameters with weight decay in a flat buffer."""


@dataclass(frozen=True)
class Parameter:
    """A parameter as it takes part in computing: tied ones once, under the first of their names.

    ``shape`` is that of the whole; ``layout`` says what of it each rank has over the tensor-parallel axes, None: all of
    it.  Over those of ``summed`` its gradient leaves backward as a partial sum, as it does over the axes of the batch.
    :class:`ShardwiseError` for a layout of another shape, or over other axes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    units: tuple[int, ...]
    layout: Layout | None = None
    summed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.layout is not None and (self.layout.shape != self.shape or set(self.axes) & set(OTHERS)):
            raise ShardwiseError(
                f"parameter {self.name} of shape {self.shape} cannot lie as {self.layout}; legal: a layout of its "
                "shape, "
                f"sharded over none of {', '.join(OTHERS)}"
            )

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
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

    Frozen ones have buckets of their own, which do not learn; so have those that ``trace`` was told to keep apart, and
    those that are sharded over other ``axes``, or whose gradients are ``summed`` over others: a bucket's elements
    belong to as many ranks each.
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
        """The number of elements of whole parameters."""
        return sum(p.numel for p in self.parameters)

    @property
    def nbytes(self) -> int:
        """The bytes of whole parameters in the dtype that computes, without padding."""
        return self.numel * self.dtype.itemsize

    @property
    def wide(self) -> torch.dtype:
        """The dtype of gradients, masters and optimizer state."""
        return GRADIENT_DTYPE.get(self.dtype, self.dtype)

    def layout(self, choice: OptimizerChoice, mesh: Mesh, rank: int) -> FlatBuffer:
        """Where what ``rank`` has of the parameters lies in a flat buffer, those with weight decay first; equal ranges
        over ``dp``.

        It is the same for ranks that differ in other axes than the bucket's.
        """
        groups = [DECAY if self.learns and choice.decays(p.name, p.shape) else "plain" for p in self.parameters]
        items = [(p.name, p.local_shape(mesh, rank), group) for p, group in zip(self.parameters, groups, strict=True)]
        return FlatBuffer.pack(items, mesh.axis_size(SHARDS), self.dtype.itemsize)


@dataclass(frozen=True)
class Beside:
    """Bytes that a rank keeps beside its buckets: of a row of the batch, of the model's buffers, and, on the host, of
    the parameters that no unit reads."""

    row: int = 0
    buffers: int = 0
    unused: int = 0


class Repeated(NamedTuple):
    """An op without a rule of the module at ``path``, which every rank computes whole, ``times`` times in a
    microbatch: what that costs a rank.
    """

    op: str
    path: str
    times: int
    flops: float
    bytes: float


@dataclass(kw_only=True, eq=False)
class Unit:
    """One piece of the model: ``function(env, *parameters, *buffers, *fields, *inputs) -> outputs``, a tuple.

    ``inputs`` and ``outputs`` name live tensors of the step; ``updates`` are the buffers whose new values are the last
    outputs. ``input_grads`` and ``output_grads`` say which of them have gradients.
    """

    index: int
    name: str
    function: Callable[..., tuple[Tensor, ...]]
    code: str
    graph: fx.Graph | None
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Tensor, ...]
    fields: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    updates: tuple[str, ...]
    input_grads: tuple[bool, ...]
    output_grads: tuple[bool, ...]
    ordinal: int = 0  # of the unit's first random op
    collectives: bool = False
    values: dict[str, Any] = field(default_factory=dict)  # the node of the whole graph that each live tensor is
    # `function` with the operands of `products` as last outputs, and products and attention to be recalled
    training_function: Callable[..., tuple[Tensor, ...]] | None = None
    # the weight of each product: its gradient is multiplied outside autograd (`units/weight_products.py`)
    products: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()  # the trainable parameters whose gradient, or a part of it, autograd has
    # the live tensors, its own or others', whose memory may be that of an input of a product
    held: tuple[str, ...] = ()

    def local(self, name: str, env: Env) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape of a live tensor on one rank for one microbatch, and its dtype."""
        meta = self.values[name].meta
        return local_shape(meta["val"], meta["layout"], env), meta["val"].dtype

    def nbytes(self, name: str, env: Env) -> int:
        """The bytes of a live tensor on one rank for one microbatch."""
        shape, dtype = self.local(name, env)
        return math.prod(shape) * dtype.itemsize

    @property
    def differentiable(self) -> bool:
        """Whether the unit has a backward."""
        return any(self.output_grads)


@dataclass(kw_only=True, eq=False)
class Trace:
    """What the rest of shardwise knows of a model.

    ``rows`` is None where the batch dim is symbolic; otherwise the graph takes microbatches of exactly that many rows.
    ``opaque`` is None, or why the model was not captured and is one unit.  ``frozen`` parameters have no gradient and
    take no step.  ``tensor`` are the axes of tensor parallelism that its graphs are for, each with its number of ranks;
    ``decided`` says of parameters, by axis, which pin or op made them lie as they do, where users pin some.
    ``predicted()`` are the seconds of a microbatch, by which a solver of tensor plans goes, and ``decisions`` what one
    has chosen. ``replicated`` are the ops without a rule, as (op, module path).
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
        return sorted({op_name(node) for graph in graphs for node in graph.nodes if has(node, Fact.HOST_READ)})

    def without_rule(self, rows: int) -> list[Repeated]:
        """The ops without a rule that cost something."""
        found = self.repeats(rows) if self.repeats is not None else {}
        return [Repeated(op, path, times, *work.total) for (op, path), (times, work) in found.items()]
