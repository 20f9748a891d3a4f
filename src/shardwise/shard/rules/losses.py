"""These rules are for losses: a mean over rows is this rank's sum divided by the count of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.aten_ops import Fact, named
from shardwise.graph.dtypes import LOW
from shardwise.graph.torch_private import schema
from shardwise.ops import cross_entropy, local_ops
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, OpSharding, OwnCall, Shard, Strategy
from shardwise.shard.rules.table import Table, aligned, broadcast, given, op_name, rank_of, tensors

aten = torch.ops.aten
RULES = Table()


@RULES.rule(*named(Fact.CLASS_LOSS))
def _cross_entropy(context: ShardingContext, node: fx.Node) -> Any:
    x, target = node.args[:2]
    weight, reduction = given(node, "weight"), given(node, "reduction", cross_entropy.MEAN)
    chances = op_name(node) != "cross_entropy_loss"  # log-probabilities, not scores
    rank = rank_of(context, x)
    if rank < 2:
        return None
    labels: list[Any] = ["b", "class", *range(2, rank)]
    classes = rank_of(context, target) == rank  # probabilities, not indices
    theirs = labels if classes else ["b", *range(2, rank)]
    operands: list[tuple[fx.Node, list[Any]]] = [(x, labels), (target, theirs)]
    if isinstance(weight, fx.Node):
        operands.append((weight, [None]))
    learned = isinstance(weight, fx.Node) and context.carrying[weight]  # only torch's own op has a gradient of weights
    ignore, smoothing = given(node, "ignore_index", -100), 0.0 if chances else given(node, "label_smoothing", 0.0)
    form = context.labelled(node, operands, ["b", *range(2, rank)] if reduction == cross_entropy.NONE else [])

    def of_classes(strategy: Strategy) -> bool:
        at = strategy.operands[0]
        return isinstance(at, Shard) and labels[at.dim] == "class"

    def sharing(strategies: Mapping[str, Strategy]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the groups of axes that shard the classes, and those that shard rows."""
        axes = tuple(g for g, s in strategies.items() if of_classes(s))
        return axes, tuple(g for g, s in strategies.items() if isinstance(s.operands[0], Shard) and g not in axes)

    def moves(position: int, place: Shard) -> Strategy | None:
        """Cut rows or classes; over classes, ranks exchange what a row's softmax needs and all have the result, or they
        only add it up where there are log-probabilities."""
        strategy = form.by_label(position, place)
        if strategy is None or not of_classes(strategy):
            return strategy
        if place.parts or not context.shared_out(x, place) or not _at_every_so_many(context, x, place) or learned:
            return None
        return strategy if chances else Strategy(tuple(place if "class" in own else "I" for _, own in operands), ("I",))

    def call(strategies: Mapping[str, Strategy], values: Sequence[Any]) -> OwnCall | None:
        axes, spread = sharing(strategies)
        if not axes and (reduction != cross_entropy.MEAN or not spread):
            return None
        weights = values[2] if len(values) > 2 else None
        options = {
            "ignore_index": ignore, "smoothing": smoothing, "reduction": reduction, "count": None,
            "log_probabilities": chances, "summand": node in context.summands,
            "share": (context.shape(x)[1], axes) if axes else None,
        }  # fmt: skip
        count: Any = None
        if reduction == cross_entropy.MEAN:
            sizes = node.args[0].meta["val"].shape
            targets = OwnCall(cross_entropy.valid_targets, (values[1], weights), {"ignore_index": ignore})
            count = [sizes[0], *sizes[2:]] if target.meta["val"].is_floating_point() else targets
        given = (_before_cast(values[0]), values[1], weights)
        return OwnCall(cross_entropy.cross_entropy, given, options, count, spread)

    form.moves, form.call, form.factors = moves, call, True
    return form


