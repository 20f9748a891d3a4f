"""Random ops, keyed by the sample's index in the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise.core.layout import Layout
from shardwise.trace import ops
from shardwise.trace.capture import Uncapturable
from shardwise.trace.moves import Place
from shardwise.trace.rules.table import Table, given, op_name, rank_of
from shardwise.trace.sharding import Propagation

aten = torch.ops.aten
RULES = Table()

Batch = tuple[int, int] | None


def sample_dim(p: Propagation, sizes: Sequence[Any], place: Place | None) -> tuple[Batch, bool]:
    """Where the samples are in a random tensor of these sizes, as (dim, minor), and whether it holds those of all ranks."""
    if place is not None:
        return (place[0], place[2]), False
    if p.sizes.symbol is not None:
        return next(((d, m) for d, s in enumerate(sizes) if (m := p.sizes.multiple(s))), None), True
    dims = [d for d, s in enumerate(sizes) if int(s) % p.rows == 0]
    if not dims:
        return None, True
    if dims != [0]:
        raise Uncapturable(f"which dim of a random tensor of sizes {[int(s) for s in sizes]} has the samples is not known")
    return (0, int(sizes[0]) // p.rows), True


def _operand(p: Propagation, x: fx.Node) -> tuple[fx.Node, Layout, Place | None]:
    """An operand whose elements each get a random number: sharded if its rows are the outer factor of their dim."""
    place = p.place(x)
    if place is not None and place[1] != 1:  # samples are not in the order in which one device numbers them
        return p.whole(x), Layout.replicated(p.shape(x)), None
    (value,), chosen, partial = p.solve([(x, range(rank_of(p, x)))])
    return value, p.result(p.shape(x), range(rank_of(p, x)), chosen, partial), place


_DROPOUTS = {"dropout": ops.dropout, "feature_dropout": ops.feature_dropout, "alpha_dropout": ops.alpha_dropout,
             "feature_alpha_dropout": ops.feature_alpha_dropout}  # fmt: skip


@RULES.rule(*_DROPOUTS)
def _dropout(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    value, layout, place = _operand(p, x)
    sizes = node.meta["val"].shape
    if op_name(node).startswith("feature"):
        sizes = (*sizes[:2], *[1] * (len(sizes) - 2))
        if place is not None and place[0] > 1:
            value, layout, place = p.whole(x), Layout.replicated(p.shape(x)), None
    key = (node.meta["ordinal"], *sample_dim(p, sizes, place))
    return p.emit(node, (p.env, value, given(node, "p"), *key), {}, layout, _DROPOUTS[op_name(node)])


_KINDS = {"rand_like": "uniform", "uniform": "uniform", "randn_like": "normal", "normal_functional": "normal", "rand": "uniform",
          "randn": "normal", "randint": "randint"}  # fmt: skip


@RULES.rule("rand_like", "randn_like", "uniform", "normal_functional")
def _random_like(p: Propagation, node: fx.Node) -> Any:
    value, layout, place = _operand(p, node.args[0])
    kind = _KINDS[op_name(node)]
    key = (node.meta["ordinal"], *sample_dim(p, node.meta["val"].shape, place))
    first, second = ("from", "to") if kind == "uniform" else ("mean", "std")
    a, b = given(node, first, 0.0), given(node, second, 1.0)
    if node.meta["val"].dtype != node.args[0].meta["val"].dtype:
        value = p.emit(node, (value, node.meta["val"].dtype), {}, layout, aten.to.dtype)
    return p.emit(node, (p.env, kind, *key, value, a, b), {}, layout, ops.random_like)


@RULES.rule("bernoulli")
def _bernoulli(p: Propagation, node: fx.Node) -> Any:
    chance = given(node, "p")
    x = chance if isinstance(chance, fx.Node) else node.args[0]
    if p.expressions(x) != p.expressions(node):
        raise Uncapturable("bernoulli with a probability that is broadcast")
    value, layout, place = _operand(p, x)
    key = (node.meta["ordinal"], *sample_dim(p, node.meta["val"].shape, place))
    if chance is not None and x is not chance:
        value = p.emit(node, (value, chance), {}, layout, aten.full_like.default)
    return p.emit(node, (p.env, value, *key), {}, layout, ops.bernoulli)


@RULES.rule("rand", "randn", "randint")
def _random(p: Propagation, node: fx.Node) -> Any:
    sizes = node.meta["val"].shape
    fresh = [d for d, s in enumerate(sizes) if p.sizes.is_rows(s)]
    place = (fresh[0], 1, 1) if fresh and p.axes else None
    layout = p.at(p.shape(node), place)
    kind = _KINDS[op_name(node)]
    low, high = (given(node, "low", 0), given(node, "high", 1)) if kind == "randint" else (0, 1)
    key = (node.meta["ordinal"], *sample_dim(p, sizes, place))
    args = (p.env, kind, *key, p.local_sizes(node, layout), node.meta["val"].dtype, p.device, low, high)
    return p.emit(node, args, {}, layout, ops.random_of)
