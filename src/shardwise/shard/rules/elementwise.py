"""These rules are for elementwise ops.  Those that torch tags as pointwise need no entry, unless they are linear:
linear ones keep partial sums partial."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.graph.schema import is_tensor
from shardwise.graph.sizes import expression
from shardwise.ops import collectives
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission
from shardwise.shard.rules.table import Table, aligned, given, op_name, pointwise, rank_of, tensors

aten = torch.ops.aten
RULES = Table()

RULES.same(
    pointwise,
    """masked_fill copy fill softplus log_sigmoid hardswish floor_divide true_divide __and__ __or__ __xor__ zeros_like
    ones_like full_like empty_like isclose isreal absolute arctan2 fix polar complex greater greater_equal less
    less_equal not_equal special_erf special_xlogy special_expit logit""",
)


@RULES.rule("where")
def _where(context: ShardingContext, node: fx.Node) -> Any:
    # With a condition alone, the result is the positions where it holds.
    return pointwise(context, node) if given(node, "self") is not None else None


@RULES.rule("add", "sub", "subtract")
def _add(context: ShardingContext, node: fx.Node) -> Any:
    return pointwise(context, node, "add") if len(tensors(node)) == 2 else _plus_number(context, node)


@RULES.rule("rsub")
def _rsub(context: ShardingContext, node: fx.Node) -> Any:
    return _plus_number(context, node) if len(tensors(node)) == 1 else pointwise(context, node, "add")


def _plus_number(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of an op that adds a number to its one tensor, or subtracts one from the other: a number is added
    once to a partial sum."""
    x, name = tensors(node)[0], op_name(node)
    dtype = node.meta["val"].dtype
    if x is not node.args[0] or x.meta["val"].dtype != dtype or not (dtype.is_floating_point or dtype.is_complex):
        return pointwise(context, node)
    number, alpha = node.args[1], given(node, "alpha", 1)

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        axes = tuple(g for g, s in solved.strategies.items() if s.operands[0] == "P")
        if not axes:
            return emitter.plain(node, solved)
        (value,), factor = solved.values, -1 if name in ("sub", "subtract") else 1
        if name == "rsub":
            value = emitter.emit(node, (value, -alpha), {}, solved.layout, aten.mul.Scalar)
        else:
            factor = factor * alpha
        args = (emitter.env, value, emitter.arguments(number), factor, axes)
        return emitter.emit(node, args, {}, solved.layout, collectives.plus_number)

    sizes = context.expressions(node)
    return context.labelled(node, aligned(context, [x], sizes), range(len(sizes)), (0,), emit=emit, factors=True)


@RULES.rule("mul", "multiply")
def _mul(context: ShardingContext, node: fx.Node) -> Any:
    return pointwise(context, node, (0, 1))


@RULES.rule("div", "divide")
def _div(context: ShardingContext, node: fx.Node) -> Any:
    return pointwise(context, node, (0,) if is_tensor(node.args[0]) and not given(node, "rounding_mode") else ())


@RULES.rule("neg", "negative", "clone", "contiguous", "alias", "detach", "positive", "to", "_to_copy", "type_as",
"lift_fresh_copy",
            "real", "imag", "conj", "_conj", "conj_physical", "resolve_conj", "resolve_neg")  # fmt: skip
def _linear(context: ShardingContext, node: fx.Node) -> Any:
    source, value = tensors(node)[0].meta["val"], node.meta["val"]
    wide = all(v.is_floating_point() or v.is_complex() for v in (source, value))
    return pointwise(context, node, (0,) if wide and len(tensors(node)) == 1 else ())


@RULES.rule("prelu")
def _prelu(context: ShardingContext, node: fx.Node) -> Any:
    x, weight = tensors(node)
    labels = list(range(rank_of(context, x)))
    channels: list[Any] = (
        [1 if len(labels) > 1 and context.shape(weight) != (1,) else None] if rank_of(context, weight) else []
    )
    return context.labelled(node, [(x, labels), (weight, channels)], labels)


@RULES.rule("glu")
def _glu(context: ShardingContext, node: fx.Node) -> Any:
    rank = rank_of(context, node)
    dim = given(node, "dim", -1) % rank
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    return context.labelled(node, [(tensors(node)[0], labels)], [d if d != dim else "half" for d in range(rank)])


@RULES.rule("broadcast_tensors")
def _broadcast_tensors(context: ShardingContext, node: fx.Node) -> Any:
    operands = tensors(node)
    sizes = [expression(s) for s in node.meta["val"][0].shape]
    labels = list(range(len(sizes)))
    return context.labelled(node, aligned(context, operands, sizes), [labels] * len(operands), several=True)


def expected(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of ``ops/expected.py``: each rank checks what it has."""
    labels = list(range(rank_of(context, node.args[0])))
    return context.labelled(node, [(node.args[0], labels)], labels)


def beside(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of ``ops/beside.py``: its first operand stays as it is, and all ranks have the others whole."""
    x, *parameters = node.args
    labels = list(range(rank_of(context, x)))
    return context.labelled(node, [(x, labels), *((p, [None] * rank_of(context, p)) for p in parameters)], labels)
