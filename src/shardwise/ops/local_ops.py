"""Functions of local graphs that do not communicate: lookups in this rank's part of a table, and wrappers of kernels
for ranks that have no elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.ops.collectives import DimFactors
from shardwise.ops.env import Env

# ---- rows of a table that is sharded ---------------------------------------------------------------------------------


def _found(env: Env, index: Tensor, factors: DimFactors) -> tuple[Tensor, Tensor]:
    """Return the index of each row in this rank's part of a table, and whether the row is in that part."""
    local, here, each = torch.zeros_like(index), torch.ones_like(index, dtype=torch.bool), 1
    for number, (size, axes) in reversed(list(enumerate(factors))):
        digit = index % size if number else index
        index = index // size if number else index
        place, mine, held = torch.zeros_like(digit), torch.zeros_like(here), 0
        for start, stop in env.ranges(size, axes):
            inside = (digit >= start) & (digit < stop)
            place, mine = torch.where(inside, digit - start + held, place), mine | inside
            held += stop - start
        local, here, each = local + place * each, here & mine, each * held
    return local, here


def own_index(env: Env, index: Tensor, factors: DimFactors) -> Tensor:
    """Return indices into this rank's part of the rows; those of other ranks' rows become 0. An index that is no row of
    the whole table stays as it is, so that the lookup fails on all ranks as it does on one device."""
    local, here = _found(env, index, factors)
    another = (index >= 0) & (index < math.prod(size for size, _ in factors)) & ~here
    return torch.where(here, local, index).masked_fill(another, 0)


def own_only(env: Env, found: Tensor, index: Tensor, factors: DimFactors, padding: int = -1) -> Tensor:
    """Return ``found`` (*index.shape, width) with zeros for other ranks' rows; row ``padding`` has no gradient."""
    _, here = _found(env, index, factors)
    out = found.masked_fill(~here[..., None], 0)
    return out if padding < 0 else torch.where((index == padding)[..., None], out.detach(), out)


def own_rows(env: Env, factors: DimFactors, device: torch.device) -> Tensor:
    """Return the indices of this rank's rows in the whole table: 1-d, int64."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, axes in factors:
        each = [torch.arange(*one, dtype=torch.int64, device=device) for one in env.ranges(size, axes)]
        rows = (rows[:, None] * size + (each[0] if len(each) == 1 else torch.cat(each))).flatten()
    return rows


def heads_used(env: Env, x: Tensor, dim: int, each: int, queries: DimFactors, keys: DimFactors) -> Tensor:
    """Select along ``dim`` the head of keys or values of each of this rank's query heads; ``each`` share one."""
    local, _ = _found(env, own_rows(env, queries, x.device) // each, keys)
    return x.index_select(dim, local)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def never_empty(op: Callable[..., Any], dims: Sequence[int], x: Tensor, *args: Any, **options: Any) -> Any:
    """Return ``op(x, …)``, whose results keep ``dims``; the op's kernel needs at least one element in each of these."""
    empty = [dim for dim in dims if not x.shape[dim]]
    for dim in empty:
        x = _one_more(x, dim)
    found = op(x, *args, **options)
    for dim in empty:
        found = found.narrow(dim, 0, 0) if isinstance(found, Tensor) else tuple(one.narrow(dim, 0, 0) for one in found)
    return found


def summed(op: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Return the sum of ``op(…)``, a loss of each row, for the sum of its own kernel is undefined without rows
    (``multi_margin_loss``).
    """
    return op(*args, **options).sum()


def mean(x: Tensor, count: int, dtype: torch.dtype, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return the sum of ``x`` over ``dims`` (None: all) divided by ``count``, in ``dtype``, but computed in fp32 at
    least, as torch's own mean is: a sum in fp16 may overflow where the mean does not.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return x.sum(dims, keepdim, dtype=wide).div(count).to(dtype)


def mean_of(op: Callable[..., Tensor], count: int, dtype: torch.dtype, *args: Any, **options: Any) -> Tensor:
    """Return the :func:`mean` of ``op(…)``, a loss of each row or element."""
    return mean(op(*args, **options), count, dtype)


def convolution(
    op: Callable[..., Tensor],
    rows: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Return ``op(x, weight, bias, …)``, a torch convolution with one group. Its kernels need at least one input and
    one output channel, and a rank may have none. ``rows`` is the weight's dim of input channels."""
    channels = x.dim() - weight.dim() + 1
    count = weight.shape[1 - rows]
    if not weight.shape[rows]:
        x, weight = _one_more(x, channels), _one_more(weight, rows)
    if not count:
        weight = _one_more(weight, 1 - rows)
        bias = None if bias is None else _one_more(bias, 0)
    return op(x, weight, bias, *args, **options).narrow(channels, 0, count)


def convolution_of_groups(
    op: Callable[..., Tensor],
    each: tuple[int, int, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    groups: int,
    **options: Any,
) -> Tensor:
    """Return ``op(x, weight, bias, groups=groups, …)``, a torch convolution of this rank's groups, of which it may have
    none. ``each`` has the dim of ``x``'s channels, and what one group has of these and of the weight's first dim."""
    if groups:
        return op(x, weight, bias, groups=groups, **options)
    channels, inputs, rows = each
    x, weight = _one_more(x, channels, inputs), _one_more(weight, 0, rows)
    return op(x, weight, None, groups=1, **options).narrow(channels, 0, 0)


def _one_more(x: Tensor, dim: int, number: int = 1) -> Tensor:
    """Append one slice of zeros to ``dim``, or a ``number`` of them."""
    shape = list(x.shape)
    shape[dim] = number
    return torch.cat([x, x.new_zeros(shape)], dim)
