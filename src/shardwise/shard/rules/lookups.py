"""These rules are for embeddings, gathers and indexing, where rows look up rows of tables or of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.sizes import expression
from shardwise.ops import collectives, local_ops
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, OpSharding, Shard, Strategy
from shardwise.shard.rules.table import Table, aligned, broadcast, given, op_name, rank_of, tensors

aten = torch.ops.aten
RULES = Table()

ADDED = frozenset({0})
"""The first operand of an op that adds others to it."""


@RULES.rule("embedding")
def _embedding(context: ShardingContext, node: fx.Node) -> Any:
    weight, index = node.args[:2]
    if given(node, "scale_grad_by_freq", False):
        return None  # the gradient is divided by how often a row occurs in the batch
    labels = [f"i{d}" for d in range(rank_of(context, index))]
    rows = context.expressions(weight)[0] == context.rows or context.multiple(weight.meta["val"].shape[0])
    # Rows of the batch are looked up by their numbers in the whole batch.
    row = None if rows and weight not in context.parameters else "row"

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        (table, where), padding = solved.values, given(node, "padding_idx", -1)
        factors = tuple((factor.size, factor.axes) for factor in table.meta["layout"].dims[0])
        if not any(axes for _, axes in factors):
            sparse = (False, True) if given(node, "sparse", False) else ()
            return emitter.emit(node, (table, where, padding, *sparse), {}, solved.layout)
        own = emitter.emit(index, (emitter.env, where, factors), {}, where.meta["layout"], local_ops.own_index)
        found = emitter.emit(node, (table, own, -1), {}, solved.layout)
        return emitter.emit(node, (emitter.env, found, where, factors, padding), {}, solved.layout, local_ops.own_only)

    return context.labelled(node, [(weight, [row, "width"]), (index, labels)], [*labels, "width"], emit=emit)


@RULES.rule("one_hot")
def _one_hot(context: ShardingContext, node: fx.Node) -> Any:
    labels = list(range(rank_of(context, node.args[0])))
    return context.labelled(node, [(node.args[0], labels)], [*labels, "classes"])


@RULES.rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _gather(context: ShardingContext, node: fx.Node) -> Any:
    """Keep every operand whole along ``dim``; another dim passes where all operands have it in full."""
    operands = tensors(node)
    rank = rank_of(context, node)
    dim = given(node, "dim") % rank if rank else 0
    sizes = [context.expressions(o) for o in operands]
    if any(len(s) != rank for s in sizes):
        return None
    labels: list[Any] = [d if d != dim and all(s[d] == sizes[0][d] for s in sizes) else None for d in range(rank)]
    out = [d if d in labels else f"w{d}" for d in range(rank)]
    pairs: list[tuple[fx.Node, list[Any]]] = [(o, labels) for o in operands]
    if (
        op_name(node) == "scatter_add"
        and rank
        and sizes[1][dim] == sizes[2][dim]
        and _adds_up(context, node.args[0], dim)
    ):
        pairs[1:] = [(o, [*labels[:dim], "i", *labels[dim + 1 :]]) for o in operands[1:]]
    return context.labelled(node, pairs, out, added=ADDED)


@RULES.rule("index_add")
def _index_add(context: ShardingContext, node: fx.Node) -> Any:
    """Add slices where their numbers say: those of some are a partial sum."""
    x, index, source = tensors(node)
    rank = rank_of(context, x)
    if rank == 0 or rank_of(context, index) != 1 or rank_of(context, source) != rank:
        return None
    dim = given(node, "dim") % rank
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    name = "i" if _adds_up(context, x, dim) else None
    theirs = [d if d != dim else name for d in range(rank)]
    out = [d if d != dim else "whole" for d in range(rank)]
    return context.labelled(node, [(x, labels), (index, [name]), (source, theirs)], out, added=ADDED)


def _adds_up(context: ShardingContext, x: fx.Node, dim: int) -> bool:
    """Return whether what ranks add to a tensor along a dim can be a partial sum: rows of the batch, which microbatches
    have some of, take what is added from all of it."""
    size = context.expressions(x)[dim]
    return isinstance(size, int) and size != context.rows


@RULES.rule("searchsorted")
def _searchsorted(context: ShardingContext, node: fx.Node) -> Any:
    """Look up values in sequences: in one for all, or each row in its own."""
    operands = tensors(node)
    if len(operands) != 2 or given(node, "sorter") is not None:
        return None
    sequence, values = operands
    labels: list[Any] = list(range(rank_of(context, node)))
    rows = [*labels[:-1], None]  # every value looks at the whole sequence
    return context.labelled(
        node, [(sequence, rows if rank_of(context, sequence) > 1 else [None]), (values, labels)], labels
    )


@RULES.rule("take_along_dim")
def _take_along_dim(context: ShardingContext, node: fx.Node) -> Any:
    operands, dim = tensors(node), given(node, "dim")
    if dim is None:
        return None
    rank = rank_of(context, node)
    sizes = broadcast(context, operands)
    pairs = [
        (o, [lab if lab != dim % rank else None for lab in labels]) for o, labels in aligned(context, operands, sizes)
    ]
    return context.labelled(node, pairs, [d if d != dim % rank else "taken" for d in range(rank)])


@RULES.rule("index_select")
def _index_select(context: ShardingContext, node: fx.Node) -> Any:
    x, dim, index = node.args
    rank = rank_of(context, x)
    labels: list[Any] = [d if d != dim % rank else None for d in range(rank)]
    return context.labelled(
        node, [(x, labels), (index, ["i"] * rank_of(context, index))], [d if d is not None else "i" for d in labels]
    )


# ---- x[i, j] ---------------------------------------------------------------------------------------------------------


@RULES.rule("index", "index_put", "_unsafe_index", "_unsafe_index_put")
def _index(context: ShardingContext, node: fx.Node) -> Any:
    x, indices = node.args[:2]
    present = [(d, i) for d, i in enumerate(indices) if isinstance(i, fx.Node)]
    put = op_name(node).endswith("put")
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for _, i in present):
        return _masked_put(context, node) if put else _selected(context, node)
    mine = _own_rows(context, x, present)
    apart, together = _indexed(context, node, present, put, None), _indexed(context, node, present, put, mine)

    def moves(position: int, place: Shard) -> Strategy | None:
        """Cut rows that index themselves together with their numbers."""
        own = mine is not None and position == 0 and place == Shard(mine[0])
        return (together if own else apart).by_label(position, place)

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        feed = iter(solved.values)
        source = next(feed)
        places = {g: q for g, s in solved.strategies.items() if isinstance(q := s.operands[0], Shard)}
        rows = tuple(g for g, q in places.items() if mine is not None and q.dim == mine[0])
        local = []
        for index in indices:
            value = next(feed) if isinstance(index, fx.Node) else None
            if rows and mine is not None and index is mine[2]:
                assert value is not None  # turn the global numbers of own rows into positions among them
                start = emitter.graph.call_function(collectives.row_start, (emitter.env, rows))
                value = emitter.emit(index, (value, start), {}, emitter.layout(value), aten.sub.Tensor)
            local.append(value)
        return emitter.emit(node, (source, local, *feed, *emitter.arguments(node.args[3:])), {}, solved.layout)

    apart.moves, apart.emit = moves, emit
    return apart


def _indexed(
    context: ShardingContext,
    node: fx.Node,
    present: Sequence[tuple[int, fx.Node]],
    put: bool,
    mine: tuple[int, int, fx.Node] | None,
) -> OpSharding:
    """Return the form of ``x[i, j]``, where rows index themselves if ``mine`` says so."""
    x, adds = node.args[0], put and given(node, "accumulate", False)
    block = broadcast(context, [i for _, i in present])
    indexed = {d for d, _ in present}
    own: list[Any] = [("x", d) if d not in indexed else None for d in range(rank_of(context, x))]
    names: list[Any] = [("i", d) for d in range(len(block))]
    if mine is not None:
        own[mine[0]] = names[mine[1]]
    elif put and not (adds and all(_adds_up(context, x, d) for d in indexed)):
        names = [None] * len(block)  # several rows may write to the same place
    first = min(indexed)
    at = first if max(indexed) - first + 1 == len(indexed) else 0
    rest = [("x", d) for d in range(rank_of(context, x)) if d not in indexed]
    result = [*rest[:at], *names, *rest[at:]]
    operands = [(x, own), *((i, [names[lab] if lab is not None else None for lab in labs])
                            for i, labs in aligned(context, [i for _, i in present], block))]  # fmt: skip
    if not put:
        return context.labelled(node, operands, [n if n is not None else "w" for n in result])
    values = node.args[2]
    sizes = _result_sizes(context, x, indexed, block, at)
    ((_, labels),) = aligned(context, [values], sizes)
    operands.append((values, [result[lab] if lab is not None else None for lab in labels]))
    out = [lab if lab is not None else f"w{d}" for d, lab in enumerate(own)]
    return context.labelled(node, operands, out, added=ADDED if adds else frozenset())


@RULES.rule("masked_select")
def _masked_select(context: ShardingContext, node: fx.Node) -> Any:
    return _selected(context, node)


def _selected(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of ``x[mask]``, whose number of elements depends on data: on the axes of the batch a rank has
    those of its own rows."""
    x, masks = node.args[:2]
    mask, *others = masks if isinstance(masks, list | tuple) else [masks]
    if others or not isinstance(mask, fx.Node) or mask.meta["val"].dtype is not torch.bool:
        return None
    sizes = context.expressions(mask)
    if isinstance(context.expressions(node)[0], int):  # the number is known of all rows, and of no part of them
        return None
    every = op_name(node) == "masked_select"  # it broadcasts
    if not sizes or context.expressions(x)[: None if every else len(sizes)] != sizes:
        return None
    pairs: list[tuple[fx.Node, list[Any]]] = [(one, [None] * rank_of(context, one)) for one in (x, mask)]

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        spread = tuple(g for g, s in solved.strategies.items() if s.sharded)
        if not spread:
            emitter.note_whole(node)
            new = emitter.plain(node, solved)
            emitter.learn_sizes(new, node.meta["val"])
            return new
        value, where = solved.values
        chosen = where if every else [where]
        new = emitter.emit(node, (value, chosen), {}, solved.layout)
        emitter.selected(node, new, where, spread)
        return new

    return context.labelled(node, pairs, [None] * rank_of(context, node), selects=True, emit=emit)


