"""Tables of rules are made with this: registration, the arguments of a captured op by name, and labels for broadcast
dims."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import fx

from shardwise.graph.schema import given, has_argument, is_tensor, op_name
from shardwise.ops import local_ops
from shardwise.shard.context import Rule, ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, Emit, OpSharding, Shard, ShardRule


class Table(dict[str, Rule]):
    """This has rules by the name of the op, whatever its overload."""

    def rule(self, *names: str) -> Callable[[Rule], Rule]:
        """Register a rule for the ops of these names."""

        def register(function: Rule) -> Rule:
            self.update(dict.fromkeys(names, function))
            return function

        return register

    def same(self, function: Rule, names: str) -> None:
        """Register one rule for several ops, their names separated by blanks."""
        self.update(dict.fromkeys(names.split(), function))


def tensors(node: fx.Node) -> list[fx.Node]:
    """Return the tensor operands of a node in the order of its arguments; repeated ones are repeated."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda a: found.append(a) if is_tensor(a) else None)
    return found


def rank_of(context: ShardingContext, node: fx.Node) -> int:
    """Return the number of dims of a node's tensor."""
    return len(context.shape(node))


def dims_of(node: fx.Node, rank: int, none: Sequence[int] | None = None) -> list[int]:
    """Return the dims that the argument ``dim`` names, not negative; or ``none``, by default all, if it names none."""
    dims = given(node, "dim")
    if dims is None or dims == []:
        return list(range(rank)) if none is None else list(none)
    return [d % rank for d in ([dims] if isinstance(dims, int) else dims)] if rank else []


def aligned(
    context: ShardingContext, operands: Sequence[fx.Node], sizes: Sequence[Any]
) -> list[tuple[fx.Node, list[Any]]]:
    """Return operands with labels: the position of each dim in ``sizes``, or None where the operand is broadcast.

    A dim is whole in all of them where the size of one follows from values, for then nobody knows its parts."""
    every = [[None] * (len(sizes) - len(own)) + list(own) for own in map(context.expressions, operands)]
    open_dims = {d for own in every for d, s in enumerate(own) if s is not None and s != 1 and s != sizes[d]}
    out = []
    for node, own in zip(operands, every, strict=True):
        labels = [d if s == sizes[d] and d not in open_dims else None for d, s in enumerate(own)]
        out.append((node, labels[len(sizes) - rank_of(context, node) :]))
    return out


def broadcast(context: ShardingContext, operands: Sequence[fx.Node]) -> list[Any]:
    """Return the sizes, as expressions, that operands broadcast to."""
    out: list[Any] = [1] * max(rank_of(context, o) for o in operands)
    for node in operands:
        own = context.expressions(node)
        for d, size in enumerate(own, len(out) - len(own)):
            if size != 1:
                out[d] = size
    return out


def pointwise(context: ShardingContext, node: fx.Node, linear: Any = ()) -> OpSharding:
    """Return the form of an elementwise op with broadcasting."""
    sizes = context.expressions(node)
    return context.labelled(node, aligned(context, tensors(node), sizes), range(len(sizes)), linear)


def unary(
    context: ShardingContext, node: fx.Node, moves: ShardRule, emit: Emit, results: int = 1, factors: bool = False
) -> OpSharding:
    """Return the form of an op that is linear in its one operand, and whose dims labels do not describe."""
    x = node.args[0]
    shapes = [[None] * len(s) for s in context.shapes(node)]
    assert len(shapes) == results
    return OpSharding(
        node, [(x, [None] * rank_of(context, x))], list(shapes), frozenset({0}), moves=moves, emit=emit, factors=factors
    )


def whole_dims(
    dims: Callable[[fx.Node, int], Sequence[int]], *, never_empty: Callable[[fx.Node, int], bool] | bool = False
) -> Rule:
    """Return a rule: the op needs these dims of its one operand whole and keeps the number of dims; all others pass.

    ``never_empty`` says whether the op's kernel does not take an empty tensor, which a rank may have.
    """

    def apply(context: ShardingContext, node: fx.Node) -> Any:
        x = tensors(node)[0]
        rank = rank_of(context, x)
        gone = {d % rank for d in dims(node, rank)} if rank else set()
        labels: list[Any] = [d if d not in gone else None for d in range(rank)]
        out = [d if d not in gone else "whole" for d in range(rank)]
        value = node.meta["val"]
        several = isinstance(value, tuple | list)
        form = context.labelled(node, [(x, labels)], [out] * len(value) if several else out, several=several)
        if never_empty is True or (never_empty and never_empty(node, rank)):
            form.emit = functools.partial(with_rows, node)
        return form

    return apply


def with_rows(node: fx.Node, emitter: Emitter, solved: Emission, needed: Container[int] | None = None) -> fx.Node:
    """Emit an op of one operand whose kernel needs elements in each dim that is sharded, or in those of them that are
    ``needed``, where a rank may have none."""
    x, context = tensors(node)[0], emitter.context
    places = [q for strategy in solved.strategies.values() if isinstance(q := strategy.operands[0], Shard)]
    dims = sorted({q.dim for q in places if (needed is None or q.dim in needed) and may_be_empty(context, x, q)})
    if not dims:
        return emitter.plain(node, solved)
    rest, options = emitter.arguments(node.args[1:]), emitter.arguments(node.kwargs)
    layouts = solved.layouts if isinstance(node.meta["val"], tuple | list) else solved.layout
    return emitter.emit(node, (node.target, dims, solved.values[0], *rest), options, layouts, local_ops.never_empty)


def may_be_empty(context: ShardingContext, node: fx.Node, place: Shard) -> bool:
    """Return whether a rank may have no element of what is sharded at ``place``."""
    size = context.size(node, place)
    return not isinstance(size, int) or max(place.parts or (size,)) < math.prod(context.tensor.axes.values())


__all__ = [
    "Table", "aligned", "broadcast", "dims_of", "given", "has_argument", "may_be_empty", "op_name", "pointwise",
    "rank_of", "tensors", "unary", "whole_dims", "with_rows",
]  # fmt: skip
