"""These rules are for views, reordered and repeated dims, and new tensors: where rows are after a change of shape."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from shardwise.core.layout import Layout
from shardwise.graph.aten_ops import Fact, named, permutation
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, Shard, Strategy
from shardwise.shard.rules.table import (
    Table,
    aligned,
    given,
    op_name,
    rank_of,
    tensors,
    unary,
    whole_dims,
    with_rows,
)
from shardwise.shard.sizes import regrouped

aten = torch.ops.aten
RULES = Table()


@RULES.rule(*named(Fact.REGROUPS))
def _view(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of a row-major regrouping of dims: a sharded factor stays in one dim, or it is gathered."""
    if node.target is aten.view.dtype:
        return None
    x = node.args[0]
    sizes = (
        given(node, "size") or given(node, "shape") if op_name(node) in ("view", "reshape", "_unsafe_view") else None
    )

    def moves(position: int, place: Shard) -> Strategy | None:
        after = regrouped(context.expressions(x), place, context.expressions(node), context.size(x, place))
        return None if after is None else Strategy((place,), (after,))

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        local = emitter.local_sizes(node, solved.layout, sizes)
        return emitter.emit(node, (solved.values[0], local), {}, solved.layout, aten.reshape.default)

    return unary(context, node, moves, emit, factors=True)


# ---- dims added, removed, reordered ----------------------------------------------------------------------------------


@RULES.rule("unsqueeze")
def _unsqueeze(context: ShardingContext, node: fx.Node) -> Any:
    x, dim = node.args
    labels: list[Any] = list(range(rank_of(context, x)))
    out = [*labels]
    out.insert(dim % (len(labels) + 1), "new")
    return context.labelled(node, [(x, labels)], out, (0,))


@RULES.rule("squeeze")
def _squeeze(context: ShardingContext, node: fx.Node) -> Any:
    """Squeeze the dims that have one element in the whole batch, by number: a rank may happen to have one row."""
    x = node.args[0]
    sizes, rank = context.expressions(x), rank_of(context, x)
    wanted = node.args[1] if len(node.args) > 1 else range(rank)
    dims = {d % rank for d in ([wanted] if isinstance(wanted, int) else wanted)} if rank else set()
    gone = sorted(d for d in dims if sizes[d] == 1)
    labels: list[Any] = [d if d not in gone else None for d in range(rank)]

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        return emitter.emit(node, (solved.values[0], gone), {}, solved.layout, aten.squeeze.dims)

    return context.labelled(node, [(x, labels)], [d for d in labels if d is not None], (0,), emit=emit)


@RULES.rule(*named(Fact.PERMUTES))
def _reordered(context: ShardingContext, node: fx.Node) -> Any:
    order = permutation(node)
    assert order is not None
    return context.labelled(node, [(node.args[0], range(len(order)))], order, (0,))


