"""The random ops of local graphs: a rank draws its own part of a tensor, keyed by positions in the whole tensor.

``batch`` says where the batch dim is (None: what is drawn is for all rows; a number: it is for this row of the
microbatch alone), ``spread`` are the axes that shard rows, and ``grid`` how axes shard a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.ops import keyed_random as keyed
from shardwise.ops.collectives import DimFactors, row_start
from shardwise.ops.env import Env, Groups
from shardwise.ops.keyed_choices import keyed_multinomial, keyed_permutation
from shardwise.ops.local_ops import own_rows
from shardwise.ops.own_op import own_op

ALPHA = 1.7580993408473766  # SELU tends to -ALPHA at minus infinity


def _key(env: Env, ordinal: int) -> tuple[int, int, int]:
    """Return the seed, the step, and the ordinal of a random op of the unit in the whole forward."""
    return env.seed, env.step, env.ordinal + ordinal


Batch = tuple[int, int] | int | None


def _row_start(env: Env, spread: Groups, batch: Batch) -> int:
    if batch is None:
        return 0
    return env.offset + (batch if isinstance(batch, int) else row_start(env, spread))


Grid = Sequence[DimFactors] | None
"""The factors of each dim of one sample's tensor; None if no axis shards it."""


def _columns(env: Env, grid: Grid, device: Any) -> Tensor | None:
    """Return the indices of this rank's elements in one sample's whole tensor, 1-d int64; None if it has them all."""
    if grid is None:
        return None
    return own_rows(env, [factor for factors in grid for factor in factors], device)


def _batch(env: Env, batch: Batch, grid: Grid) -> keyed.Batch | None:
    """Return where the samples are in this rank's part of a tensor: of the dim of the batch it may have a part of each
    sample's elements."""
    if batch is None or isinstance(batch, int):
        return None
    if grid is None or not any(axes for _, axes in grid[batch[0]]):
        return batch
    return batch[0], own_rows(env, grid[batch[0]], "cpu").numel()


