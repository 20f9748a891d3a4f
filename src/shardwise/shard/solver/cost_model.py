"""This predicts the seconds of a local graph before it is made: of each op on local shapes, and of moves between
states.

An op is measured once for the whole batch, on the meta device, forward and backward: FLOPs and bytes of its kernels.
Where a group of axes shards it, it takes the fraction of FLOPs that the largest piece is, and the fraction of bytes
that its local operands and results are.  Moves are those that ``redistribute.py`` makes, each once for a value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from shardwise.core.rates import Rates
from shardwise.graph.captured import Uncapturable
from shardwise.graph.dtypes import GRADIENT_DTYPE
from shardwise.graph.schema import values_of
from shardwise.graph.sizes import expression
from shardwise.ops import collectives
from shardwise.ops.env import ROWS, Env
from shardwise.ops.exchanges import exchanges, stand_in
from shardwise.shard.assignment import Assignment
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy
from shardwise.shard.redistribute import CUTTING, Placements, Step, dual, path
from shardwise.shard.sizes import factored
from shardwise.shard.solver.op_cost import Works


class Value(NamedTuple):
    """The cost of a tensor's moves depends on this: its sizes as priced and as captured, whether each does not depend
    on rows, the bytes of an element, whether it has a gradient, where its rows are sharded, and the bytes of an element
    of its gradient where a move to R sums that: at the end of the step (``postpone``) if it follows from parameters
    alone."""

    shape: tuple[int, ...]
    captured: tuple[int, ...]
    fixed: tuple[bool, ...]
    itemsize: int
    grad: bool
    rows: Placement
    summed: int


class Collective(NamedTuple):
    """This is a collective of a whole of ``nbytes`` bytes over the axes ``groups`` (by number)."""

    backward: bool
    kind: str
    groups: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class MicrobatchCost:
    """These are the seconds of one microbatch on the slowest rank, its ``collectives``, those at the end of its step
    (``once``), and the bytes that it keeps: parameters with gradients and optimizer state, results of ops, and what
    moves make of these."""

    computing: float
    communicating: float
    collectives: tuple[Collective, ...] = ()
    nbytes: int = 0
    once: tuple[Collective, ...] = ()

    @property
    def total(self) -> float:
        """Return the sum of both: nothing is assumed to overlap."""
        return self.computing + self.communicating


class CostModel:
    """This prices ops and moves over ``axes``, beside what ``batch`` says of the batch axes, of microbatches of
    ``rows`` rows a rank of the batch axes, on devices of ``kind``; ``beside``, ``live`` and ``summed`` are as in
    :class:`~shardwise.core.rates.SolverObjective`."""

    def __init__(
        self, context: ShardingContext, batch: Assignment, rates: Rates, rows: int, kind: str,
        axes: Mapping[str, int] | None = None, *, beside: float = 12, live: int = 1, summed: int | None = None,
    ) -> None:  # fmt: skip
        self.context, self.batch, self.rates, self.rows, self.kind = context, batch, rates, rows, kind
        self.state_bytes, self.live, self.summed = beside, live, summed
        self.ranks_of = dict(context.tensor.axes if axes is None else axes)
        self.axes, self.parts = tuple(self.ranks_of), tuple(self.ranks_of.values())
        self.where = context if axes is None else context.over(axes)  # it only makes layouts
        self.values: dict[fx.Node, Value] = {}
        self.works = Works(context, rows, kind)
        self.ops: dict[Any, float] = {}
        self.path = functools.cache(self._path)
        self.step = functools.cache(self._step)

    # ---- values and moves ------------------------------------------------------------------------------------------

    def value(self, node: fx.Node) -> Value:
        """Return the value of a node with one tensor."""
        if node not in self.values:
            tensor = node.meta["val"]
            where = self.batch.states[node][0]
            size, grad = tensor.dtype.itemsize, self.context.carrying[node]
            lies = node.op == "placeholder" and self.context.tensor.layouts is not None
            self.values[node] = Value(
                self.works.sizes(tensor),
                self.context.shape(node),
                tuple(isinstance(expression(n), int) for n in tensor.shape),
                size,
                grad,
                where,
                self.wide(node) if grad and where == "R" and not lies else size,
            )
        return self.values[node]

    def wide(self, node: fx.Node) -> int:
        """Return the bytes of an element of a parameter's gradient where it is summed at the end of the step."""
        dtype = node.meta["val"].dtype
        return self.summed or GRADIENT_DTYPE.get(dtype, dtype).itemsize

    def piece(self, shape: Sequence[int], states: Sequence[Placement]) -> tuple[int, ...]:
        """Return the largest local shape of a tensor of whole ``shape``."""
        out = list(shape)
        for axes in self.sharings(states).values():
            place, parts = states[axes[0]], self.ranks(axes)
            assert isinstance(place, Shard)
            size = self.extent(shape[place.dim], place)
            if size == self.parts[axes[0]]:  # there are equal pieces, and other axes shard within each
                out[place.dim] //= parts
            elif size:
                out[place.dim] = out[place.dim] // size * -(-size // parts)
        return tuple(out)

    def extent(self, size: int, place: Shard) -> int:
        """Return the size of the factor of a dim that is sharded at ``place``."""
        pre = place.pre if isinstance(place.pre, int) else int(place.pre.subs(self.context.symbol, self.rows))
        return size // (pre * place.post)

    @staticmethod
    def sharings(states: Sequence[Placement]) -> dict[tuple[int, Any], tuple[int, ...]]:
        """Return for each factor (dim, pre) that is sharded the axes, by number, that shard it."""
        found: dict[tuple[int, Any], tuple[int, ...]] = {}
        for i, state in enumerate(states):
            if isinstance(state, Shard):
                found[state.dim, state.pre] = (*found.get((state.dim, state.pre), ()), i)
        return found

    def fits(self, value: Value, states: Sequence[Placement]) -> bool:
        """Return whether a tensor can be in these states, beside those of its rows."""
        return self.fits_captured(value.captured, {ROWS: value.rows, **dict(zip(self.axes, states, strict=True))})

    def fits_captured(self, shape: Sequence[int], states: Mapping[str, Placement]) -> bool:
        """Return whether a tensor of captured ``shape`` can be in these states, those of its rows and over axes."""
        every = [(g, s) for g, s in states.items() if isinstance(s, Shard)]
        for dim in {s.dim for _, s in every}:
            found = [(g, s) for g, s in every if s.dim == dim]
            if len(found) > 1 or not isinstance(found[0][1].pre, int):
                try:
                    factored(shape[dim], [(g, self.context.behind_rows(states, s)) for g, s in found], self.ranks_of)
                except Uncapturable:
                    return False
        return True

    def together(self, form: OpSharding, rows: Strategy, strategies: Mapping[str, Strategy]) -> bool:
        """Return whether an op's strategies over axes go together, and with its strategy on the rows."""
        return self.where.together(form, {ROWS: rows, **strategies}, self.fits_captured)

    def _path(self, value: Value, states: Placements, goals: Placements) -> tuple[Step, ...] | None:
        """Return the moves from states to goals; None where a state between them does not fit."""
        found = path(_Priced(self, value), states, goals)
        return tuple(found) if all(self.fits(value, step.result) for step in found) else None

    def collectives(self, value: Value, step: Step) -> Iterator[Collective]:
        """Yield the collectives of a move."""
        there, back = collectives.kinds(getattr(collectives, step.name), dual(step))
        whole = self.piece(value.shape, step.result if step.name == "gather" else step.states)
        nbytes = math.prod(whole) * value.itemsize
        if step.name in CUTTING:
            nbytes = self.padded(value, step, whole, nbytes)
        if there:
            yield Collective(False, there, step.groups, nbytes)
        if back and value.grad:
            wide = step.name == "replicate"
            yield Collective(True, back, step.groups, math.prod(whole) * value.summed if wide else nbytes)

    def padded(self, value: Value, step: Step, whole: Sequence[int], nbytes: int) -> int:
        """Return the bytes of a whole, including the padding of uneven pieces."""
        sharded = step.sharded
        place, parts = sharded[step.groups[0]], self.ranks(step.groups)
        assert isinstance(place, Shard)
        size, local = (self.extent(sizes[place.dim], place) for sizes in (value.shape, whole))
        if size == self.parts[step.groups[0]] or not local:
            return nbytes
        outer = self.ranks(i for i in self.sharings(sharded)[place.dim, place.pre] if i not in step.groups)
        return nbytes // local * -(-size // (outer * parts)) * parts

    def ranks(self, groups: Iterable[int]) -> int:
        """Return the number of ranks over the axes ``groups``, which are numbers."""
        return math.prod(self.parts[i] for i in groups)

    def once(self, node: fx.Node, states: Sequence[Placement]) -> Iterator[Collective]:
        """Yield the all-reduce at the end of the step of a parameter's gradient that is a partial sum until then; the
        step is taken to have one microbatch."""
        groups, value = tuple(i for i, s in enumerate(states) if s == "R"), self.value(node)
        if groups and value.grad:
            yield Collective(True, "all_reduce", groups, math.prod(self.piece(value.shape, states)) * self.wide(node))

    def seconds(self, one: Collective) -> float:
        return self.rates.collective(one.kind, one.nbytes, [self.axes[i] for i in one.groups], self.ranks(one.groups))

    def _step(self, value: Value, step: Step) -> float:
        return sum(self.seconds(one) for one in self.collectives(value, step))

    def steps(self, value: Value, states: Placements, goals: Iterable[Placements]) -> frozenset[Step] | None:
        """Return all moves that make a value what its users want; None where there is no way."""
        paths = [self.path(value, states, goal) for goal in goals]
        return None if None in paths else frozenset(step for path in paths for step in path or ())

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def kept(self, node: fx.Node, strategies: Sequence[Strategy]) -> int:
        """Return the bytes of an op's results with a gradient, kept for backward of live microbatches; 0 for a view."""
        if not self.context.carrying[node] or not self.works.work(node).forward[1]:
            return 0
        found = 0
        for i, tensor in enumerate(values_of(node)):
            states = [s.results[i] for s in strategies] or ["I"] * len(self.axes)
            found += math.prod(self.piece(self.works.sizes(tensor), states)) * tensor.dtype.itemsize
        return found * self.live

    def copied(self, value: Value, step: Step) -> int:
        """Return the bytes, of live microbatches, of what a move makes of a value with a gradient."""
        new = step.name in ("gather", "all_reduce", "scatter") and value.grad
        return math.prod(self.piece(value.shape, step.result)) * value.itemsize * self.live if new else 0

    def resting(self, node: fx.Node, states: Sequence[Placement]) -> int:
        """Return the bytes of a parameter, with gradient and optimizer state if it is trained; 0 if it is not read."""
        if not node.users:
            return 0
        value = self.value(node)
        return round(math.prod(self.piece(value.shape, states)) * (value.itemsize + self.state_bytes * value.grad))

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def op(self, node: fx.Node, form: OpSharding | None, strategies: Sequence[Strategy]) -> float:
        """Return the seconds of an op, forward and backward, by its strategy on each axis; without any it is whole."""
        key = (self.works.key(node), tuple(strategies))
        if key not in self.ops:
            self.ops[key] = self._op(node, form, strategies)
        return self.ops[key]

    def _op(self, node: fx.Node, form: OpSharding | None, strategies: Sequence[Strategy]) -> float:
        work = self.works.work(node)
        flops = nbytes = 1.0
        if form is not None and strategies:
            sides = [
                *(
                    (self.works.sizes(o.meta["val"]), [s.operands[i] for s in strategies])
                    for i, (o, _) in enumerate(form.operands)
                ),
                *((shape, [s.results[i] for s in strategies]) for i, shape in enumerate(self.results(node))),
            ]
            whole, local = (
                sum(map(math.prod, ts)) for ts in zip(*((s, self.piece(s, at)) for s, at in sides), strict=True)
            )
            nbytes = local / whole if whole else 1.0
            for i in range(len(self.axes)):
                flops *= min((self.share(shape, states[i], self.parts[i]) for shape, states in sides), default=1.0)
        return sum(self.rates.computing(flops * f, nbytes * b) for f, b in (work.forward, work.backward))

    def share(self, shape: Sequence[int], state: Placement, parts: int) -> float:
        """Return the fraction of a dim that the largest piece is."""
        if not isinstance(state, Shard):
            return 1.0
        size = self.extent(shape[state.dim], state)
        return -(-size // parts) / size if size else 1.0

    def results(self, node: fx.Node) -> list[tuple[int, ...]]:
        return [self.works.sizes(v) for v in values_of(node)]

    def exchanges(self, form: OpSharding | None, strategies: Sequence[Strategy]) -> list[Collective]:
        """Return the collectives that an op makes by itself."""
        if form is None or form.call is None or not strategies:
            return []
        given = []
        for k, (operand, _) in enumerate(form.operands):
            tensor = operand.meta["val"]
            shape = self.piece(self.works.sizes(tensor), [s.operands[k] for s in strategies])
            given.append(stand_in(shape, tensor.dtype, self.context.carrying[operand]))
        call = form.call(dict(zip(self.axes, strategies, strict=True)), given)
        if call is None:
            return []
        args = fx.map_arg(call.args, lambda n: 1)  # a number that the graph computes may be any
        # The last rank has most.
        env = Env(rows=self.rows, tensor={axis: (n, n - 1) for axis, n in self.ranks_of.items()})
        kwargs = call.kwargs if call.count is None else {**call.kwargs, "count": 1}  # the step counts beforehand
        found = exchanges(env, call.function, args, kwargs)
        number = self.axes.index
        return [Collective(one.backward, one.kind, tuple(map(number, one.axes)), one.nbytes) for one in found]


@dataclass(frozen=True)
class _Priced:
    """This is a value of a captured graph, as a :class:`Movable` that is priced."""

    prices: CostModel
    value: Value

    @property
    def grad(self) -> bool:
        return self.value.grad

    @property
    def together(self) -> tuple[int, ...]:
        return ()

    def fits(self, states: Placements) -> bool:
        return self.prices.fits(self.value, states)

    def same_cut(self, states: Placements, after: Placements, dim: int) -> bool:
        return self.value.fixed[dim] and self.prices.where.same_cut(
            self.value.captured, self.named(states), self.named(after), dim
        )

    def named(self, states: Placements) -> dict[str, Placement]:
        return {ROWS: self.value.rows, **dict(zip(self.prices.axes, states, strict=True))}