def _masked_put(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of ``x[mask] = number``, which is elementwise, with the mask's dims in front."""
    x, masks, value = node.args[:3]
    mask, *others = list(masks)
    if others or mask is None or context.shape(value) not in ((), (1,)) or given(node, "accumulate", False):
        return None
    labels = list(range(rank_of(context, x)))
    pairs = [(mask, labels[: rank_of(context, mask)]), (value, [None] * rank_of(context, value)), (x, labels)]

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        where, number, source = solved.values
        for d in labels[rank_of(context, mask) :]:
            where = emitter.emit(mask, (where, d), {}, solved.layout, aten.unsqueeze.default)
        return emitter.emit(node, (where, number, source), {}, solved.layout, aten.where.self)

    return context.labelled(node, pairs, labels, emit=emit)


def _result_sizes(context: ShardingContext, x: fx.Node, indexed: set[int], block: Sequence[Any], at: int) -> list[Any]:
    rest = [s for d, s in enumerate(context.expressions(x)) if d not in indexed]
    return [*rest[:at], *block, *rest[at:]]


def _own_rows(
    context: ShardingContext, x: fx.Node, present: Sequence[tuple[int, fx.Node]]
) -> tuple[int, int, fx.Node] | None:
    """Return (dim of x, dim of the indices' block, index) where rows may index themselves, or None: ``x[arange(rows),
    …]`` of an x with as many rows."""
    rank, sizes = len(broadcast(context, [i for _, i in present])), context.expressions(x)
    for d, index in present:
        if sizes[d] == context.rows:
            axis = _row_numbers(context, index)
            if axis is not None:
                return d, axis + rank - rank_of(context, index), index
    return None


def _row_numbers(context: ShardingContext, node: fx.Node) -> int | None:
    """Return the dim along which a tensor is known to be 0, 1, … up to the number of rows, and constant along all
    others, or None."""
    name = op_name(node)
    if name == "arange":
        plain = node.target is aten.arange.default or (given(node, "start") == 0 and given(node, "step", 1) == 1)
        integer = not node.meta["val"].is_floating_point()
        return 0 if plain and integer and expression(node.meta["val"].shape[0]) == context.rows else None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name in ("to", "clone", "contiguous", "alias") and not node.meta["val"].is_floating_point():
        return _row_numbers(context, source)
    if name in ("unsqueeze", "expand", "view", "reshape"):
        axis = _row_numbers(context, source)
        found = [d for d, s in enumerate(context.expressions(node)) if s == context.rows]
        others = [s for s in context.expressions(source) if s != 1]
        # If there are only the row numbers themselves, the dim is known by its size.
        one = len(found) == 1 and len(others) == 1
        return found[0] if axis is not None and one else None
    return None
