"""Losses: a mean over rows is this rank's sum over everybody's count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.trace import entropy
from shardwise.trace.forms import Form, Place, Solved, Strategy
from shardwise.trace.rules.table import Table, aligned, broadcast, given, op_name, rank_of, tensors
from shardwise.trace.sharding import ROWS, Propagation
from shardwise.trace.torch_private import schema

aten = torch.ops.aten
RULES = Table()

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of reductions


@RULES.rule("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def _cross_entropy(p: Propagation, node: fx.Node) -> Any:
    x, target = node.args[:2]
    weight, reduction = given(node, "weight"), given(node, "reduction", _MEAN)
    plain = op_name(node) == "cross_entropy_loss"
    rank = rank_of(p, x)
    if rank < 2:
        return None
    labels: list[Any] = ["b", "class", *range(2, rank)]
    classes = rank_of(p, target) == rank  # probabilities, not indices
    theirs = labels if classes else ["b", *range(2, rank)]
    operands: list[tuple[fx.Node, list[Any]]] = [(x, labels), (target, theirs)]
    if isinstance(weight, fx.Node):
        operands.append((weight, [None]))
    ignore, smoothing = given(node, "ignore_index", -100), given(node, "label_smoothing", 0.0) if plain else 0.0
    form = p.labelled(node, operands, ["b", *range(2, rank)] if reduction == _NONE else [])

    def moves(position: int, place: Place) -> Strategy | None:
        """Rows, or classes: then ranks exchange what a row's softmax needs."""
        if form.operands[position][1][place.dim] != "class":
            return form.by_label(position, place)
        simple = plain and not classes and weight is None and not smoothing and reduction == _MEAN and rank == 2
        size = p.size(x, place)
        # Ranks find their classes as pieces of all: those of a cut at every so many are the same where it is even.
        fixed = place.pre == 1 and size != p.rows and (place.post == 1 or all(size % n == 0 for n in p.tensor.axes.values()))
        return Strategy((place, "I"), ("I",)) if simple and fixed and position == 0 else None

    def emit(p: Propagation, solved: Solved) -> fx.Node:
        values = list(solved.values)
        weights = values[2] if len(values) > 2 else None
        axes = tuple(g for g, s in solved.strategies.items() if isinstance(q := s.operands[0], Place) and q.dim == 1)
        spread = tuple(g for g, s in solved.strategies.items() if isinstance(q := s.operands[0], Place) and q.dim != 1)
        if reduction != _MEAN or not (spread or axes):
            tail = (weights, reduction, ignore, smoothing) if plain else (weights, reduction, ignore)
            return p.emit(node, (*values[:2], *tail), {}, solved.layout)
        counted = node is p.counted
        if not counted and spread:
            p.count("all_reduce", "count of targets")
        for _ in axes[:1]:
            p.count("all_gather", "softmax over shards of classes")
        options = (ignore, smoothing, counted and ROWS in spread, not plain, node in p.summands)
        args = (p.env, _before_cast(values[0]), values[1], weights, *options)
        if axes:
            args = (*args, (p.shape(x)[1], axes), spread)
        elif spread != (ROWS,):
            args = (*args, None, spread)
        return p.emit(node, args, {}, solved.layout, entropy.cross_entropy)

    def exchange(strategy: Strategy, shapes: Sequence[tuple[int, ...]], parts: int) -> Iterator[tuple[bool, str, int]]:
        """Three numbers a row between ranks with some of the classes each; a count of targets between those with some of the rows."""
        at = strategy.operands[0]
        if isinstance(at, Place) and form.operands[0][1][at.dim] == "class":
            yield False, "all_gather", parts * 3 * shapes[0][0] * max(x.meta["val"].dtype.itemsize, 4)
        elif isinstance(at, Place) and reduction == _MEAN and node is not p.counted:
            yield False, "all_reduce", 8

    form.moves, form.emit, form.exchange = moves, emit, exchange
    return form


def _before_cast(scores: fx.Node) -> fx.Node:
    """Scores before they were cast to fp32: the cross-entropy casts them piece by piece."""
    narrow = (torch.bfloat16, torch.float16)
    if scores.target is not aten.to.dtype or scores.meta["val"].dtype is not torch.float32:
        return scores
    source = scores.args[0]
    return source if isinstance(source, fx.Node) and source.meta["val"].dtype in narrow else scores


@RULES.rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "binary_cross_entropy",
            "binary_cross_entropy_with_logits", "poisson_nll_loss", "margin_ranking_loss", "hinge_embedding_loss")  # fmt: skip
def _elementwise_loss(p: Propagation, node: fx.Node) -> Any:
    operands = tensors(node)
    sizes = broadcast(p, operands)
    return _reduced(p, node, aligned(p, operands, sizes), list(range(len(sizes))), sizes)


@RULES.rule("cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss")
def _row_loss(p: Propagation, node: fx.Node) -> Any:
    """One number a row."""
    operands = tensors(node)
    weight = given(node, "weight")
    if rank_of(p, operands[0]) != 2:
        return None
    pairs = [(o, [None] if o is weight else ["b", *[None] * (rank_of(p, o) - 1)]) for o in operands]
    return _reduced(p, node, pairs, ["b"], p.expressions(operands[0])[:1])


def _reduced(p: Propagation, node: fx.Node, pairs: list[tuple[fx.Node, list[Any]]], labels: list[Any], sizes: list[Any]) -> Form:
    """A loss whose unreduced result has these labels and sizes: a mean over rows is a sum over their number."""
    reduction = given(node, "reduction", _MEAN)

    def emit(p: Propagation, solved: Solved) -> fx.Node:
        args, kwargs = p.filled(node, solved.values)
        if reduction != _MEAN or not any(s.sharded for s in solved.strategies.values()):
            return p.emit(node, args, kwargs, solved.layout)
        at = [a.name for a in schema(node.target).arguments].index("reduction")
        args, kwargs = list(args), dict(kwargs)
        if len(args) > at:
            args[at] = _SUM
        else:
            kwargs["reduction"] = _SUM
        total = p.emit(node, args, kwargs, solved.layout)
        return p.emit(node, (total, p.sizes.product(sizes)), {}, solved.layout, aten.div.Scalar)

    return p.labelled(node, pairs, labels if reduction == _NONE else [], emit=emit)
