"""What a layer of experts does beside its products: rows are sorted by expert, and put back in their order.

Where ranks have a part of the tokens and a part of the experts, sorted rows go to the ranks that have their experts,
and results come back (GShard, Lepikhin et al., arXiv 2006.16668, section 3.3): as many as there are, without a limit.
Which collectives run, and in which order, never depends on what tokens choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.core.layout import shard_range
from shardwise.ops.collectives import Steps, in_memory, moved
from shardwise.ops.env import Env, Groups
from shardwise.ops.own_op import own_op


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for numbers of experts ``ids`` (slots): the order that sorts them, the sorted numbers, and where the rows
    of each expert end (experts), as int32. Slots of one expert keep their order."""
    found, order = ids.sort(stable=True)
    ends = torch.searchsorted(found, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    return order, found, ends.int()


class _Taken(torch.autograd.Function):
    """Autograd's own backward would add row by row, as rows of any table may be taken several times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.rows, ctx.slots = len(x), slots
        return x.index_select(0, order if slots == 1 else order // slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        found = _Placed.apply(grad, ctx.saved_tensors[0], ctx.rows * ctx.slots)  # type: ignore[no-untyped-call]
        return found if ctx.slots == 1 else found.unflatten(0, (-1, ctx.slots)).sum(1), None, None


class _Placed(torch.autograd.Function):
    """Nothing is filled with zeros where every slot gets a row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(order)
        made = rows.new_empty if len(order) == slots else rows.new_zeros
        return made(slots, *rows.shape[1:]).index_copy_(0, order, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return taken(grad, ctx.saved_tensors[0], 1), None, None


def taken(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """Return the rows of ``x``, each of which is that of so many ``slots``, for all slots or some of them in an
    ``order``."""
    found: Tensor = _Taken.apply(x, order, slots)  # type: ignore[no-untyped-call]
    return found


def placed(rows: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    """Return for ``rows`` in an ``order`` of all slots or some of them a row for each slot, which has one of the
    ``ids``; it is 0 for slots that are not among them."""
    found: Tensor = _Placed.apply(rows, order, len(ids))  # type: ignore[no-untyped-call]
    return found


class _Stacked(torch.autograd.Function):
    """See :func:`stacked`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(torch.bincount(ids.clamp(max=len(parameters)), minlength=len(parameters) + 1))
        return torch.stack(parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        chosen = [1] * len(grad) if counts.is_meta else counts.tolist()[: len(grad)]
        return None, *(one if number else None for one, number in zip(grad, chosen, strict=True))


@own_op()
def stacked(ids: Tensor, *parameters: Tensor) -> Tensor:
    """Return parameters of one expert each as one tensor; those of experts that are not among the ``ids`` (slots) get
    no gradient, and take no step, as on one device."""
    found: Tensor = _Stacked.apply(ids, *parameters)  # type: ignore[no-untyped-call]
    return found


# ---- tokens that several ranks have ----------------------------------------------------------------------------------


def of_own_experts(env: Env, order: Tensor, ends: Tensor, outer: Groups, axes: Groups) -> tuple[Tensor, Tensor]:
    """Return which slots of an ``order`` by expert this rank takes care of, and where those of each expert end
    (experts), for the ``ends`` of all slots: ranks over ``axes`` have the same slots, and each has some experts.

    Where ``outer`` axes share out experts too, a rank's slots are those of its own experts and those of the experts of
    ranks that have its place over ``axes``, to which it sends their rows.
    """
    (several, _), (ranks, own) = env.group(outer), env.group(axes)
    parts = [shard_range(len(ends), several * ranks, i * ranks + own) for i in range(several)]
    if order.is_meta:  # all experts get equally many rows
        experts = sum(stop - start for start, stop in parts)
        return order.new_empty(len(order) * experts // len(ends)), torch.empty_like(ends)
    stops, counts, sizes = [0, *ends.tolist()], ends.diff(prepend=ends.new_zeros(1)), torch.zeros_like(ends)
    for start, stop in parts:
        sizes[start:stop] = counts[start:stop]
    return torch.cat([order[stops[start] : stops[stop]] for start, stop in parts]), sizes.cumsum(0).int()


# ---- experts of other ranks ------------------------------------------------------------------------------------------


@own_op(communicates=True)
def routes(env: Env, ends: Tensor, axes: Groups) -> Tensor:
    """Return the number of rows of each rank over ``axes`` for each expert (ranks, experts), from where the rows of
    each expert end on this rank."""
    counts = ends.long().diff(prepend=ends.new_zeros(1, dtype=torch.int64))
    ranks, own = env.group(axes)
    if ranks == 1:
        return counts.unsqueeze(0)
    found = counts.new_zeros(ranks, len(ends))
    found[own] = counts
    env.wait(env.comm.all_gather(found.view(-1), counts, env.real(axes), lane="compute", what="routes"))
    return found


@own_op(communicates=True, moves=True, kept=True)
def dispatched(env: Env, rows: Tensor, routes: Tensor, axes: Groups) -> Any:
    """Return the rows of all ranks for this rank's experts, sorted by expert, for this rank's rows (slots, ...). The
    last of these, which have no expert, stay."""
    return moved(env, rows, (routes, axes, len(rows)), _to_experts, _to_tokens)


@own_op(communicates=True, moves=True, kept=True)
def collected(env: Env, rows: Tensor, routes: Tensor, axes: Groups, order: Tensor) -> Any:
    """Return what all experts give for this rank's rows, which are as many as ``order`` (slots), for what this rank's
    experts give for those of all; for rows without an expert it is 0."""
    return moved(env, rows, (routes, axes, len(order)), _to_tokens, _to_experts)


def own_experts(env: Env, rows: Tensor, routes: Tensor, axes: Groups) -> tuple[Tensor, Tensor]:
    """Return the expert of each row that has come to this rank, counted from its first, and where the rows of each
    end."""
    start, stop = shard_range(routes.shape[1], *env.group(axes))
    counts = routes[:, start:stop].sum(0)
    if rows.is_meta:
        return routes.new_empty(len(rows)), counts.int()
    return torch.repeat_interleave(counts, output_size=len(rows)), counts.cumsum(0).int()


Where: TypeAlias = tuple[Tensor, Groups, int]
"""The routes, the axes, and the number of this rank's slots."""


def _to_experts(env: Env, rows: Tensor, where: Where) -> Steps:
    routes, axes, _ = where
    if rows.is_meta:
        return (yield from _alike(env, rows, axes))
    table, sizes, own = _read(env, routes, axes)
    got = yield from _exchanged(env, rows[: sum(sizes[own])], sizes, axes)
    start, stop = shard_range(len(table[0]), len(table), own)
    if start == stop:
        return got
    by_rank = got.split_with_sizes([n for row in table for n in row[start:stop]])
    return torch.cat([by_rank[i] for i in _transposed(len(table), stop - start)])


def _to_tokens(env: Env, rows: Tensor, where: Where) -> Steps:
    routes, axes, slots = where
    if rows.is_meta:
        return (yield from _alike(env, rows, axes))
    table, sizes, own = _read(env, routes, axes)
    start, stop = shard_range(len(table[0]), len(table), own)
    if start < stop:
        of_experts = rows.split_with_sizes([row[e] for e in range(start, stop) for row in table])
        rows = torch.cat([of_experts[i] for i in _transposed(stop - start, len(table))])
    got = yield from _exchanged(env, rows, list(zip(*sizes, strict=True)), axes)
    rest = slots - len(got)
    return torch.cat([got, got.new_zeros(rest, *got.shape[1:])]) if rest else got


def _alike(env: Env, rows: Tensor, axes: Groups) -> Steps:
    """Return what comes where all experts get as many rows."""
    got = torch.empty_like(rows)
    yield env.comm.all_to_all(got, rows, env.real(axes), lane=env.lane, what="experts")
    return got


def _read(env: Env, routes: Tensor, axes: Groups) -> tuple[list[list[int]], list[list[int]], int]:
    """Return the routes, the number of rows that each rank sends to each, and this rank's place among them."""
    table: list[list[int]] = routes.tolist()
    ranks, own = env.group(axes)
    parts = [shard_range(routes.shape[1], ranks, i) for i in range(ranks)]
    return table, [[sum(row[start:stop]) for start, stop in parts] for row in table], own


def _exchanged(env: Env, rows: Tensor, sizes: Sequence[Sequence[int]], axes: Groups) -> Steps:
    """Return what the ranks send to this one, of which rank i sends ``sizes[i][j]`` rows to rank j."""
    own, width = env.group(axes)[1], rows.shape[1:].numel()
    got = rows.new_empty(sum(row[own] for row in sizes), *rows.shape[1:])
    elements = [[n * width for n in row] for row in sizes]
    sent, where = in_memory(rows).view(-1), env.real(axes)
    yield env.comm.all_to_all(got.view(-1), sent, where, lane=env.lane, what="experts", sizes=elements)
    return got


def _transposed(rows: int, columns: int) -> list[int]:
    """Return the places in row-major order of the elements of a matrix in column-major order."""
    return [row * columns + column for column in range(columns) for row in range(rows)]


__all__ = [
    "by_expert",
    "collected",
    "dispatched",
    "of_own_experts",
    "own_experts",
    "placed",
    "routes",
    "stacked",
    "taken",
]
