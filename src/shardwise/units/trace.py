"""A traced model as data: its units, parameters and buckets. The rest of shardwise knows a model only in this form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwise.capture.checks import Checks
from shardwise.capture.host_draws import HostDraws
from shardwise.core.errors import ShardwiseError
from shardwise.core.flat import ALIGN, FlatBuffer
from shardwise.core.layout import Layout
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.tensor_options import NON_TENSOR_AXES
from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.dtypes import GRADIENT_DTYPE
from shardwise.graph.schema import op_name
from shardwise.ops.env import Env
from shardwise.parallel.data import SHARDS
from shardwise.shard.assignment import Decisions
from shardwise.shard.op_spec import Placement
from shardwise.shard.sizes import local_shape
from shardwise.shard.solver.cost_model import MicrobatchCost
from shardwise.shard.solver.op_cost import Repeats
from shardwise.units.batch_sums import BatchSums
from shardwise.units.exchanges import Merge
from shardwise.units.own_numbers import OwnNumbers
from shardwise.units.row_sums import Step
from shardwise.units.segments import Moves

INPUTS_OF = "inputs of "
"""The name of a unit of inputs that one other unit reads begins so, and goes on with the name of that one."""


NOT_CAPTURED = "the whole model: it was not captured"
"""This stands among what is unknown of a model that is one opaque unit."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that units compute with; tied parameters are one, under the first of their names.

    ``shape`` is the shape of the whole parameter. ``layout`` says which part of it each rank has over the
    tensor-parallel axes; None means that every rank has all of it. Over the axes ``summed``, as over those of the
    batch, its gradient leaves backward as a partial sum. Raises :class:`ShardwiseError` if the layout has another shape
    or shards over an axis that is not tensor-parallel.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    units: tuple[int, ...]
    layout: Layout | None = None
    summed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.layout is not None and (self.layout.shape != self.shape or set(self.axes) & set(NON_TENSOR_AXES)):
            raise ShardwiseError(
                f"parameter {self.name} of shape {self.shape} cannot lie as {self.layout}; legal: a layout of its "
                "shape, "
                f"sharded over none of {', '.join(NON_TENSOR_AXES)}"
            )

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return int(torch.Size(self.shape).numel())

    @property
    def placed(self) -> Layout:
        """The layout of the parameter; it is replicated where ``layout`` is None."""
        return Layout.replicated(self.shape) if self.layout is None else self.layout

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard the parameter, sorted."""
        return () if self.layout is None else tuple(sorted(self.layout.sharding_axes))

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of the part of the parameter that ``rank`` has."""
        return self.placed.local_shape(mesh, rank)


@dataclass(frozen=True)
class Bucket:
    """Parameters that share a flat buffer: they have the same dtype and are used by the same units.

    They also agree in whether they learn, in the axes that shard them, in the axes over which their gradients are
    ``summed``, and in the group that ``trace`` was given. So every element of a bucket is treated alike. A bucket that
    is a ``table`` has one parameter, a matrix, whose gradient has the rows that were looked up.
    """

    index: int
    parameters: tuple[Parameter, ...]
    units: tuple[int, ...]
    dtype: torch.dtype
    learns: bool = True
    axes: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    table: bool = False

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        """The parameters by name."""
        return {p.name: p for p in self.parameters}

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameters, without padding."""
        return sum(p.numel for p in self.parameters)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole parameters in the compute dtype, without padding."""
        return self.numel * self.dtype.itemsize

    @property
    def wide(self) -> torch.dtype:
        """The dtype of gradients, master weights and optimizer state."""
        return GRADIENT_DTYPE.get(self.dtype, self.dtype)

    def layout(self, choice: OptimizerChoice, mesh: Mesh, rank: int) -> FlatBuffer:
        """Return the flat buffer of the parts of the parameters that ``rank`` has; ordered by their groups.

        It is padded so that it can be cut into equal ranges over ``dp``, which have whole rows of a table. Ranks that
        differ only in axes that do not shard the bucket have the same layout.
        """
        groups = [choice.group_of(p.name, p.shape) if self.learns else 0 for p in self.parameters]
        items = [(p.name, p.local_shape(mesh, rank), group) for p, group in zip(self.parameters, groups, strict=True)]
        align = math.lcm(ALIGN, self.width * self.dtype.itemsize) if self.table else ALIGN
        return FlatBuffer.pack(items, mesh.axis_size(SHARDS), self.dtype.itemsize, align)

    @property
    def width(self) -> int:
        """The number of elements of a row of a table."""
        return self.parameters[0].shape[-1]