@RULES.rule("diagonal")
def _diagonal(context: ShardingContext, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(context, x)
    pair = {given(node, "dim1", 0) % rank, given(node, "dim2", 1) % rank}
    labels: list[Any] = [d if d not in pair else None for d in range(rank)]
    return context.labelled(node, [(x, labels)], [*(d for d in labels if d is not None), "diagonal"], (0,))


@RULES.rule("unfold")
def _unfold(context: ShardingContext, node: fx.Node) -> Any:
    x, dim = node.args[:2]
    rank = rank_of(context, x)
    labels: list[Any] = [d if d != dim % rank else None for d in range(rank)]
    return context.labelled(node, [(x, labels)], [*(d if d is not None else "windows" for d in labels), "window"], (0,))


@RULES.rule("view_as_real", "view_as_complex")
def _view_as_complex(context: ShardingContext, node: fx.Node) -> Any:
    x = node.args[0]
    labels: list[Any] = list(range(rank_of(context, x)))
    if op_name(node) == "view_as_real":
        return context.labelled(node, [(x, labels)], [*labels, "parts"], (0,))
    return context.labelled(node, [(x, [*labels[:-1], None])], labels[:-1], (0,))


# ---- more of the same ------------------------------------------------------------------------------------------------


@RULES.rule("expand", "expand_as", "broadcast_to")
def _expand(context: ShardingContext, node: fx.Node) -> Any:
    x, shape = node.args[0], context.shape(node)
    ((_, labels),) = aligned(context, [x], context.expressions(node))
    fresh = [d for d, s in enumerate(node.meta["val"].shape) if context.is_rows(s) and d not in labels]

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        return emitter.emit(
            node, (solved.values[0], emitter.local_sizes(node, solved.layout)), {}, solved.layout, aten.expand.default
        )

    # Each rank may expand to its own rows.
    place = Shard(fresh[0]) if fresh else None
    return context.labelled(node, [(x, labels)], range(len(shape)), (0,), fresh=place, emit=emit)


@RULES.rule("repeat", "tile")
def _repeat(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of copies; where there are as many as rows, each rank may make those of its own."""
    x, given_times = node.args
    times = [1] * (rank_of(context, node) - len(given_times)) + [
        t.meta["val"] if isinstance(t, fx.Node) else t for t in given_times
    ]
    of_rows = [d for d, t in enumerate(times) if not isinstance(t, int)]
    if len(of_rows) > 1 or not all(context.is_rows(times[d]) for d in of_rows):
        return None
    lead = len(times) - rank_of(context, x)

    def moves(position: int, place: Shard) -> Strategy | None:
        dim = place.dim + lead
        if dim in of_rows or not times[dim]:
            return None
        return Strategy((place,), (Shard(dim, place.pre * times[dim], place.post),))

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        local = [emitter.sizes.node(t) for t in times]
        for d in of_rows:
            copies = emitter.local_dim(solved.layout, node.meta["val"].shape[d], d)
            local[d] = emitter.sizes.fold(operator.floordiv, [copies, each(d)])
        return emitter.emit(node, (solved.values[0], local), {}, solved.layout, aten.repeat.default)

    def each(dim: int) -> int:
        """Return how many elements a dim has before it is repeated."""
        return context.shape(x)[dim - lead] if dim >= lead else 1

    form = unary(context, node, moves, emit)
    form.fresh = next((Shard(d, 1, each(d)) for d in of_rows if each(d)), None)
    return form


@RULES.rule("repeat_interleave")
def _repeat_interleave(context: ShardingContext, node: fx.Node) -> Any:
    dim, times = given(node, "dim"), given(node, "repeats")
    if node.target is not aten.repeat_interleave.self_int or dim is None or not isinstance(times, int) or times < 1:
        return None
    dim = dim % rank_of(context, node.args[0])

    def moves(position: int, place: Shard) -> Strategy | None:
        post = place.post * times if place.dim == dim else place.post
        return Strategy((place,), (Shard(place.dim, place.pre, post),))

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        return emitter.emit(node, (solved.values[0], times, dim), {}, solved.layout)

    return unary(context, node, moves, emit)


@RULES.rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
            "replication_pad2d", "replication_pad3d")  # fmt: skip
def _pad(context: ShardingContext, node: fx.Node) -> Any:
    x, pads = node.args[:2]
    rank = rank_of(context, x)
    padded = {rank - 1 - i // 2 for i, n in enumerate(pads) if not isinstance(n, int) or n != 0}
    labels: list[Any] = [d if d not in padded else None for d in range(rank)]
    form = context.labelled(node, [(x, labels)], [d if d not in padded else "pad" for d in range(rank)])
    constant = op_name(node) == "constant_pad_nd" or (
        op_name(node) == "pad" and given(node, "mode", "constant") == "constant"
    )
    if not constant:  # these kernels need elements in each dim but the first
        form.emit = functools.partial(with_rows, node)
    return form


@RULES.rule("diff")
def _diff(context: ShardingContext, node: fx.Node) -> Any:
    operands = tensors(node)
    rank = rank_of(context, node)
    dim = given(node, "dim", -1) % rank
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    out = [d if d != dim else "between" for d in range(rank)]
    return context.labelled(node, [(o, labels) for o in operands], out, "add")


RULES.same(whole_dims(lambda n, r: [-1, -2]), "tril triu")
RULES.same(whole_dims(lambda n, r: given(n, "dims", range(r))), "flip")
RULES.same(whole_dims(lambda n, r: given(n, "dims") or range(r)), "roll")


# ---- factories -------------------------------------------------------------------------------------------------------


@RULES.rule("full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def _factory(context: ShardingContext, node: fx.Node) -> Any:
    at = 1 if op_name(node).startswith("new_") else 0
    fresh = [d for d, s in enumerate(node.meta["val"].shape) if context.is_rows(s)]

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        args = [
            emitter.value[a] if isinstance(a, fx.Node) and i < at else emitter.operands(a)
            for i, a in enumerate(node.args)
        ]
        if fresh:
            args[at] = emitter.local_sizes(node, solved.layout)
        return emitter.emit(node, args, emitter.operands(node.kwargs), solved.layout)

    return context.labelled(
        node, [], range(rank_of(context, node)), fresh=Shard(fresh[0]) if fresh else None, emit=emit
    )


@RULES.rule("arange", "eye")
def _numbered(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of what is made of positions: each rank makes all of it, and takes its part."""
    fresh = node.target is aten.arange.default and context.is_rows(node.meta["val"].shape[0])

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        plain = Layout.replicated(context.shape(node))
        whole = emitter.emit(node, emitter.operands(node.args), emitter.operands(node.kwargs), plain)
        emitter.annotate(whole, plain, dict.fromkeys(emitter.groups, "I"), False, node)
        return emitter.convert(whole, {g: s.results[0] for g, s in solved.strategies.items()})

    return context.labelled(node, [], range(rank_of(context, node)), fresh=Shard(0) if fresh else None, emit=emit)