def _at_every_so_many(context: ShardingContext, x: fx.Node, place: Shard) -> bool:
    """Return whether ranks find their classes as pieces of all of them: a cut at multiples of ``post`` has the same
    pieces if it is even over all axes that may share in it."""
    if place.pre != 1:
        return False
    if place.post == 1:
        return True
    size = context.size(x, place)
    return size % math.prod(context.tensor.axes.values()) == 0 or context.stands_for_pieces(size)


def _before_cast(scores: Any) -> Any:
    """Return scores as they were before a cast to fp32: the cross-entropy casts them piece by piece."""
    cast = isinstance(scores, fx.Node) and scores.target is aten.to.dtype
    if not cast or scores.meta["val"].dtype is not torch.float32:
        return scores
    source = scores.args[0]
    return source if isinstance(source, fx.Node) and source.meta["val"].dtype in LOW else scores


@RULES.rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss", "binary_cross_entropy",
            "binary_cross_entropy_with_logits", "poisson_nll_loss", "margin_ranking_loss",
            "hinge_embedding_loss")  # fmt: skip
def _elementwise_loss(context: ShardingContext, node: fx.Node) -> Any:
    operands = tensors(node)
    sizes = broadcast(context, operands)
    return _reduced(context, node, aligned(context, operands, sizes), list(range(len(sizes))), sizes)


@RULES.rule("cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss")
def _row_loss(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of a loss with one number per row, of vectors and maybe targets; one may be for all rows."""
    operands, target, weight = tensors(node), given(node, "target"), given(node, "weight")
    numbers = [o for o in operands if o is target and rank_of(context, o) == 1]
    vectors = [o for o in operands if o is not weight and o not in numbers]
    width = broadcast(context, vectors)
    if len(width) != 2:
        return None
    rows = next((s for s in (width[0], *(context.expressions(o)[0] for o in numbers)) if s != 1), 1)
    labels = dict(aligned(context, vectors, [rows, width[1]]) + aligned(context, numbers, [rows]))
    pairs = [(o, ["b" if d == 0 else None for d in labels.get(o, [None])]) for o in operands]
    return _reduced(context, node, pairs, ["b"], [rows], apart=True)


def _reduced(
    context: ShardingContext, node: fx.Node, pairs: list[tuple[fx.Node, list[Any]]], labels: list[Any],
    sizes: list[Any], apart: bool = False
) -> OpSharding:  # fmt: skip
    """Return the form of a loss whose unreduced result has these labels and sizes: a mean is a sum over the number of
    rows.

    With ``apart`` it is summed after its kernel, whose own sum of no rows may be anything.  So is a mean in low
    precision, whose sum the kernel would round.
    """
    reduction, dtype = given(node, "reduction", cross_entropy.MEAN), node.meta["val"].dtype
    apart = apart or (reduction == cross_entropy.MEAN and dtype in LOW)

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        args, kwargs = emitter.filled(node, solved.values)
        sharded = any(s.sharded for s in solved.strategies.values())
        if not sharded or reduction == cross_entropy.NONE or (reduction == cross_entropy.SUM and not apart):
            return emitter.emit(node, args, kwargs, solved.layout)
        at = [a.name for a in schema(node.target).arguments].index("reduction")
        args, kwargs, how = list(args), dict(kwargs), cross_entropy.NONE if apart else cross_entropy.SUM
        if len(args) > at:
            args[at] = how
        else:
            kwargs["reduction"] = how
        if apart and reduction == cross_entropy.SUM:
            return emitter.emit(node, (node.target, *args), kwargs, solved.layout, local_ops.summed)
        count = emitter.sizes.product(sizes)
        if apart:
            return emitter.emit(node, (node.target, count, dtype, *args), kwargs, solved.layout, local_ops.mean_of)
        total = emitter.emit(node, args, kwargs, solved.layout)
        return emitter.emit(node, (total, count), {}, solved.layout, aten.div.Scalar)

    return context.labelled(node, pairs, labels if reduction == cross_entropy.NONE else [], emit=emit, factors=True)
