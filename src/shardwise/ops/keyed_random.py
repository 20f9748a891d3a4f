"""Random numbers that are the same on any layout, device and number of ranks.

A value is a pure function of *where* it stands: (seed, step, ordinal of the random op in the forward, index
of the sample in the global batch, index in that sample's tensor).  There is no generator and so no state: a
rank that owns rows 6..8 of a batch computes rows 6..8 of the one tensor that a single device would have
drawn, and a recomputed unit draws again what it drew.

The hash is counter based.  (seed, step, ordinal) are digested to four 32-bit keys on the host (BLAKE2b,
about a microsecond).  A row index gives, through a 32-bit bijective mixer, an offset ``R`` and an odd
factor ``A``; a column index gives ``C``; an element is ``mix((C ^ R) * A)``.  Only that last line is paid
per element: ten cheap integer passes over a block that stays in the cache. The mixer is a multiply-xorshift
one, with the constants of Chris Wellons' "lowbias32" (public domain).

On the meta device the functions make what they return and nothing else, unless ``kind`` names the type of device for
which the tensors stand: then they also take its scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.errors import ShardwiseError

Batch = tuple[int, int]
"""(dim, minor): dim ``dim`` of a tensor is (rows x minor), rows major; minor is 1 for a plain batch dim."""

_CPU_BLOCK = 1 << 17  # elements: two int32 scratch blocks stay in the second-level cache
_DEVICE_BLOCK = 1 << 24  # elements: bounds the scratch memory; launches are dear, caches are not ours to mind
_WORD = 1 << 32


def _keys(seed: int, step: int, ordinal: int) -> tuple[int, int, int, int]:
    """Four independent signed 32-bit keys of one random op in one step."""
    digest = blake2b(pack("<3Q", seed % (1 << 64), step % (1 << 64), ordinal % (1 << 64)), digest_size=16).digest()
    a, b, c, d = unpack("<4i", digest)
    return a, b, c, d


def _signed(word: int) -> int:
    """The int32 with the bits of the unsigned ``word``: torch refuses larger scalars."""
    return word - _WORD if word >= _WORD // 2 else word


def _xorshift_(x: Tensor, scratch: Tensor, shift: int) -> None:
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)  # int32 shifts are arithmetic: clear the copies of the sign
    x.bitwise_xor_(scratch)


def _mix_(x: Tensor, scratch: Tensor) -> Tensor:
    """Permute the 2^32 words in place so that the high bits of the result depend on every bit of ``x``."""
    _xorshift_(x, scratch, 16)
    x.mul_(0x7FEB352D)
    _xorshift_(x, scratch, 15)
    return x.mul_(_signed(0x846CA68B))


def _hashed_indices(start: int, count: int, before: int, after: int, device: torch.device) -> Tensor:
    """Hash of start, start+1, … (modulo 2^32) under two keys."""
    first = _signed(start % _WORD)
    if first + count > _WORD // 2:
        x = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
    else:
        x = torch.arange(first, first + count, dtype=torch.int32, device=device)
    return _hashed(x, before, after)


def _hashed(x: Tensor, before: int, after: int) -> Tensor:
    """Hash of int32 words under two keys, in place."""
    scratch = torch.empty_like(x)
    _mix_(x.bitwise_xor_(before), scratch)
    _xorshift_(x, scratch, 16)  # low bits too: an element's first step is a product, in which they reach the farthest
    return x.bitwise_xor_(after)


def _blocks(
    keys: tuple[int, int, int, int],
    row_start: int,
    rows: int,
    per_row: int,
    device: torch.device,
    kind: str,
    columns: Tensor | None = None,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (row slice, column slice, int32 words): blocks that tile (rows, per_row).

    The words live in scratch memory: read them before asking for the next block.  On meta there are no words, and the
    first two columns of blocks take what all take.  ``columns``: the indices in a sample of those here, if these are
    not all.
    """
    if per_row >= _WORD // 2:
        raise ShardwiseError(
            f"a random tensor has {per_row} elements per sample; at most {_WORD // 2 - 1} can be keyed"
        )
    limit = _CPU_BLOCK if (kind or device.type) == "cpu" else _DEVICE_BLOCK
    width = min(per_row, limit)
    height = min(rows, max(1, limit // width))
    block, scratch = torch.empty((2, height * width), dtype=torch.int32, device=device)
    offset = _hashed_indices(row_start, rows, keys[0], keys[1], device)[:, None]
    factor = _mix_(offset.clone(), torch.empty_like(offset)).bitwise_or_(1)
    meta = device.type == "meta"
    for left in range(0, min(per_row, 2 * width) if meta else per_row, width):
        right = min(left + width, per_row)
        if columns is None:
            column = _hashed_indices(left, right - left, keys[2], keys[3], device)
        else:
            column = _hashed(columns[left:right].to(torch.int32), keys[2], keys[3])
        for top in range(0, height if meta else rows, height):
            bottom = min(top + height, rows)
            size = (bottom - top) * (right - left)
            words = block[:size].view(bottom - top, right - left)
            torch.bitwise_xor(column, offset[top:bottom], out=words)
            words.mul_(factor[top:bottom])
            _mix_(block[:size], scratch[:size])
            yield slice(top, bottom), slice(left, right), words


def keyed_uniform_bits(
    seed: int,
    step: int,
    ordinal: int,
    row_start: int,
    rows: int,
    per_row: int,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
) -> Tensor:
    """Uniform 32-bit words, int32, of shape (rows, per_row): row i belongs to the global sample ``row_start + i``.

    Raises ShardwiseError if one sample has 2^31 elements or more.
    """
    device = torch.device(device)
    result = torch.empty((rows, per_row), dtype=torch.int32, device=device)
    if result.numel() and (kind or device.type != "meta"):
        for r, c, words in _blocks(_keys(seed, step, ordinal), row_start, rows, per_row, device, kind, columns):
            result[r, c] = words
    return result


def _rows_of(shape: Sequence[int], batch: Batch | None) -> tuple[int, int]:
    """(rows, elements per row) of a tensor of this shape."""
    numel = math.prod(shape)
    if batch is None:
        return 1, numel
    dim, minor = batch
    if not 0 <= dim < len(shape) or minor < 1 or shape[dim] % minor:
        raise ShardwiseError(f"batch=({dim}, {minor}) does not fit a tensor of shape {tuple(shape)}")
    rows = shape[dim] // minor
    return rows, math.prod(shape[:dim]) * minor * math.prod(shape[dim + 1 :])


def _arrange(values: Tensor, shape: Sequence[int], batch: Batch | None) -> Tensor:
    """Turn (rows, per_row) values into a contiguous tensor of ``shape``, moving the rows to the batch dim."""
    if batch is None or batch[0] == 0:
        return values.view(tuple(shape))
    dim, minor = batch
    split = values.view(values.shape[0], *shape[:dim], minor, *shape[dim + 1 :])
    return split.movedim(0, dim).reshape(tuple(shape))


def _words(
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None,
    row_start: int,
    device: torch.device | str,
    kind: str,
    columns: Tensor | None = None,
) -> Tensor:
    rows, per_row = _rows_of(shape, batch)
    start = row_start if batch is not None else 0
    return _arrange(keyed_uniform_bits(seed, step, ordinal, start, rows, per_row, device, kind, columns), shape, batch)


def keyed_mask(
    p: float,
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None = None,
    row_start: int = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
) -> Tensor:
    """A boolean keep-mask of ``shape``: False, "dropped", with probability ``p`` (to 2^-32).

    ``batch`` says where the batch dim is (None: there is none, and every rank draws the same);
    ``row_start`` is the global index of the first row held here.  The index in a sample is row-major over
    the other dims, the batch dim standing for its minor part.
    """
    device = torch.device(device)
    if not 0 <= p <= 1:
        raise ShardwiseError(f"dropout probability p={p} is not between 0 and 1")
    threshold = round(p * _WORD)
    rows, per_row = _rows_of(shape, batch)
    if threshold in (0, _WORD) or not rows * per_row or (device.type == "meta" and not kind):
        return torch.full(tuple(shape), threshold == 0, dtype=torch.bool, device=device)
    mask = torch.empty((rows, per_row), dtype=torch.bool, device=device)
    start = row_start if batch is not None else 0
    for r, c, words in _blocks(_keys(seed, step, ordinal), start, rows, per_row, device, kind, columns):
        torch.ge(words, threshold - _WORD // 2, out=mask[r, c])
    return _arrange(mask, shape, batch)


class _MaskedScale(torch.autograd.Function):
    """x * mask * scale; keeps one byte per element of the mask for backward, and nothing of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return torch.mul(x, mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.mul(grads[0], mask).mul_(ctx.scale), None, None


def keyed_dropout(
    x: Tensor,
    p: float,
    training: bool,
    seed: int,
    step: int,
    ordinal: int,
    batch: Batch | None = None,
    row_start: int = 0,
    mask_shape: Sequence[int] | None = None,
    kind: str = "",
    columns: Tensor | None = None,
) -> Tensor:
    """``x * mask / (1 - p)`` with :func:`keyed_mask`'s mask, or ``x`` itself if p = 0 or not ``training``; p = 1 gives
    x * 0.

    ``mask_shape`` (default: x's) is one that broadcasts to x's: (N, C, 1, 1) drops whole channels.
    """
    if not training or p == 0:
        return x
    shape = mask_shape if mask_shape is not None else x.shape
    mask = keyed_mask(p, seed, step, ordinal, shape, batch, row_start, x.device, kind, columns)
    result: Tensor = _MaskedScale.apply(x, mask, 1.0 / (1.0 - p) if p < 1 else 1.0)  # type: ignore[no-untyped-call]
    return result


_UNIFORM_BITS = {
    torch.bfloat16: 8,
    torch.float16: 11,
}  # the significand: rounding up would reach 1.0, so we truncate


def keyed_uniform(
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None = None,
    row_start: int = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniform in [0, 1), multiples of 2^-24 in both fp32 and fp64; truncated to what fp16 and bf16 can hold."""
    bits = _UNIFORM_BITS.get(dtype, 24)
    words = _words(seed, step, ordinal, shape, batch, row_start, device, kind, columns)
    top = words.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)
    return top.to(dtype).mul_(2.0**-bits)


def _pairs(columns: Tensor | None) -> Tensor | None:
    """Two columns for each."""
    return None if columns is None else torch.stack([2 * columns, 2 * columns + 1], -1).reshape(-1)


def keyed_normal(
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None = None,
    row_start: int = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal values (Box-Muller), computed in the widest type of the device and then rounded: dtypes differ by
    rounding only.

    Without fp64 they are within 1e-6 of those of other devices.
    """
    pairs = _words(seed, step, ordinal, (*shape, 2), batch, row_start, device, kind, _pairs(columns)).to(torch.int64)
    wide = Backend.of(pairs.device).widest_float
    first, second = pairs.add_(_WORD // 2).unbind(-1)
    u, rest = (
        (n.to(wide) + 0.5).mul_(1.0 / _WORD) for n in (first, _WORD - 1 - first)
    )  # u + rest = 1; both keep their last digits
    radius = torch.where(u < 0.5, u.log(), rest.neg_().log1p()).mul_(-2).sqrt_()
    angle = second.to(wide).add_(0.5).mul_(2 * math.pi / _WORD)
    return radius.mul_(angle.cos_()).to(dtype)


def keyed_randint(
    low: int,
    high: int,
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None = None,
    row_start: int = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Integers in [low, high), with a bias of at most (high - low) / 2^32.

    Raises ShardwiseError unless 0 < high - low < 2^31.
    """
    if not 0 < high - low < _WORD // 2:
        raise ShardwiseError(f"random integers in [{low}, {high}): the range must hold between 1 and 2^31 - 1 values")
    words = _words(seed, step, ordinal, shape, batch, row_start, device, kind, columns).to(torch.int64)
    scaled = words.add_(_WORD // 2).mul_(high - low).bitwise_right_shift_(32)
    return scaled.add_(low).to(dtype)


def keyed_bernoulli(
    p: Tensor,
    seed: int,
    step: int,
    ordinal: int,
    batch: Batch | None = None,
    row_start: int = 0,
    kind: str = "",
    columns: Tensor | None = None,
) -> Tensor:
    """1 with probability ``p``, element by element, else 0; shape, dtype and device of ``p``."""
    words = _words(seed, step, ordinal, p.shape, batch, row_start, p.device, kind, columns).to(torch.int64)
    exact = p if p.dtype is torch.float64 else p.float()  # times 2^32 it is as exact
    below = exact.nan_to_num(0.0).clamp(0, 1).mul(_WORD).ceil().to(torch.int64)
    return words.add_(_WORD // 2).lt(below).to(p.dtype)
