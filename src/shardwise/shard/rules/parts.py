"""These rules are for parts of tensors and concatenations: slices, selections, splits, and ops that join pieces."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import fx

from shardwise.core.layout import Factor
from shardwise.graph.aten_ops import Fact, named
from shardwise.graph.sizes import expression
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, Shard, Strategy
from shardwise.shard.rules.table import Table, given, rank_of, tensors, unary
from shardwise.shard.sizes import ratio

aten = torch.ops.aten
RULES = Table()

_END = 1 << 62  # slices to the end of a dim end at the largest integer


def _blocks(size: Any, block: Any) -> int | None:
    """Return how many times ``block`` a size or a position is, or None."""
    return ratio(expression(size.meta["val"] if isinstance(size, fx.Node) else size), block)


def _taken(place: Shard, start: Any, stop: Any) -> Shard | None:
    """Return what a cut from ``start`` to ``stop`` takes of a concatenation, if that is whole parts, else None."""
    ends = [0, *itertools.accumulate(n * place.post for n in place.parts)]
    stop = ends[-1] if isinstance(stop, int) and stop >= _END else stop
    if place.pre != 1 or start not in ends or stop not in ends or ends.index(start) >= ends.index(stop):
        return None
    parts = place.parts[ends.index(start) : ends.index(stop)]
    return place._replace(parts=parts if len(parts) > 1 else ())


def _local_end(emitter: Emitter, factor: Factor, place: Shard, end: int) -> Any:
    """Return where ``end``, the end of a part of a concatenation, is on this rank."""
    count = next(i for i in range(len(place.parts) + 1) if sum(place.parts[:i]) * place.post >= end)
    before = place.parts[:count]
    return (
        emitter.sizes.fold(
            operator.mul, [emitter.extent(end, Factor(sum(before), factor.axes, before), ()), place.post]
        )
        if before
        else 0
    )


@RULES.rule("slice")
def _slice(context: ShardingContext, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(context, x)
    dim = given(node, "dim", 0) % rank
    start, end, step = given(node, "start", 0), given(node, "end", _END), given(node, "step", 1)
    labels: list[Any] = list(range(rank))
    if start == 0 and step == 1 and isinstance(end, int) and end >= _END:
        return context.labelled(node, [(x, labels)], labels, (0,))

    def whole_copies(place: Shard) -> tuple[int, int] | None:
        """Return (first, last) of the slice in blocks around what is sharded, if it takes whole blocks, else None."""
        block = context.size(x, place) * place.post
        first = _blocks(start, block)
        last = place.pre if isinstance(end, int) and end >= _END else _blocks(end, block)
        if step != 1 or first is None or last is None:
            return None
        first, last = (min(max(i + place.pre if i < 0 else i, 0), place.pre) for i in (first, last))
        return (first, last) if first < last else None

    def moves(position: int, place: Shard) -> Strategy | None:
        if place.dim != dim:
            return Strategy((place,), (place,))
        if place.parts:
            taken = _taken(place, start, end) if step == 1 else None
            return None if taken is None else Strategy((place,), (taken,))
        if step != 1:  # one element of each group, where groups are whole
            groups = isinstance(end, int) and end >= context.shape(x)[dim] and start in range(step)
            fits = groups and place.post % step == 0
            return Strategy((place,), (place._replace(post=place.post // step),)) if fits else None
        cut = whole_copies(place)
        return None if cut is None else Strategy((place,), (Shard(dim, cut[1] - cut[0], place.post),))

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        places = [s.operands[0] for s in solved.strategies.values()]
        joined = next((q for q in places if isinstance(q, Shard) and q.dim == dim and q.parts), None)
        if joined is not None:
            factor = next(f for f in solved.values[0].meta["layout"].dims[dim] if f.axes)
            ends = [_local_end(emitter, factor, joined, end) for end in (start, min(end, context.shape(x)[dim]))]
            return emitter.emit(node, (solved.values[0], dim, *ends), {}, solved.layout)
        cuts = [(q, c) for q in places if isinstance(q, Shard) and q.dim == dim and (c := whole_copies(q))]
        if not cuts:
            return emitter.plain(node, solved)
        # The outermost axis decides: what is sharded within its blocks leaves no whole blocks of the others.
        place, (first, last) = min(cuts, key=lambda cut: cut[0].pre if isinstance(cut[0].pre, int) else 0)
        whole = x.meta["val"].shape[dim]
        block = emitter.sizes.fold(
            operator.floordiv, [emitter.local_dim(solved.values[0].meta["layout"], whole, dim), place.pre]
        )
        bounds = [emitter.sizes.fold(operator.mul, [block, i]) for i in (first, last)]
        return emitter.emit(node, (solved.values[0], dim, *bounds), {}, solved.layout)

    return unary(context, node, moves, emit, factors=True)


@RULES.rule("narrow")
def _narrow(context: ShardingContext, node: fx.Node) -> Any:
    x = node.args[0]
    labels: list[Any] = [
        d if d != given(node, "dim") % rank_of(context, x) else None for d in range(rank_of(context, x))
    ]
    return context.labelled(node, [(x, labels)], [d if d is not None else "cut" for d in labels], (0,))


@RULES.rule("slice_scatter")
def _slice_scatter(context: ShardingContext, node: fx.Node) -> Any:
    x, source = tensors(node)
    rank = rank_of(context, x)
    dim = given(node, "dim", 0) % rank
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    return context.labelled(
        node, [(x, labels), (source, labels)], [d if d is not None else "cut" for d in labels], "add"
    )


@RULES.rule("select")
def _select(context: ShardingContext, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(context, x)
    labels: list[Any] = [d if d != given(node, "dim") % rank else None for d in range(rank)]
    return context.labelled(node, [(x, labels)], [d for d in labels if d is not None], (0,))


@RULES.rule("select_scatter")
def _select_scatter(context: ShardingContext, node: fx.Node) -> Any:
    x, source = tensors(node)
    rank = rank_of(context, x)
    labels: list[Any] = [d if d != given(node, "dim") % rank else None for d in range(rank)]
    kept = [d for d in labels if d is not None]
    return context.labelled(node, [(x, labels), (source, kept)], [d if d is not None else "one" for d in labels], "add")


@RULES.rule("diagonal_scatter")
def _diagonal_scatter(context: ShardingContext, node: fx.Node) -> Any:
    x, source = tensors(node)
    rank = rank_of(context, x)
    pair = {given(node, "dim1", 0) % rank, given(node, "dim2", 1) % rank}
    labels: list[Any] = [d if d not in pair else None for d in range(rank)]
    kept = [d for d in labels if d is not None]
    return context.labelled(
        node,
        [(x, labels), (source, [*kept, None])],
        [d if d is not None else f"w{i}" for i, d in enumerate(labels)],
        "add",
    )


@RULES.rule(*named(Fact.SPLIT))
def _split(context: ShardingContext, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(context, x)
    dim = given(node, "dim", 0) % rank
    value = node.meta["val"]

    def moves(position: int, place: Shard) -> Strategy | None:
        if place.dim != dim:
            return Strategy((place,), (place,) * len(value))
        if place.parts:
            ends = [0, *itertools.accumulate(v.shape[dim] for v in value)]
            taken = [_taken(place, a, b) for a, b in itertools.pairwise(ends)]
            return Strategy((place,), tuple(one for one in taken if one)) if all(taken) else None
        parts = [_blocks(v.shape[dim], context.size(x, place) * place.post) for v in value]
        return Strategy((place,), tuple(Shard(dim, n, place.post) for n in parts if n)) if all(parts) else None

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        if not any(isinstance(q := s.operands[0], Shard) and q.dim == dim for s in solved.strategies.values()):
            return emitter.plain(node, solved)
        sizes = [emitter.local_dim(one, v.shape[dim], dim) for one, v in zip(solved.layouts, value, strict=True)]
        return emitter.emit(node, (solved.values[0], sizes, dim), {}, solved.layouts, aten.split_with_sizes.default)

    return unary(context, node, moves, emit, len(value), factors=True)


@RULES.rule("unbind")
def _unbind(context: ShardingContext, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(context, x)
    labels: list[Any] = [d if d != given(node, "dim", 0) % rank else None for d in range(rank)]
    return context.labelled(
        node, [(x, labels)], [[d for d in labels if d is not None]] * len(node.meta["val"]), (0,), several=True
    )


# ---- joins -----------------------------------------------------------------------------------------------------------


@RULES.rule("cat", "concat", "concatenate")
def _cat(context: ShardingContext, node: fx.Node) -> Any:
    operands = [o for o in tensors(node) if context.shape(o) != (0,)]
    rank = rank_of(context, node)
    dim = given(node, "dim", 0) % rank
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    form = context.labelled(
        node, [(o, labels) for o in operands], [d if d != dim else "cat" for d in range(rank)], "add"
    )

    def moves(position: int, place: Shard) -> Strategy | None:
        """Along ``dim``, cut all operands within equal blocks, so that each rank concatenates its pieces."""
        if place.dim != dim:
            return form.by_label(position, place)
        block = context.size(operands[position], place) * place.post
        times = [_blocks(context.expressions(o)[dim], block) for o in operands]
        if not all(times):
            return None
        own = tuple(Shard(dim, n, place.post) for n in times if n)
        return Strategy(own, (Shard(dim, sum(n for n in times if n), place.post),))

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        return emitter.emit(node, (solved.values, dim), {}, solved.layout)

    form.moves, form.emit = moves, emit
    return form


@RULES.rule("stack")
def _stack(context: ShardingContext, node: fx.Node) -> Any:
    operands = tensors(node)
    labels: list[Any] = list(range(rank_of(context, operands[0])))
    out = [*labels]
    out.insert(given(node, "dim", 0) % (len(labels) + 1), "new")
    return context.labelled(node, [(o, labels) for o in operands], out, "add")
