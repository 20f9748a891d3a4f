"""Embeddings, gathers, indexing: rows that look up, in tables or in themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise.trace import ops
from shardwise.trace.rules.table import Table, aligned, broadcast, given, op_name, rank_of, tensors
from shardwise.trace.sharding import Propagation
from shardwise.trace.sizes import expression

aten = torch.ops.aten
RULES = Table()


@RULES.rule("embedding")
def _embedding(p: Propagation, node: fx.Node) -> Any:
    weight, index = node.args[:2]
    if given(node, "scale_grad_by_freq", False):
        return None  # a gradient divided by how often a row occurs in the batch
    labels = [f"i{d}" for d in range(rank_of(p, index))]
    values, chosen, partial = p.solve([(weight, [None, None]), (index, labels)])
    layout = p.result(p.shape(node), [*labels, "width"], chosen, partial)
    return p.emit(node, (*values, given(node, "padding_idx", -1)), {}, layout)


@RULES.rule("one_hot")
def _one_hot(p: Propagation, node: fx.Node) -> Any:
    labels = list(range(rank_of(p, node.args[0])))
    return p.labelled(node, [(node.args[0], labels)], [*labels, "classes"])


@RULES.rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _gather(p: Propagation, node: fx.Node) -> Any:
    """Along ``dim`` every operand is whole; another dim passes where all operands have it in full."""
    operands = tensors(node)
    rank = rank_of(p, node)
    dim = given(node, "dim") % rank if rank else 0
    sizes = [p.expressions(o) for o in operands]
    if any(len(s) != rank for s in sizes):
        return None
    labels: list[Any] = [d if d != dim and all(s[d] == sizes[0][d] for s in sizes) else None for d in range(rank)]
    out = [d if d in labels else f"w{d}" for d in range(rank)]
    return p.labelled(node, [(o, labels) for o in operands], out)


@RULES.rule("take_along_dim")
def _take_along_dim(p: Propagation, node: fx.Node) -> Any:
    operands, dim = tensors(node), given(node, "dim")
    if dim is None:
        return None
    rank = rank_of(p, node)
    sizes = broadcast(p, operands)
    pairs = [(o, [lab if lab != dim % rank else None for lab in labels]) for o, labels in aligned(p, operands, sizes)]
    return p.labelled(node, pairs, [d if d != dim % rank else "taken" for d in range(rank)])


@RULES.rule("index_select")
def _index_select(p: Propagation, node: fx.Node) -> Any:
    x, dim, index = node.args
    rank = rank_of(p, x)
    labels: list[Any] = [d if d != dim % rank else None for d in range(rank)]
    return p.labelled(node, [(x, labels), (index, ["i"] * rank_of(p, index))], [d if d is not None else "i" for d in labels])


# ---- x[i, j] ------------------------------------------------------------------------------------------------------------------


@RULES.rule("index", "index_put", "_unsafe_index", "_unsafe_index_put")
def _index(p: Propagation, node: fx.Node) -> Any:
    x, indices = node.args[:2]
    present = [(d, i) for d, i in enumerate(indices) if isinstance(i, fx.Node)]
    put = op_name(node).endswith("put")
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for _, i in present):
        return _masked_put(p, node) if put else None  # how many elements are taken depends on data
    block = broadcast(p, [i for _, i in present])
    indexed = {d for d, _ in present}
    own: list[Any] = [("x", d) if d not in indexed else None for d in range(rank_of(p, x))]
    names: list[Any] = [("i", d) for d in range(len(block))]
    mine = _own_rows(p, x, present, len(block))
    if mine is not None:
        own[mine[0]] = names[mine[1]]
    elif put:
        names = [None] * len(block)  # rows may write to the same place
    first = min(indexed)
    at = first if max(indexed) - first + 1 == len(indexed) else 0
    rest = [("x", d) for d in range(rank_of(p, x)) if d not in indexed]
    result = [*rest[:at], *names, *rest[at:]]
    operands = [(x, own), *((i, [names[lab] if lab is not None else None for lab in labs])
                            for i, labs in aligned(p, [i for _, i in present], block))]  # fmt: skip
    if not put:
        return _emit_index(p, node, operands, [n if n is not None else "w" for n in result], mine)
    if given(node, "accumulate", False) and mine is None:
        return None
    values = node.args[2]
    sizes = _result_sizes(p, x, indexed, block, at)
    ((_, labels),) = aligned(p, [values], sizes)
    operands.append((values, [result[lab] if lab is not None else None for lab in labels]))
    return _emit_index(p, node, operands, [lab if lab is not None else f"w{d}" for d, lab in enumerate(own)], mine)


def _masked_put(p: Propagation, node: fx.Node) -> Any:
    """``x[mask] = number`` is elementwise, with the mask's dims in front."""
    x, masks, value = node.args[:3]
    mask, *others = list(masks)
    if others or mask is None or p.shape(value) not in ((), (1,)) or given(node, "accumulate", False):
        return None
    labels = list(range(rank_of(p, x)))
    pairs = [(mask, labels[: rank_of(p, mask)]), (value, [None] * rank_of(p, value)), (x, labels)]
    (where, number, source), chosen, partial = p.solve(pairs)
    layout = p.result(p.shape(node), labels, chosen, partial)
    for d in labels[rank_of(p, mask) :]:
        where = p.emit(
            mask,
            (where, d),
            {},
            p.result((*p.shape(mask), *[1] * d)[: d + 1], labels[: d + 1], chosen, False),
            aten.unsqueeze.default,
        )
    return p.emit(node, (where, number, source), {}, layout, aten.where.self)