@own_op(shares=True, blind=True)
def dropout(
    env: Env, x: Tensor, p: float, ordinal: int, batch: Batch, spread: Groups, grid: Grid = None,
    shape: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Apply dropout with a keyed mask of ``shape``, which broadcasts to the shape of ``x`` and is that by default."""
    columns, row = _columns(env, grid, x.device), _row_start(env, spread, batch)
    return keyed.keyed_dropout(x, p, *_key(env, ordinal), _batch(env, batch, grid), row, shape, env.kind, columns)


@own_op(shares=True, blind=True)
def feature_dropout(
    env: Env, x: Tensor, p: float, ordinal: int, batch: Batch, spread: Groups, grid: Grid = None
) -> Tensor:
    """Apply dropout to whole channels (dim 1)."""
    return dropout(env, x, p, ordinal, batch, spread, grid, (*x.shape[:2], *[1] * (x.dim() - 2)))


@own_op(shares=True, blind=True)
def alpha_dropout(
    env: Env, x: Tensor, p: float, ordinal: int, batch: Batch, spread: Groups, grid: Grid = None,
    shape: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Set dropped elements to SELU's limit, then apply the affine map that keeps mean and variance (Klambauer et al.
    2017)."""
    if p in (0, 1):
        return dropout(env, x, p, ordinal, batch, spread, grid, shape)
    shape, row, columns = (
        x.shape if shape is None else shape,
        _row_start(env, spread, batch),
        _columns(env, grid, x.device),
    )
    keep = keyed.keyed_mask(p, *_key(env, ordinal), shape, _batch(env, batch, grid), row, x.device, env.kind, columns)
    scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    kept = keep.to(x.dtype)
    return x * (kept * scale) + ((kept - 1) * (ALPHA * scale) + ALPHA * scale * p)


@own_op(shares=True, blind=True)
def feature_alpha_dropout(
    env: Env, x: Tensor, p: float, ordinal: int, batch: Batch, spread: Groups, grid: Grid = None
) -> Tensor:
    """Apply alpha dropout to whole channels (dim 1)."""
    return alpha_dropout(env, x, p, ordinal, batch, spread, grid, (*x.shape[:2], *[1] * (x.dim() - 2)))


@own_op(kept=True)
def attention(
    env: Env, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, ordinal: int,
    batch: Batch, spread: Groups, grid: Grid = None, scale: float | None = None,
    enable_gqa: bool = False, part: tuple[int, Groups] | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention with keyed dropout on its probabilities; q, k and v are (..., heads, length, head size).

    Queries may be a ``part`` of the sequence: of this length, over these axes."""
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        place = torch.arange(q.shape[-2], device=q.device) if part is None else own_rows(env, [part], q.device)
        allowed = place[:, None] >= torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    # A query that may attend to nothing gives zeros, as in the fused kernels.
    dead = torch.isneginf(scores).all(-1, keepdim=True)
    probabilities = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return dropout(env, probabilities, p, ordinal, batch, spread, grid) @ v


def random_like(
    env: Env,
    kind: str,
    ordinal: int,
    batch: Batch,
    spread: Groups,
    grid: Grid,
    x: Tensor,
    a: float,
    b: float,
) -> Tensor:
    """Draw a tensor of the shape and dtype of ``x``: uniform in [a, b), normal with mean a and deviation b,
    exponential with rate a, or integers in [a, b) (randint)."""
    return random_of(env, kind, ordinal, batch, spread, grid, x.shape, x.dtype, x.device, a, b)


def random_of(
    env: Env, kind: str, ordinal: int, batch: Batch, spread: Groups, grid: Grid, shape: Sequence[int],
    dtype: torch.dtype | None, device: Any, a: float, b: float,
) -> Tensor:  # fmt: skip
    """Draw a tensor of ``shape``, this rank's part; ``kind`` is uniform, normal, exponential, or randint (integers in
    [a, b))."""
    rows = _batch(env, batch, grid), _row_start(env, spread, batch)
    key = (*_key(env, ordinal), tuple(shape), *rows, device or "cpu", env.kind)
    columns = _columns(env, grid, device or "cpu")
    if kind == "randint":
        return keyed.keyed_randint(int(a), int(b), *key, columns=columns, dtype=dtype or torch.int64)
    dtype = dtype or torch.get_default_dtype()
    if kind == "exponential":
        return keyed.keyed_exponential(*key, columns=columns, dtype=dtype).div_(a)
    if kind == "normal":
        return keyed.keyed_normal(*key, columns=columns, dtype=dtype).mul_(b).add_(a)
    return keyed.between(keyed.keyed_uniform(*key, columns=columns, dtype=dtype), a, b)


def bernoulli(env: Env, p: Tensor, ordinal: int, batch: Batch, spread: Groups, grid: Grid = None) -> Tensor:
    """Draw a tensor of the shape of ``p``: each element is 1 with its probability in ``p``, else 0."""
    columns, row = _columns(env, grid, p.device), _row_start(env, spread, batch)
    return keyed.keyed_bernoulli(p, *_key(env, ordinal), _batch(env, batch, grid), row, env.kind, columns)


def permutation(env: Env, ordinal: int, batch: Batch, n: int, dtype: torch.dtype | None, device: Any) -> Tensor:
    """Draw a permutation of 0 to n - 1, whole."""
    start = _row_start(env, (), batch)
    return keyed_permutation(*_key(env, ordinal), n, start, device or "cpu", env.kind, dtype or torch.int64)


def multinomial(
    env: Env, weights: Tensor, number: int, replacement: bool, ordinal: int, batch: Batch, spread: Groups,
    grid: Grid = None,
) -> Tensor:  # fmt: skip
    """Draw ``number`` places in the last dim of ``weights``, which is whole, in proportion to them."""
    rows, columns = (_batch(env, batch, grid), _row_start(env, spread, batch)), _columns(env, grid, weights.device)
    return keyed_multinomial(weights.detach(), number, replacement, *_key(env, ordinal), *rows, env.kind, columns)
