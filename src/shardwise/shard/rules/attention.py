"""These rules are for attention, which may have fewer heads of keys and values than of queries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardwise.core.layout import Layout
from shardwise.core.mesh import Mesh
from shardwise.core.tensor_options import CONTEXT
from shardwise.ops import context_parallel, local_ops, random_ops, ring_attention
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, Emit, OpSharding, Placement, Shard, Strategy, sharding
from shardwise.shard.rules.draws import keys, ordered
from shardwise.shard.rules.table import Table, aligned, given, rank_of

RULES = Table()


@RULES.rule("scaled_dot_product_attention")
def _attention(context: ShardingContext, node: fx.Node) -> Any:
    q, k, v = node.args[:3]
    mask = given(node, "attn_mask")
    lead = rank_of(context, q) - 2
    leads = [context.expressions(x)[:lead] for x in (q, k, v)]
    if any(rank_of(context, x) != lead + 2 for x in (k, v)):
        return None
    # A dim whose sizes differ has heads that share keys, or is broadcast; it stays whole.
    names: list[Any] = [d if len({s[d] for s in leads}) == 1 else None for d in range(lead)]
    length = "q" if CONTEXT in context.tensor.axes else None
    operands: list[tuple[fx.Node, Sequence[Any]]] = [(q, [*names, length, None])]
    operands += [(x, [*names, None, None]) for x in (k, v)]
    if isinstance(mask, fx.Node):
        ((_, labels),) = aligned(context, [mask], [*context.expressions(node)[:lead], None, None])
        labels = [names[d] if d is not None and d < lead else None for d in labels]
        if len(labels) > 1 and context.shape(mask)[-2] == context.shape(q)[-2]:
            labels[-2] = length
        operands.append((mask, labels))
    out = [*[d if d is not None else f"w{i}" for i, d in enumerate(names)], "q", "e"]
    form = context.labelled(node, operands, out)
    if lead and context.shape(q)[lead - 1] != context.shape(k)[lead - 1]:
        _share_heads(context, form, lead - 1)
    if "ordinal" in node.meta:
        form.emit = _attention_dropout(node, given(node, "is_causal", False))
        return form if context.dropout == "fast" else ordered(context, form)
    form.emit = lambda emitter, solved: _of_queries(emitter, node, _matched(emitter, node, solved))
    if length and context.tensor.context == "heads" and lead and context.shape(q)[-2] == context.shape(k)[-2]:
        _by_heads(form, lead)
    if length and context.tensor.context == "ring" and context.shape(k)[-2] > context.tensor.axes[CONTEXT]:
        _in_ring(form, lead)
    return form


def _by_heads(form: OpSharding, dim: int) -> None:
    """Let attention take queries, keys and values in the same parts of the sequence, along ``dim``."""
    inner, masks = form.moves or form.by_label, len(form.operands) - 3

    def moves(position: int, place: Shard) -> Strategy | None:
        if place.dim != dim:
            return inner(position, place)
        return Strategy((place, place, place, *["R"] * masks), (place,)) if position < 3 else None

    form.moves = moves


def _in_ring(form: OpSharding, dim: int) -> None:
    """Let attention take queries, keys and values each in parts of their sequence, along ``dim``, and a mask in those
    of the queries."""
    inner = form.moves or form.by_label

    def moves(position: int, place: Shard) -> Strategy | None:
        if place.dim != dim or position > 2:
            return inner(position, place)
        masks = form.by_label(0, place)
        if masks is None or (place.pre, place.post) != (1, 1):
            return None
        return Strategy((place, place, place, *masks.operands[3:]), (place,))

    form.moves = moves


def _options(node: fx.Node) -> dict[str, Any]:
    return {k: node.kwargs[k] for k in ("scale", "enable_gqa") if k in node.kwargs}


def _of_queries(emitter: Emitter, node: fx.Node, solved: Emission) -> fx.Node:
    """Emit attention of the queries of a rank to all keys: under a causal mask, to those up to their own places."""
    axes = sharding(solved.strategies, rank_of(emitter.context, node.args[0]) - 2)
    causal, kwargs = given(node, "is_causal", False), _options(node)
    lengths = [emitter.context.shape(node.args[i])[-2] for i in (0, 1)]
    part = lengths[0], axes
    meeting = tuple(g for g in axes if solved.strategies[g].operands[1] == solved.strategies[g].operands[0])
    if meeting and emitter.context.tensor.context == "ring":
        mask = solved.values[3] if len(solved.values) > 3 else None
        args = (emitter.env, *solved.values[:3], mask, part, (lengths[1], meeting), causal, kwargs.get("scale"))
        return emitter.emit(node, args, {}, solved.layout, ring_attention.ring_attention)
    if meeting:
        mask = solved.values[3] if len(solved.values) > 3 else None
        args = (emitter.env, *solved.values[:3], mask, part, causal)
        return emitter.emit(node, args, kwargs, solved.layout, context_parallel.attention_by_heads)
    if not axes or not causal:
        return emitter.plain(node, solved)
    args = (emitter.env, *solved.values[:3], part)
    return emitter.emit(node, args, kwargs, solved.layout, context_parallel.causal_attention)


def _share_heads(context: ShardingContext, form: OpSharding, dim: int) -> None:
    """Let groups of queries share heads of keys and values: the heads are cut like the queries, or every rank has them
    whole."""
    sizes = [context.shape(x)[dim] for x, _ in form.operands[:3]]
    queries, keys = sizes[:2]
    mask = context.shape(form.operands[3][0]) if len(form.operands) > 3 else ()
    if len(mask) > 2 and mask[-3] != 1:
        return  # there is a mask for each head
    masks: list[Placement] = ["R"] * (len(form.operands) - 3)

    def moves(position: int, place: Shard) -> Strategy | None:
        if place.dim != dim or place.pre != 1 or position > 2:
            return form.by_label(position, place)
        pieces = sizes[position] // place.post
        if position and queries % pieces:
            return None
        own = place if position == 0 else Shard(dim, 1, queries // pieces)
        shared = math.gcd(pieces, keys)
        rest: Placement = Shard(dim, 1, keys // shared) if shared > 1 else "R"
        return Strategy((own, rest, rest, *masks), (own,))

    def spread(position: int, place: Shard) -> Strategy | None:
        return Strategy((place, "R", "R", *masks), (place,)) if position == 0 and place.dim == dim else None

    def agree(layouts: Sequence[Layout], axes: Mapping[str, int]) -> bool:
        return all(set(used) <= set(held) for used, held in _heads(axes, layouts, dim, queries // keys))

    form.moves, form.spread, form.agree = moves, spread, agree


def _heads(
    axes: Mapping[str, int], layouts: Sequence[Layout], dim: int, each: int
) -> list[tuple[list[int], list[int]]]:
    """Return by rank over the ``axes`` of tensor parallelism the head of keys that each of its queries uses, and the
    heads of keys that it has."""
    mesh = Mesh.spanned(axes)
    queries, keys = (
        [
            [i for start, stop in layout.intervals(mesh, rank)[dim] for i in range(start, stop)]
            for rank in range(mesh.size)
        ]
        for layout in layouts[:2]
    )
    return [([query // each for query in own], held) for own, held in zip(queries, keys, strict=True)]


def _matched(emitter: Emitter, node: fx.Node, solved: Emission) -> Emission:
    """Select a head of keys and values for each query of a rank, if the rank's heads are not as regular as those of the
    whole."""
    q, k = node.args[:2]
    dim = rank_of(emitter.context, q) - 3
    if dim < 0 or emitter.context.shape(q)[dim] == emitter.context.shape(k)[dim]:
        return solved
    layouts = [emitter.layout(value) for value in solved.values[:2]]
    each = emitter.context.shape(q)[dim] // emitter.context.shape(k)[dim]
    heads = _heads(emitter.context.tensor.axes, layouts, dim, each)
    if all(used == [key for key in held for _ in range(each)] or (used and len(held) == 1) for used, held in heads):
        return solved
    factors = [tuple((f.size, f.axes) for f in layout.dims[dim]) for layout in layouts]
    values = list(solved.values)
    for i in (1, 2):
        values[i] = emitter.emit(
            node.args[i],
            (emitter.env, values[i], dim, each, *factors),
            {},
            values[i].meta["layout"],
            local_ops.heads_used,
        )
    return solved._replace(values=values)


def _attention_dropout(node: fx.Node, causal: bool) -> Emit:
    """Return what emits attention spelled out, so that its dropout mask is keyed by sample, or the fused kernel where
    that may differ."""

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        q, k = node.args[:2]
        solved = _matched(emitter, node, solved)
        sharded = any(s.sharded for s in solved.strategies.values())
        if emitter.context.dropout == "fast" and sharded:
            return emitter.plain(node, solved)
        sizes = [*q.meta["val"].shape[:-1], k.meta["val"].shape[-2]]
        key = keys(emitter.context, node, sizes, {g: s.results[0] for g, s in solved.strategies.items()})
        mask = solved.values[3] if len(solved.values) > 3 else None
        args = (emitter.env, *solved.values[:3], mask, given(node, "dropout_p", 0.0), causal, *key)
        kwargs = _options(node)
        if axes := sharding(solved.strategies, rank_of(emitter.context, q) - 2):
            kwargs["part"] = emitter.context.shape(q)[-2], axes
        return emitter.emit(node, args, kwargs, solved.layout, random_ops.attention)

    return emit