@dataclass(frozen=True)
class UnbucketedBytes:
    """The bytes that a rank keeps besides its buckets: for each row of the batch, for the model's buffers, and on the
    host for the parameters that no unit reads."""

    row: int = 0
    buffers: int = 0
    unused: int = 0


class Repeated(NamedTuple):
    """The cost of an op without a sharding rule, in the module at ``path``: every rank computes it whole, ``times``
    times in a microbatch, with ``flops`` FLOPs and ``bytes`` bytes of memory traffic in all.
    """

    op: str
    path: str
    times: int
    flops: float
    bytes: float


@dataclass(kw_only=True, eq=False)
class Unit:
    """A piece of the model: ``function(env, *parameters, *buffers, *constants, *fields, *inputs)`` returns a tuple.

    ``inputs`` and ``outputs`` are the names of live tensors, which units hand to each other; the values that the
    function returns are the ``outputs``, then the ``updates``: new values of buffers, and values that are kept
    beside the loss. ``input_grads`` and ``output_grads`` say which inputs and outputs have gradients.

    A unit with ``merges`` is an exchange: it runs once a batch, on the inputs of all microbatches, which ``merges`` put
    together, and its outputs are the same for all of them. Units run in phases: all microbatches finish one before
    any begins the next, and an exchange comes first in its ``phase``.

    Units of the same ``block`` are its segments (``units/segments.py``): they are recomputed together, and their
    parameters share buckets. One with ``moves`` only moves live tensors between ranks.
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
    ordinal: int = 0  # the ordinal of the unit's first random op
    reads_sums: bool = False  # whether its function reads sums that the step makes beforehand
    collectives: bool = False  # whether its function communicates
    values: dict[str, Any] = field(default_factory=dict)  # the node of the whole graph for each live tensor
    # `function` with the operands of `products` as last outputs; it keeps what selective recomputation needs on a tape
    training_function: Callable[..., tuple[Tensor, ...]] | None = None
    # the weight of each product, whose gradient is computed outside autograd (`units/weight_products.py`)
    products: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()  # the trainable parameters whose gradient autograd computes, wholly or in part
    # the numbers that sparse lookups are given, by the parameter that is read by such lookups alone
    lookups: Mapping[str, tuple[fx.Node, ...]] = field(default_factory=dict)
    # the unit's inputs and outputs that may share memory with an input of a product
    held: tuple[str, ...] = ()
    merges: tuple[Merge, ...] = ()
    phase: int = 0
    block: str = ""
    moves: Moves | None = None
    inner: tuple[int, ...] = ()  # the numbers of the outputs that other units of the block read
    closed: bool = False  # whether no unit of another block reads an output
    passing: bool = False  # whether only moves read its outputs, which then need not last until its backward

    def __post_init__(self) -> None:
        self.block = self.block or self.name

    @property
    def is_inputs(self) -> bool:
        """Whether the unit gives what follows from batch fields and buffers alone."""
        return self.name == "inputs" or self.name.startswith(INPUTS_OF)

    @property
    def exchanges(self) -> bool:
        """Whether the unit runs once a batch, on what all microbatches have."""
        return bool(self.merges)

    def place(self, env: Env, microbatches: int) -> Env:
        """Return where the unit runs, given the place of one of ``microbatches``."""
        return env.of_exchange(microbatches) if self.exchanges else env

    def sources(self, shared: bool, microbatch: int, microbatches: int) -> range:
        """Return the microbatches whose values it takes, as an input of one of them: an exchange takes those of all
        ``microbatches`` of a batch, and there is only the first's of an input that all of them share."""
        first = microbatch - microbatch % microbatches
        if self.exchanges:
            return range(first, first + microbatches)
        return range(first, first + 1) if shared else range(microbatch, microbatch + 1)

    def merged(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of the unit's function, given those with inputs of all microbatches, each input's one
        after the other."""
        if not self.merges:
            return arguments
        each = len(arguments) // len(self.merges)
        return [merge(arguments[i * each : (i + 1) * each]) for i, merge in enumerate(self.merges)]

    def learning(self, arguments: Sequence[Tensor]) -> dict[tuple[str, int], Tensor]:
        """Return, of the arguments of :meth:`merged`, the inputs that have a gradient, by name and number of the
        microbatch (0, if the unit takes only one)."""
        fixed = sum(map(len, (self.parameters, self.buffers, self.constants, self.fields)))
        each = (len(arguments) - fixed) // max(len(self.inputs), 1)
        values = iter(arguments[fixed:])
        found = {(name, k): next(values) for name in self.inputs for k in range(each)}
        grads = dict(zip(self.inputs, self.input_grads, strict=True))
        return {place: value for place, value in found.items() if grads[place[0]]}

    def local(self, name: str, env: Env) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and the dtype of a live tensor on the rank and for the microbatch of ``env``."""
        meta = self.values[name].meta
        return local_shape(meta["val"], meta["layout"], env), meta["val"].dtype

    def looked_up(self, name: str, env: Env) -> int:
        """Return how many rows of a table lookups read on the rank and for the microbatch of ``env``."""
        nodes = self.lookups.get(name, ())
        return sum(math.prod(local_shape(node.meta["val"], node.meta["layout"], env)) for node in nodes)

    def nbytes(self, name: str, env: Env) -> int:
        """Return the number of bytes of a live tensor on the rank and for the microbatch of ``env``."""
        shape, dtype = self.local(name, env)
        return math.prod(shape) * dtype.itemsize

    @property
    def differentiable(self) -> bool:
        """Whether the unit has a backward."""
        return any(self.output_grads)


def part_of_batch(trace: Trace, env: Env, rows: int, batch: int | None = None) -> Env:
    """Return ``env`` for a microbatch of ``rows`` rows: the first ones where the graph is of a whole batch, or where it
    is part of a ``batch``, whose number of rows that is."""
    whole = trace.rows or batch or rows
    if whole == rows or not trace.cuts_batch:
        return replace(env, rows=rows)
    return replace(env, rows=whole, window=(0, rows))


MEETS_SHOWN = 3  # the most modules that a note names in which rows meet


@dataclass(kw_only=True, eq=False)
class Trace:
    """All that the rest of shardwise knows of a model.

    ``rows`` is None if the batch dim is symbolic; otherwise the graphs take exactly this many rows. ``opaque`` is None,
    or the reason why the model was not captured and is one unit. ``frozen`` parameters have no gradient and take no
    step. ``sums`` are what a step adds up before its first forward, and ``row_sums`` what the model makes of sums over
    rows (`units/row_sums.py`), if it is known. ``cuts_batch`` says that microbatches compute
    partial sums of the whole batch's values; otherwise each is a batch of its own, whose loss is weighed. ``meets``
    names the modules, and their ops, in which rows meet whose values depend on parameters: there a microbatch is
    never a mere part of the batch. ``numbered`` are the ops that look up rows by numbers that a field gives;
    ``own_numbers`` tell whether each row of a batch looks up its own elements by these, which lets it be cut.
    ``exchangeable`` says that microbatches can exchange wherever rows meet (``rows = "batch"``). ``sequential`` are
    the buffers whose new values depend on that, so that each microbatch goes on with what the one before has
    written; others are written once a batch, or, if ``added``, get the sum of what microbatches change.
    ``divisible`` says that the losses of a batch's parts make that of the whole, if the model was not captured,
    ``unknown_buffers`` are those of which that is not known, and ``keeps`` names what each forward changes in Python
    and its results depend on. ``undivided`` are the ops whose backward needs the gradient of all microbatches at
    once. ``tensor`` gives the number of ranks of each axis of tensor parallelism. If users pin parameters,
    ``decided`` gives for each parameter and axis the pin or op that chose its layout. ``predicted()`` gives the
    seconds of a microbatch by the cost model of the solver of tensor plans, and ``decisions`` what a solver chose.
    ``replicated`` are the ops without a sharding rule, as (op, module path). ``kept`` says how the values that are kept
    beside the loss lie on the axes of the batch, by name, and ``outputs``, where the model's outputs are among them,
    the structure that they have (`capture/outputs.py`). ``checks`` tell whether the trace holds for a batch, where
    forward decides by values of it in Python, and ``draws`` give the fields that forward draws there for a batch.
    """

    units: list[Unit]
    buckets: list[Bucket]
    frozen: tuple[str, ...]
    fields: tuple[str, ...]
    sums: BatchSums | None
    precision: str
    row_sums: tuple[Step, ...] | None = None
    cuts_batch: bool = True
    meets: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    own_numbers: OwnNumbers | None = None
    exchangeable: bool = False
    sequential: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    divisible: bool = True
    unknown_buffers: tuple[str, ...] = ()
    undivided: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    rows: int | None = None
    opaque: str | None = None
    notes: list[str] = field(default_factory=list)
    replicated: Sequence[tuple[str, str]] = ()
    beside: UnbucketedBytes = UnbucketedBytes()
    tensor: Mapping[str, int] = field(default_factory=dict)
    decided: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    predicted: Callable[[], MicrobatchCost] | None = None
    repeats: Repeats | None = None
    decisions: Decisions | None = None
    kept: Mapping[str, Placement] = field(default_factory=dict)
    outputs: Any = None
    checks: Checks | None = None
    draws: HostDraws | None = None
    skips: bool = False

    @cached_property
    def shared(self) -> frozenset[str]:
        """The live tensors that are the same for all microbatches: exchanges make them."""
        return frozenset(name for unit in self.units if unit.exchanges for name in unit.outputs)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The number of each unit's block; units of a block follow each other."""
        found: list[int] = []
        for unit in self.units:
            same = bool(found) and unit.block == self.units[unit.index - 1].block
            found.append(found[-1] + (not same) if found else 0)
        return tuple(found)

    @property
    def optional(self) -> tuple[str, ...]:
        """The parameters that have an optimizer of their own each, which takes no step where no rank has reached them:
        all that learn, if forward may decide in Python, or by what tokens choose, and so leave some out."""
        if self.opaque is None and self.checks is None and not self.skips:
            return ()
        return tuple(p.name for p in self.parameters)

    @property
    def weighs_targets(self) -> bool:
        """Whether microbatches are weighed by their targets: each is a batch of its own, and its loss their mean."""
        return not self.cuts_batch and self.sums is not None and self.sums.weight is not None

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters that learn."""
        return tuple(p for b in self.buckets if b.learns for p in b.parameters)

    def ways_to_meet(self, pipelined: bool) -> str:
        """Say under what all rows of a batch meet where the model lets rows meet; ``pipelined`` if there are stages."""
        stages = " with pp = 1" if pipelined else ""
        return "microbatches = 1" + (f' or rows = "batch"{stages}' if self.exchangeable else "")

    def notes_of_microbatches(self, microbatches: int, pipelined: bool = False) -> list[str]:
        """Say where rows meet that depend on parameters, in a line: there microbatches make another step."""
        if microbatches == 1 or not self.meets:
            return []
        shown, more = self.meets[:MEETS_SHOWN], len(self.meets) - MEETS_SHOWN
        where = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
        weighed = "" if self.cuts_batch else ", and its loss weighs as much as it has rows"
        if self.weighs_targets:
            weighed = ", and its loss weighs as much as it has targets"
        return [
            f"{microbatches} microbatches are not the step of the whole batch: rows meet in {where}, where each "
            f"microbatch sees its own rows only{weighed}; all are seen with {self.ways_to_meet(pipelined)}"
        ]

    def notes_without_rule(self, rows: int) -> list[str]:
        """Describe each op without a sharding rule in a line, with its cost for a microbatch of ``rows`` rows."""
        return [
            f"computed whole on every rank: {one.op} in {one.path or 'the model'} ({one.times}x): of {rows} rows "
            f"{one.flops:,.0f} FLOPs and {one.bytes:,.0f} bytes of memory traffic"
            for one in self.without_rule(rows)
        ]

    def host_reads(self) -> list[str]:
        """Return the ops that read values on the host: each makes the host wait for the GPU."""
        graphs = [unit.graph for unit in self.units if unit.graph is not None]
        return sorted({op_name(node) for graph in graphs for node in graph.nodes if has(node, Fact.HOST_READ)})

    def without_rule(self, rows: int) -> list[Repeated]:
        """Return the ops without a sharding rule that cost something, for a microbatch of ``rows`` rows."""
        found = self.repeats(rows) if self.repeats is not None else {}
        return [Repeated(op, path, times, *work.total) for (op, path), (times, work) in found.items()]
