"""Attention in a ring: each rank has a part of the queries and of the keys, and keys go from rank to rank.

While a rank attends to one block of keys and values it already sends them on and receives the next (Liu et al., Ring
Attention, arXiv 2310.01889, section 3).  In backward the blocks go around once more, each followed by its gradient, to
which every rank adds its own, until it is back where the block came from.  No rank ever has all keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.backend import Backend
from shardwise.ops.attention_blocks import Block, Result, attend, attend_backward, merge
from shardwise.ops.context_parallel import Part
from shardwise.ops.env import Env
from shardwise.ops.own_op import own_op

Ranges = Sequence[tuple[int, int]]


@own_op(communicates=True, kept=True)
def ring_attention(
    env: Env, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, queries: Part, keys: Part, causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Return attention of this rank's part of the queries (..., heads, part, size) to the keys and values of all ranks
    (..., heads of keys, part, size), which may be of another sequence.

    ``mask`` has this rank's queries and all keys: (..., part, length).
    """
    ring = _Ring(env, queries, keys, causal, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    result: Tensor = _RingAttention.apply(ring, q, k, v, mask)  # type: ignore[no-untyped-call]
    return result


@dataclass
class _Ring:
    """The places of ranks in a ring, and how blocks of keys go around it."""

    env: Env
    queries: Part
    keys: Part
    causal: bool
    scale: float
    ranks: int = field(init=False)
    own: int = field(init=False)
    most: int = field(init=False)  # the length of the longest part of the keys

    def __post_init__(self) -> None:
        self.ranks, self.own = self.env.group(self.keys[1])
        self.most = max(sum(self.sizes(rank)) for rank in range(self.ranks))

    def ranges(self, rank: int) -> Ranges:
        """Return which keys a rank of the ring has."""
        return self.env.ranges(*self.keys, rank)

    def sizes(self, rank: int) -> list[int]:
        return [stop - start for start, stop in self.ranges(rank)]

    def padded(self, x: Tensor) -> Tensor:
        """Return a part of the sequence with zeros up to the length of the longest."""
        out = x.new_zeros((*x.shape[:-2], self.most, x.shape[-1]))
        out[..., : x.shape[-2], :] = x
        return out

    def around(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, ``x`` of that rank) for every rank, this one first; the next arrives meanwhile."""
        for step in range(self.ranks):
            follows = step + 1 < self.ranks
            got = torch.empty_like(x) if follows else x
            handle = self.shifted(got, x) if follows else None
            yield (self.own - step) % self.ranks, x
            if handle is not None:
                self.env.wait(handle)
            x = got

    def shifted(self, out: Tensor, x: Tensor) -> Any:
        """Post that ``x`` goes to the next rank and that of the one before comes to ``out``."""
        return self.env.comm.shift(out, x, self.env.real(self.keys[1]), lane="compute", what="ring")

    def window(self, rank: int) -> tuple[int, int, bool, bool]:
        """Return for the keys of a rank: the first query that may look at them, how many of them are looked at,
        whether the block is causal by itself, and whether some of its queries may look at some of its keys only."""
        mine, theirs, sizes = self.env.ranges(*self.queries), self.ranges(rank), self.sizes(rank)
        if not self.causal:
            return 0, sum(sizes), False, False
        if mine == theirs:
            return 0, sum(sizes), True, False
        earliest = min((a for a, b in theirs if b > a), default=0)
        latest = max((b for a, b in mine if b > a), default=0)
        first = sum(max(min(b, earliest) - a, 0) for a, b in mine)
        seen = sum(max(min(b, latest) - a, 0) for a, b in theirs)
        asking = min((max(a, earliest) for a, b in mine if b > max(a, earliest)), default=latest)
        last = max((min(b, latest) for a, b in theirs if min(b, latest) > a), default=0)
        return first, seen, False, last > asking + 1

    def block(self, rank: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[int, Block] | None:
        """Return the first query that looks at the keys of a rank, and what it and those after it look at; None where
        no query does."""
        first, seen, causal, between = self.window(rank)
        q = q[..., first:, :]
        if not (q.shape[-2] and seen):
            return None
        if mask is not None and mask.shape[-1] > 1:
            mask = torch.cat([mask[..., a:b] for a, b in self.ranges(rank)], -1)
        if between:
            places = (torch.cat([torch.arange(a, b, device=q.device) for a, b in one])
                      for one in (self.env.ranges(*self.queries), self.ranges(rank)))  # fmt: skip
            mine, theirs = places
            mask = mine[first:, None] >= theirs[:seen]
        kernel = Backend.stood_for(q.device, self.env.kind).attention_kernel
        return first, Block(q, k[..., :seen, :], v[..., :seen, :], mask, causal, self.scale, kernel)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: _Ring, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        logarithms = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        state: tuple[Tensor, ...] = ()
        for rank, (keys, values) in _unpacked(ring, k, v):
            found = ring.block(rank, q, keys, values, mask)
            if found is not None:
                first, block = found
                result = attend(block)
                state = state or result.state
                merge(out[..., first:, :], logarithms[..., first:], result)
        out = out.to(q.dtype)
        ctx.ring, ctx.state = ring, state
        ctx.save_for_backward(q, k, v, mask, out, logarithms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, Tensor, Tensor | None]:
        ring: _Ring = ctx.ring
        q, k, v, mask, out, logarithms = ctx.saved_tensors
        of_queries = torch.zeros_like(q)
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[4] else None
        coming = None  # the gradients of the keys and values of a rank follow these around
        for rank, (keys, values) in _unpacked(ring, k, v):
            found = ring.block(rank, q, keys, values, mask)
            mine = keys.new_zeros(_packed_size(ring, k, v))
            if found is not None:
                first, block = found
                merged = Result(out[..., first:, :], logarithms[..., first:], ctx.state)
                dq, dk, dv, scores = attend_backward(block, grad[..., first:, :], merged, of_mask is not None)
                of_queries[..., first:, :] += dq
                for to, one in zip(_views(ring, mine, k, v), (dk, dv), strict=True):
                    to[..., : one.shape[-2], :] = one
                if of_mask is not None and scores is not None:
                    _add_columns(of_mask, scores, ring.ranges(rank))
            if coming is not None:
                ring.env.wait(coming[0])
                mine += coming[1]
            got = torch.empty_like(mine)
            coming = ring.shifted(got, mine), got
        assert coming is not None
        ring.env.wait(coming[0])
        dk, dv = (one[..., : k.shape[-2], :].contiguous() for one in _views(ring, coming[1], k, v))
        return None, of_queries, dk, dv, of_mask


def _unpacked(ring: _Ring, k: Tensor, v: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield the keys and values of every rank, which go around as one tensor."""
    for rank, both in ring.around(torch.cat([ring.padded(x).view(-1) for x in (k, v)])):
        length = sum(ring.sizes(rank))
        keys, values = (one[..., :length, :] for one in _views(ring, both, k, v))
        yield rank, (keys, values)


def _views(ring: _Ring, both: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the padded keys and values that lie in one tensor."""
    shapes = [(*x.shape[:-2], ring.most, x.shape[-1]) for x in (k, v)]
    keys, values = both.split_with_sizes([math.prod(shape) for shape in shapes])
    return keys.view(shapes[0]), values.view(shapes[1])


def _packed_size(ring: _Ring, k: Tensor, v: Tensor) -> int:
    return sum(math.prod(x.shape[:-2]) * ring.most * x.shape[-1] for x in (k, v))


def _add_columns(total: Tensor, scores: Tensor, ranges: Ranges) -> None:
    """Add the gradient of some columns of a mask, which may broadcast, in place."""
    pieces = scores.split_with_sizes([stop - start for start, stop in ranges], -1)
    for (start, stop), piece in zip(ranges, pieces, strict=True):
        to = total[..., start:stop] if total.shape[-1] > 1 else total
        to += piece.sum_to_size(to.shape).to(total.dtype)
