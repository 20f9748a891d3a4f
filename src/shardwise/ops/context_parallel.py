"""Attention where ranks have parts of the sequence (``parallel/context.py`` says how they join them)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.core.layout import shard_range
from shardwise.ops.collectives import Steps, in_memory, moved
from shardwise.ops.env import Env, Groups
from shardwise.ops.own_op import own_op

Part = tuple[int, Groups]
"""The length of the whole sequence, and the axes that shard it."""


@own_op(kept=True)
def causal_attention(
    env: Env, q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """Return causal attention of this rank's queries (..., part, head size) to the keys and values (..., length, head
    size) of the whole sequence."""
    found = []
    ranges = env.ranges(*part)
    for own, (start, stop) in zip(q.split_with_sizes([b - a for a, b in ranges], -2), ranges, strict=True):
        mask = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).tril(start)
        found.append(
            F.scaled_dot_product_attention(
                own, k[..., :stop, :], v[..., :stop, :], mask, scale=scale, enable_gqa=enable_gqa
            )
        )
    return torch.cat(found, -2)


@own_op(communicates=True, kept=True)
def attention_by_heads(
    env: Env, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, part: Part, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return attention of this rank's part of the sequence (..., heads, part, head size): ranks exchange it for the
    whole sequence of a part of the heads, and back.

    ``mask`` is (..., length, length), maybe of one head. Where heads of keys cannot be shared out like those of queries
    they are repeated first.
    """
    ranks, own = env.group(part[1])
    heads = q.shape[-3]
    if k.shape[-3] != heads and k.shape[-3] % ranks:
        k, v = (x.repeat_interleave(heads // k.shape[-3], -3) for x in (k, v))
    if mask is not None and mask.dim() > 2 and mask.shape[-3] != 1:
        start, stop = shard_range(heads, ranks, own)
        mask = mask[..., start:stop, :, :]
    q, k, v = (moved(env, x, (part, x.shape[-3]), _to_heads, _to_parts) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    result: Tensor = moved(env, out, (part, heads), _to_parts, _to_heads)
    return result


def _to_heads(env: Env, x: Tensor, where: tuple[Part, int]) -> Steps:
    return exchanged(env, x, *where, there=True)


def _to_parts(env: Env, x: Tensor, where: tuple[Part, int]) -> Steps:
    return exchanged(env, x, *where, there=False)


def exchanged(env: Env, x: Tensor, part: Part, heads: int, there: bool) -> Steps:
    """Return (..., this rank's heads, length, size) for (..., heads, part, size), or the other way round; uneven parts
    are padded for the collective."""
    length, axes = part
    ranks, own = env.group(axes)
    of_heads = [shard_range(heads, ranks, i) for i in range(ranks)]
    of_length = [env.ranges(length, axes, i) for i in range(ranks)]
    each = [sum(stop - start for start, stop in ranges) for ranges in of_length]
    shape = list(x.shape)
    shape[-3], shape[-2] = max(stop - start for start, stop in of_heads), max(each)
    sent = x.new_zeros((ranks, *shape))
    for i, (first, last) in enumerate(of_heads):
        piece = x[..., first:last, :, :] if there else _taken(x, of_length[i])
        _corner(sent[i], piece.shape).copy_(piece)
    got = torch.empty_like(sent)
    yield env.comm.all_to_all(got.view(-1), in_memory(sent).view(-1), env.real(axes), lane=env.lane, what="heads")
    if not there:
        own_shape = (*x.shape[:-3], each[own], x.shape[-1])
        sizes = [(*own_shape[:-2], last - first, *own_shape[-2:]) for first, last in of_heads]
        return torch.cat([_corner(one, size) for one, size in zip(got, sizes, strict=True)], -3)
    first, last = of_heads[own]
    out = x.new_empty((*x.shape[:-3], last - first, length, x.shape[-1]))
    for one, ranges, size in zip(got, of_length, each, strict=True):
        pieces = one[..., : last - first, :size, :].split_with_sizes([stop - start for start, stop in ranges], -2)
        for (start, stop), piece in zip(ranges, pieces, strict=True):
            out[..., start:stop, :] = piece
    return out


def _taken(x: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return these ranges of the sequence (..., length, size)."""
    return torch.cat([x[..., start:stop, :] for start, stop in ranges], -2)


def _corner(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the first elements of each dim."""
    return x[tuple(slice(size) for size in shape)]
