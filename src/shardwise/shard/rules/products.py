"""These rules are for contractions: matrix products, convolutions, recurrent layers."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise.core.mesh import Mesh
from shardwise.graph.aten_ops import Fact, named
from shardwise.graph.torch_private import schema
from shardwise.ops import local_ops
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, OpSharding, Shard, Strategy
from shardwise.shard.rules.table import (
    Table,
    aligned,
    broadcast,
    given,
    may_be_empty,
    op_name,
    pointwise,
    rank_of,
    tensors,
)

aten = torch.ops.aten
RULES = Table()


@RULES.rule("linear")
def _linear(context: ShardingContext, node: fx.Node) -> Any:
    x, w = node.args[:2]
    bias = given(node, "bias")
    lead = list(range(rank_of(context, x) - 1))
    columns = ["n"] if rank_of(context, w) == 2 else []
    operands: list[tuple[fx.Node, Sequence[Any]]] = [(x, [*lead, "k"]), (w, [*columns, "k"])]
    if isinstance(bias, fx.Node):
        operands.append((bias, columns))
    biased = isinstance(bias, fx.Node)
    return context.labelled(
        node, operands, [*lead, *columns], () if biased else (0,), added=frozenset([2] if biased else [])
    )


@RULES.rule("matmul", "bmm", "mm", "mv", "dot", "vdot")
def _matmul(context: ShardingContext, node: fx.Node) -> Any:
    a, b = node.args[:2]
    ranks = rank_of(context, a), rank_of(context, b)
    batch = max(*ranks, 2) - 2
    sizes = context.expressions(node)[:batch]
    mine, theirs = (
        [
            batch - (r - 2) + d if s == sizes[batch - (r - 2) + d] else None
            for d, s in enumerate(context.expressions(x)[: max(r - 2, 0)])
        ]
        for x, r in ((a, ranks[0]), (b, ranks[1]))
    )
    rows, columns = (["m"] if ranks[0] > 1 else []), (["n"] if ranks[1] > 1 else [])
    out = [*range(batch), *rows, *columns]
    return context.labelled(node, [(a, [*mine, *rows, "k"]), (b, [*theirs, "k", *columns])], out, (0, 1))


@RULES.rule("inner")
def _inner(context: ShardingContext, node: fx.Node) -> Any:
    a, b = node.args[:2]
    if not (rank_of(context, a) and rank_of(context, b)):
        return pointwise(context, node, (0, 1))
    rows, columns = ([f"{name}{d}" for d in range(rank_of(context, x) - 1)] for name, x in (("m", a), ("n", b)))
    return context.labelled(node, [(a, [*rows, "k"]), (b, [*columns, "k"])], [*rows, *columns], (0, 1))


@RULES.rule("addmm", "baddbmm")
def _addmm(context: ShardingContext, node: fx.Node) -> Any:
    bias, a, b = node.args[:3]
    lead = list(range(rank_of(context, a) - 2))
    out = [*lead, "m", "n"]
    ((_, labels),) = aligned(context, [bias], context.expressions(node))
    names = [out[d] if d is not None else None for d in labels]
    return context.labelled(
        node, [(bias, names), (a, [*lead, "m", "k"]), (b, [*lead, "k", "n"])], out, added=frozenset([0])
    )


@RULES.rule("outer", "ger")
def _outer(context: ShardingContext, node: fx.Node) -> Any:
    return context.labelled(node, [(node.args[0], ["m"]), (node.args[1], ["n"])], ["m", "n"], (0, 1))


@RULES.rule("einsum")
def _einsum(context: ShardingContext, node: fx.Node) -> Any:
    equation, operands = node.args[0].replace(" ", ""), list(node.args[1])
    left, _, right = equation.partition("->")
    terms = left.split(",")
    ranks = [rank_of(context, o) for o in operands]
    wide = max((r - len(t) + 3 for t, r in zip(terms, ranks, strict=True) if "..." in t), default=0)
    dots = [f".{i}" for i in range(wide)]
    names = [_letters(t, dots, r) for t, r in zip(terms, ranks, strict=True)]
    if any(len(set(n)) != len(n) for n in names):
        return None  # a diagonal
    if "->" in equation:
        out = _letters(right, dots, len(right.replace("...", "")) + (wide if "..." in right else 0))
    else:
        plain = left.replace("...", "").replace(",", "")
        out = [*dots, *sorted(c for c in set(plain) if plain.count(c) == 1)]
    sizes = [context.expressions(o) for o in operands]
    full = {n: s for ns, ss in zip(names, sizes, strict=True) for n, s in zip(ns, ss, strict=True) if s != 1}
    pairs = [
        (o, [n if s == full.get(n, 1) else None for n, s in zip(ns, ss, strict=True)])
        for o, ns, ss in zip(operands, names, sizes, strict=True)
    ]
    return context.labelled(node, pairs, out, range(len(pairs)))


def _letters(term: str, dots: list[str], rank: int) -> list[str]:
    """Return the labels of one term of an einsum for a tensor of ``rank`` dims, its ellipsis spelled out."""
    before, _, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    return [*before, *dots[len(dots) - hidden :], *after]


@RULES.rule("bilinear")
def _bilinear(context: ShardingContext, node: fx.Node) -> Any:
    a, b, w = node.args[:3]
    bias = given(node, "bias")
    lead = list(range(rank_of(context, a) - 1))
    operands: list[tuple[fx.Node, Sequence[Any]]] = [(a, [*lead, None]), (b, [*lead, None]), (w, [None] * 3)]
    if isinstance(bias, fx.Node):
        operands.append((bias, [None]))
    return context.labelled(node, operands, [*lead, "n"])


@RULES.rule("cdist")
def _cdist(context: ShardingContext, node: fx.Node) -> Any:
    a, b = node.args[:2]
    lead = broadcast(context, [a, b])[:-2]
    pairs = []
    for x, name in ((a, "m"), (b, "n")):
        own = context.expressions(x)[:-2]
        shift = len(lead) - len(own)
        pairs.append((x, [*(d + shift if s == lead[d + shift] else None for d, s in enumerate(own)), name, None]))
    return context.labelled(node, pairs, [*range(len(lead)), "m", "n"])


@RULES.rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv(context: ShardingContext, node: fx.Node) -> Any:
    operands = tensors(node)
    spatial = rank_of(context, operands[1]) - 2
    lead = ["b"] if rank_of(context, operands[0]) == spatial + 2 else []
    inner: list[Any] = [None] * spatial
    if given(node, "groups", 1) > 1:
        return _conv_of_groups(context, node, lead, inner)
    rows = 0 if op_name(node).startswith("conv_transpose") else 1
    weight = ["n", "n"]
    weight[rows] = "c"
    pairs: list[tuple[fx.Node, Sequence[Any]]] = [(operands[0], [*lead, "c", *inner]), (operands[1], [*weight, *inner])]
    pairs += [(o, ["n"]) for o in operands[2:]]
    out = [*lead, "n", *[f"s{i}" for i in range(spatial)]]

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        kernel, mesh = solved.values[1].meta["layout"], Mesh.spanned(context.tensor.axes)
        if all(math.prod(kernel.local_shape(mesh, rank)) for rank in range(mesh.size)):
            return emitter.plain(node, solved)
        args, options = emitter.filled(node, solved.values)
        return emitter.emit(node, (node.target, rows, *args), options, solved.layout, local_ops.convolution)

    return context.labelled(node, pairs, out, added=frozenset(range(2, len(pairs))), emit=emit, factors=True)


def _conv_of_groups(context: ShardingContext, node: fx.Node, lead: list[Any], inner: list[Any]) -> OpSharding:
    """Return the form of a convolution whose groups are convolutions by themselves: a rank may have some of them."""
    operands, groups = tensors(node), given(node, "groups")
    dim = len(lead)
    pairs: list[tuple[fx.Node, Sequence[Any]]] = [(operands[0], [*lead, "g", *inner])]
    pairs += [(operands[1], ["g", None, *inner]), *((o, ["g"]) for o in operands[2:])]
    out = [*lead, "g", *[f"s{i}" for i in range(len(inner))]]
    dims = [dim, *[0] * (len(operands) - 1)]
    each = [context.shape(o)[d] // groups for o, d in zip(operands, dims, strict=True)]
    wide = context.shape(node)[dim] // groups
    form = context.labelled(node, pairs, out, factors=True)

    def moves(position: int, place: Shard) -> Strategy | None:
        if form.operands[position][1][place.dim] != "g":
            return form.by_label(position, place)
        post, rest = divmod(place.post, each[position])
        if rest:  # the cut is within groups
            return None
        states = [place._replace(dim=d, post=post * n) for d, n in zip(dims, each, strict=True)]
        return Strategy(tuple(states), (place._replace(dim=dim, post=post * wide),))

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        weight = solved.values[1]
        cuts = [q for s in solved.strategies.values() if isinstance(q := s.operands[1], Shard)]
        if not cuts:
            return emitter.plain(node, solved)
        own = emitter.local_dim(weight.meta["layout"], context.shape(operands[1])[0], 0)
        args, options = _by_name(node, emitter.filled(node, solved.values))
        options["groups"] = emitter.sizes.fold(operator.floordiv, [own, each[1]])
        if not any(may_be_empty(context, operands[1], place) for place in cuts):
            return emitter.emit(node, args, options, solved.layout)
        args = (node.target, (dim, each[0], each[1]), *args)
        return emitter.emit(node, args, options, solved.layout, local_ops.convolution_of_groups)

    form.moves, form.emit = moves, emit
    form.grain = {i: Shard(d, 1, n) for i, (d, n) in enumerate(zip(dims, each, strict=True)) if n > 1}
    return form


def _by_name(node: fx.Node, given: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a convolution with all behind the bias by name."""
    args, options = given
    names = [a.name for a in schema(node.target).arguments]
    return args[:3], {**dict(zip(names[3:], args[3:], strict=False)), **options}


@RULES.rule(*named(Fact.RECURRENT))
def _recurrent(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form for sequences of one length; packed ones have no batch dim."""
    if "ordinal" in node.meta:  # its dropout between layers has no keyed form
        return None
    x = node.args[0]
    if rank_of(context, x) != 3 or not isinstance(given(node, "batch_first"), bool):
        return None
    batch = 0 if given(node, "batch_first") else 1
    labels: list[Any] = [None] * 3
    labels[batch] = "b"
    state: list[Any] = [None, "b", None]
    states = set(given(node, "hx")) if op_name(node) == "lstm" else {given(node, "hx")}
    pairs = [(o, labels if o is x else state if o in states else [None] * rank_of(context, o)) for o in tensors(node)]
    outputs = [[lab or f"w{i}" for i, lab in enumerate(one)] for one in (labels, state, state)]
    return context.labelled(node, pairs, outputs[: len(node.meta["val"])], several=True)