def _result_sizes(p: Propagation, x: fx.Node, indexed: set[int], block: Sequence[Any], at: int) -> list[Any]:
    rest = [s for d, s in enumerate(p.expressions(x)) if d not in indexed]
    return [*rest[:at], *block, *rest[at:]]


def _emit_index(
    p: Propagation, node: fx.Node, operands: Any, labels: Sequence[Any], mine: tuple[int, int, fx.Node] | None
) -> Any:
    values, chosen, partial = p.solve(operands)
    layout = p.result(p.shape(node), labels, chosen, partial)
    feed = iter(values)
    source = next(feed)
    local = []
    for index in node.args[1]:
        value = next(feed) if isinstance(index, fx.Node) else None
        if mine is not None and index is mine[2]:  # global numbers of own rows, as positions among own rows
            assert value is not None
            value = p.emit(index, (value, p.graph.call_function(ops.row_start, (p.env,))), {}, p.layout(value), aten.sub.Tensor)
        local.append(value)
    return p.emit(node, (source, local, *feed, *p.arguments(node.args[3:])), {}, layout)


def _own_rows(p: Propagation, x: fx.Node, present: Sequence[tuple[int, fx.Node]], rank: int) -> tuple[int, int, fx.Node] | None:
    """(dim of x, dim of the indices' block, index) where rows look at themselves: ``x[arange(rows), …]`` with x's rows sharded."""
    place = p.place(x)
    for d, index in present:
        if place == (d, 1, 1):
            axis = _row_numbers(p, index)
            if axis is not None:
                return d, axis + rank - rank_of(p, index), index
    return None


def _row_numbers(p: Propagation, node: fx.Node) -> int | None:
    """The dim along which a tensor is 0, 1, … up to the number of rows and along all others constant, if it is known to be so."""
    name = op_name(node)
    if name == "arange":
        plain = node.target is aten.arange.default or (given(node, "start") == 0 and given(node, "step", 1) == 1)
        integer = not node.meta["val"].is_floating_point()
        return 0 if plain and integer and expression(node.meta["val"].shape[0]) == p.rows else None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name in ("to", "clone", "contiguous", "alias") and not node.meta["val"].is_floating_point():
        return _row_numbers(p, source)
    if name in ("unsqueeze", "expand", "view", "reshape"):
        axis = _row_numbers(p, source)
        found = [d for d, s in enumerate(p.expressions(node)) if s == p.rows]
        others = [s for s in p.expressions(source) if s != 1]
        one = len(found) == 1 and len(others) == 1  # nothing but the row numbers themselves: the dim is known by its size
        return found[0] if axis is not None and one else None
    return None
