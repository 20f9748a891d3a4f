"""These rules are for random ops, whose numbers are keyed by the sample's index in the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.aten_ops import Fact, named
from shardwise.graph.captured import Uncapturable
from shardwise.graph.naming import module_path
from shardwise.graph.sizes import depends_on_data
from shardwise.ops import random_ops
from shardwise.ops.env import ROWS
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, OpSharding, Placement, Shard, Strategy
from shardwise.shard.rules.table import Table, given, op_name, rank_of

aten = torch.ops.aten
RULES = Table()

Batch = tuple[int, int] | None


def sample_dim(context: ShardingContext, sizes: Sequence[Any], place: Shard | None, node: fx.Node) -> Batch:
    """Return where samples are in the random tensor of a node, of these sizes, as (dim, its elements per sample), or
    None."""
    if place is not None:
        return place.dim, place.post
    if context.symbol is not None:
        return next(((d, m) for d, s in enumerate(sizes) if (m := context.multiple(s))), None)
    call = node.meta["ordinal"], f"{op_name(node)} in {module_path(node)}", len(sizes)
    dims, known = [d for d, s in enumerate(sizes) if int(s) % context.rows == 0], context.sampled.get(call, -1)
    if not dims or known is None:
        context.sampled[call] = None
        return None
    if dims != [0] and not (0 in dims and known == 0):
        raise Uncapturable(
            f"which dim of a random tensor of sizes {[int(s) for s in sizes]} has the samples is not known"
        )
    context.sampled[call] = 0
    return 0, int(sizes[0]) // context.rows


def keys(
    context: ShardingContext, node: fx.Node, sizes: Sequence[Any], states: Mapping[str, Placement]
) -> tuple[Any, ...]:
    """Return what a random op of these whole ``sizes`` is told of where its elements are: (ordinal, batch, spread,
    grid), with the row in place of ``batch`` where it draws for one row.

    ``spread`` are the groups that shard the samples.  ``grid`` has for each dim the factors of what a sample has of it,
    each with the axes of tensor parallelism that shard it; None where nothing does.
    """
    places = {g: s for g, s in states.items() if isinstance(s, Shard)}
    row = node.meta.get("row")
    if row is not None and ROWS in places:
        raise Uncapturable("random numbers for one row of several that ranks share")
    first, batch = None, row
    if row is None:
        of_samples = (s for s in places.values() if s.pre == 1 and _per_sample(context, sizes, s.dim) == s.post)
        first = places.get(ROWS) or next(of_samples, None)
        batch = sample_dim(context, sizes, first, node)
    spread = tuple(g for g, s in places.items() if s == first)
    tensor = {g: s for g, s in places.items() if g not in spread}
    if not tensor:
        return node.meta["ordinal"], batch, spread, None
    minor = {batch[0]: batch[1]} if isinstance(batch, tuple) else {}
    tensor = {g: _in_sample(context, s) if s.dim in minor else s for g, s in tensor.items()}
    if any(map(depends_on_data, sizes)):
        raise Uncapturable("it draws as many random numbers as values of tensors say, where ranks share a row")
    layout = context.layout_of([int(minor.get(d, s)) for d, s in enumerate(sizes)], tensor)
    return node.meta["ordinal"], batch, spread, tuple(tuple((f.size, f.axes) for f in dim) for dim in layout.dims)


def _per_sample(context: ShardingContext, sizes: Sequence[Any], dim: int) -> int | None:
    """Return how many elements of a dim a sample has; None where the dim has none of samples, as far as is known."""
    if context.symbol is not None:
        return context.multiple(sizes[dim])
    size = int(sizes[dim])
    return size // context.rows if dim == 0 and size % context.rows == 0 else None


def _in_sample(context: ShardingContext, place: Shard) -> Shard:
    """Return a place in the dim of the batch as one in what a sample has of this dim."""
    ratio = place.pre / (context.rows if context.symbol is None else context.symbol)
    if not (ratio.is_integer() if isinstance(ratio, float) else ratio.is_Integer):
        raise Uncapturable("random numbers for samples that are sharded across rows of the batch")
    return place._replace(pre=int(ratio))


def ordered(context: ShardingContext, form: OpSharding) -> OpSharding:
    """Return ``form``, made to refuse rows in another order than that in which one device numbers samples."""
    inner = form.moves or form.by_label

    def moves(position: int, place: Shard) -> Strategy | None:
        operand = form.operands[position][0]
        return None if place.pre != 1 and context.size(operand, place) == context.rows else inner(position, place)

    form.moves = moves
    return form


def _drawn(context: ShardingContext, node: fx.Node, x: fx.Node, emit: Any) -> OpSharding:
    """Return the form of an op that draws a number for each element of ``x``; ``emit(emitter, key, value, layout)``."""
    labels = range(rank_of(context, x))

    def local(emitter: Emitter, solved: Emission) -> fx.Node:
        states = {g: s.results[0] for g, s in solved.strategies.items()}
        made: fx.Node = emit(emitter, lambda sizes: keys(context, node, sizes, states), solved.values[0], solved.layout)
        return made

    return ordered(context, context.labelled(node, [(x, labels)], labels, emit=local))


@RULES.rule(*named(Fact.DROPOUT))
def _dropout(context: ShardingContext, node: fx.Node) -> Any:
    x, feature = node.args[0], op_name(node).startswith("feature")
    sizes = node.meta["val"].shape
    if feature:
        sizes = (*sizes[:2], *[1] * (len(sizes) - 2))

    def emit(emitter: Emitter, key: Any, value: fx.Node, layout: Any) -> fx.Node:
        p = given(node, "p")
        own = key(sizes) if p else (node.meta["ordinal"], None, (), None)  # of p = 0 it draws nothing
        return emitter.emit(node, (emitter.env, value, p, *own), {}, layout, getattr(random_ops, op_name(node)))

    form = _drawn(context, node, x, emit)
    if feature:
        form.operands = [(x, [d if d < 2 else None for d in range(rank_of(context, x))])]
    return form


_LIKE = {
    "rand_like": "uniform", "uniform": "uniform", "randn_like": "normal", "normal_functional": "normal",
    "exponential": "exponential", "randint_like": "randint",
}  # fmt: skip
_GIVEN = {
    "uniform": ("from", "to"),
    "normal": ("mean", "std"),
    "exponential": ("lambd", "lambd"),
    "randint": ("low", "high"),
}
_NEW = {"rand": "uniform", "randn": "normal", "randint": "randint"}


@RULES.rule(*_LIKE)
def _random_like(context: ShardingContext, node: fx.Node) -> Any:
    kind = _LIKE[op_name(node)]
    first, second = _GIVEN[kind]
    a, b = given(node, first, 1.0 if kind == "exponential" else 0.0), given(node, second, 1.0)

    def emit(emitter: Emitter, key: Any, value: fx.Node, layout: Any) -> fx.Node:
        if node.meta["val"].dtype != node.args[0].meta["val"].dtype:
            value = emitter.emit(node, (value, node.meta["val"].dtype), {}, layout, aten.to.dtype)
        return emitter.emit(
            node, (emitter.env, kind, *key(node.meta["val"].shape), value, a, b), {}, layout, random_ops.random_like
        )

    return _drawn(context, node, node.args[0], emit)


@RULES.rule("bernoulli")
def _bernoulli(context: ShardingContext, node: fx.Node) -> Any:
    chance = given(node, "p")
    x = chance if isinstance(chance, fx.Node) else node.args[0]
    if context.expressions(x) != context.expressions(node):
        raise Uncapturable("bernoulli with a probability that is broadcast")

    def emit(emitter: Emitter, key: Any, value: fx.Node, layout: Any) -> fx.Node:
        if chance is not None and x is not chance:
            value = emitter.emit(node, (value, chance), {}, layout, aten.full_like.default)
        return emitter.emit(node, (emitter.env, value, *key(node.meta["val"].shape)), {}, layout, random_ops.bernoulli)

    return _drawn(context, node, x, emit)


@RULES.rule(*_NEW)
def _random(context: ShardingContext, node: fx.Node) -> Any:
    sizes = node.meta["val"].shape
    fresh = [d for d, s in enumerate(sizes) if context.is_rows(s) and "row" not in node.meta]
    kind = _NEW[op_name(node)]
    low, high = (given(node, "low", 0), given(node, "high", 1)) if kind == "randint" else (0, 1)

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        key = keys(context, node, sizes, {g: s.results[0] for g, s in solved.strategies.items()})
        local = emitter.local_sizes(node, solved.layout)
        args = (emitter.env, kind, *key, local, node.meta["val"].dtype, context.device, low, high)
        return emitter.emit(node, args, {}, solved.layout, random_ops.random_of)

    return context.labelled(node, [], range(len(sizes)), fresh=Shard(fresh[0]) if fresh else None, emit=emit)


@RULES.rule("randperm")
def _randperm(context: ShardingContext, node: fx.Node) -> Any:
    if context.symbol is not None and context.multiple(node.meta["val"].shape[0]):
        raise Uncapturable("it draws a permutation of the rows of a batch")

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        drawn = node.meta["ordinal"], node.meta.get("row"), emitter.operands(given(node, "n"))
        args = (emitter.env, *drawn, node.meta["val"].dtype, context.device)
        return emitter.emit(node, args, {}, solved.layout, random_ops.permutation)

    return context.labelled(node, [], [None], emit=emit)


@RULES.rule("multinomial")
def _multinomial(context: ShardingContext, node: fx.Node) -> Any:
    weights, number, replacement = node.args[0], given(node, "num_samples"), bool(given(node, "replacement"))
    sizes, single = list(weights.meta["val"].shape), rank_of(context, weights) == 1
    if single and context.symbol is not None and any(map(context.multiple, (*sizes, *node.meta["val"].shape))):
        raise Uncapturable("it draws one sample of all rows of a batch")

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        states = {g: s.results[0] for g, s in solved.strategies.items()}
        drawn = [*sizes[:-1], node.meta["val"].shape[-1] if replacement else sizes[-1]]
        key = (node.meta["ordinal"], node.meta.get("row"), (), None) if single else keys(context, node, drawn, states)
        args = (emitter.env, solved.values[0], emitter.operands(number), replacement, *key)
        return emitter.emit(node, args, {}, solved.layout, random_ops.multinomial)

    labels = [None] if single else [0, None]
    return ordered(context, context.labelled(node, [(weights, labels)], labels, emit=emit))
