"""Random numbers that do not depend on layout, device and number of ranks.

A value is a pure function of its position: (seed, step, ordinal of the random op in the forward, index of the sample in
the global batch, index in that sample's tensor). There is no generator and so no state: a rank that owns rows 6..8 of a
batch computes rows 6..8 of the one tensor that a single device would have drawn, and a recomputed unit draws the same
numbers again.

The hash is counter based. (seed, step, ordinal) are digested to four 32-bit keys on the host (BLAKE2b, about a
microsecond). A row index gives, through a 32-bit bijective mixer, an offset ``R`` and an odd factor ``A``; a column
index gives ``C``; an element is ``mix((C ^ R) * A)``. Only this expression is evaluated for every element: ten cheap
integer passes over a block that stays in the cache, or one launch on a GPU with Triton (``triton_kernels.py``). The
mixer is a multiply-xorshift one, with the constants of Chris Wellons' "lowbias32" (public domain).

In all functions ``batch`` says which dim has the rows (None: there is none, and the whole tensor is that of one row),
and ``row_start`` is the index of the first row in the global batch, or has those of all rows; what is drawn once for
all rows is that of row 0.
``columns`` are the indices of the elements in a sample's whole tensor if these are not all of them. On meta the
functions allocate only their results, unless ``kind`` names the type of device that the tensors stand for: then they
also allocate its scratch memory.
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
"""(dim, minor): dim ``dim`` of a tensor has rows x minor elements, rows major; minor is 1 for a plain batch dim."""

Rows = int | Sequence[int]
"""The index of the first row in the global batch, or the indices of all rows."""

_CPU_BLOCK = 1 << 17  # in elements: two int32 scratch blocks stay in the second-level cache
_DEVICE_BLOCK = 1 << 24  # in elements: it bounds the scratch memory and is large, for kernel launches are expensive
_WORD = 1 << 32


def _keys(seed: int, step: int, ordinal: int) -> tuple[int, int, int, int]:
    """Return four independent signed 32-bit keys for one random op in one step."""
    digest = blake2b(pack("<3Q", seed % (1 << 64), step % (1 << 64), ordinal % (1 << 64)), digest_size=16).digest()
    a, b, c, d = unpack("<4i", digest)
    return a, b, c, d


def _signed(word: int) -> int:
    """Return the int32 with the bits of the unsigned ``word``, for torch refuses larger scalars."""
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


def _hashed_indices(start: Rows, count: int, before: int, after: int, device: torch.device) -> Tensor:
    """Return the hashes of ``count`` indices, or of those from ``start`` on (modulo 2^32), under two keys."""
    if not isinstance(start, int):
        if len(start) != count:
            raise ShardwiseError(f"{len(start)} rows have numbers, and a random tensor has {count}")
        return _hashed(torch.tensor(start, dtype=torch.int64, device=device).to(torch.int32), before, after)
    first = _signed(start % _WORD)
    if first + count > _WORD // 2:
        x = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
    else:
        x = torch.arange(first, first + count, dtype=torch.int32, device=device)
    return _hashed(x, before, after)


def _hashed(x: Tensor, before: int, after: int) -> Tensor:
    """Hash int32 words under two keys, in place."""
    scratch = torch.empty_like(x)
    _mix_(x.bitwise_xor_(before), scratch)
    _xorshift_(x, scratch, 16)  # mixes the low bits too: they matter most in the product that comes next
    return x.bitwise_xor_(after)


def _blocks(
    keys: tuple[int, int, int, int],
    row_start: Rows,
    rows: int,
    per_row: int,
    device: torch.device,
    kind: str,
    columns: Tensor | None = None,
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (row slice, column slice, int32 words): blocks that tile (rows, per_row).

    The words are in scratch memory and must be read before the next block is asked for. On meta the first two columns
    of blocks are enough, for they allocate as much as all.
    """
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


def _fill(
    out: Tensor,
    keys: tuple[int, int, int, int],
    row_start: Rows,
    kind: str,
    columns: Tensor | None,
    threshold: int = 0,
) -> None:
    """Fill ``out`` (rows, per_row) with words, or, if it is boolean, with whether they reach ``threshold``.

    Raises :class:`ShardwiseError` if a sample has 2^31 elements or more.
    """
    (rows, per_row), device = out.shape, out.device
    if per_row >= _WORD // 2:
        raise ShardwiseError(
            f"a random tensor has {per_row} elements per sample; at most {_WORD // 2 - 1} can be keyed"
        )
    if isinstance(row_start, int) and Backend.stood_for(device, kind).triton:
        if device.type != "meta":
            from shardwise.ops.triton_kernels import fill_words

            fill_words(out, keys, _signed(row_start % _WORD), columns, threshold)
        return
    for r, c, words in _blocks(keys, row_start, rows, per_row, device, kind, columns):
        if out.dtype is torch.bool:
            torch.ge(words, threshold, out=out[r, c])
        else:
            out[r, c] = words


def keyed_uniform_bits(
    seed: int,
    step: int,
    ordinal: int,
    row_start: Rows,
    rows: int,
    per_row: int,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
) -> Tensor:
    """Return uniform int32 words of shape (rows, per_row): row i belongs to the global sample ``row_start + i``.

    Raises :class:`ShardwiseError` if one sample has 2^31 elements or more.
    """
    device = torch.device(device)
    result = torch.empty((rows, per_row), dtype=torch.int32, device=device)
    if result.numel() and (kind or device.type != "meta"):
        _fill(result, _keys(seed, step, ordinal), row_start, kind, columns)
    return result


def _rows_of(shape: Sequence[int], batch: Batch | None) -> tuple[int, int]:
    """Return (rows, elements per row) of a tensor of this shape; :class:`ShardwiseError` if ``batch`` does not fit."""
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
    row_start: Rows,
    device: torch.device | str,
    kind: str,
    columns: Tensor | None = None,
) -> Tensor:
    rows, per_row = _rows_of(shape, batch)
    return _arrange(
        keyed_uniform_bits(seed, step, ordinal, row_start, rows, per_row, device, kind, columns), shape, batch
    )


def keyed_mask(
    p: float,
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None = None,
    row_start: Rows = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
) -> Tensor:
    """Return a boolean mask of ``shape`` that is False ("dropped") with probability ``p``, to within 2^-32.

    The index in a sample is row-major over the other dims and the minor part of the batch dim. Raises
    :class:`ShardwiseError` unless 0 <= p <= 1.
    """
    device = torch.device(device)
    if not 0 <= p <= 1:
        raise ShardwiseError(f"dropout probability p={p} is not between 0 and 1")
    threshold = round(p * _WORD)
    rows, per_row = _rows_of(shape, batch)
    if threshold in (0, _WORD) or not rows * per_row or (device.type == "meta" and not kind):
        return torch.full(tuple(shape), threshold == 0, dtype=torch.bool, device=device)
    mask = torch.empty((rows, per_row), dtype=torch.bool, device=device)
    _fill(mask, _keys(seed, step, ordinal), row_start, kind, columns, threshold - _WORD // 2)
    return _arrange(mask, shape, batch)


class _MaskedScale(torch.autograd.Function):
    """Computes x * mask * scale; for backward it saves only the mask, at one byte per element."""

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
    seed: int,
    step: int,
    ordinal: int,
    batch: Batch | None = None,
    row_start: Rows = 0,
    mask_shape: Sequence[int] | None = None,
    kind: str = "",
    columns: Tensor | None = None,
) -> Tensor:
    """Return ``x * mask / (1 - p)`` with the mask of :func:`keyed_mask`, or ``x`` itself if p = 0; p = 1 gives x * 0.

    ``mask_shape`` broadcasts to the shape of ``x``, which is the default: (N, C, 1, 1) drops whole channels.
    """
    if p == 0:
        return x
    shape = mask_shape if mask_shape is not None else x.shape
    mask = keyed_mask(p, seed, step, ordinal, shape, batch, row_start, x.device, kind, columns)
    result: Tensor = _MaskedScale.apply(x, mask, 1.0 / (1.0 - p) if p < 1 else 1.0)  # type: ignore[no-untyped-call]
    return result


# The bits of the significand: to round to them could give 1.0, so words are truncated.
_UNIFORM_BITS = {torch.bfloat16: 8, torch.float16: 11}


def keyed_uniform(
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None = None,
    row_start: Rows = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return uniform values in [0, 1): multiples of 2^-24 in fp32 and fp64, of 2^-11 in fp16, of 2^-8 in bf16."""
    bits = _UNIFORM_BITS.get(dtype, 24)
    words = _words(seed, step, ordinal, shape, batch, row_start, device, kind, columns)
    top = words.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)
    return top.to(dtype).mul_(2.0**-bits)


def between(u: Tensor, low: float, high: float) -> Tensor:
    """Turn uniform values in [0, 1) into values in [low, high), in place; none is rounded up to ``high``."""
    scaled = u.mul_(high - low).add_(low)
    return scaled.clamp_(max=_below(high, u.dtype)) if high > low else scaled


def _below(bound: float, dtype: torch.dtype) -> float:
    """Return the largest value of ``dtype`` below ``bound``."""
    info, near = torch.finfo(dtype), math.nextafter(bound, -math.inf)
    step = max(math.ldexp(info.eps, math.frexp(near)[1] - 1), info.smallest_normal * info.eps)
    return math.floor(near / step) * step


def _pairs(columns: Tensor | None) -> Tensor | None:
    """Return two columns, 2c and 2c + 1, for each column c."""
    return None if columns is None else torch.stack([2 * columns, 2 * columns + 1], -1).reshape(-1)


def keyed_exponential(
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None = None,
    row_start: Rows = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return exponential values of ``shape`` with mean 1, all above 0, computed in the widest dtype of the device and
    rounded; of these Gumbel noise is the negative logarithm."""
    words = _words(seed, step, ordinal, shape, batch, row_start, device, kind, columns).to(torch.int64)
    u = words.add_(_WORD // 2).to(Backend.of(words.device).widest_float).add_(0.5).mul_(1.0 / _WORD)
    return u.log_().neg_().to(dtype).clamp_(min=torch.finfo(dtype).smallest_normal)


def keyed_normal(
    seed: int,
    step: int,
    ordinal: int,
    shape: Sequence[int],
    batch: Batch | None = None,
    row_start: Rows = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return standard normal values of ``shape`` (Box-Muller), computed in the widest dtype of the device and rounded.

    So dtypes differ by rounding only; on a device without fp64 values are within 1e-6 of those of other devices.
    """
    pairs = _words(seed, step, ordinal, (*shape, 2), batch, row_start, device, kind, _pairs(columns)).to(torch.int64)
    wide = Backend.of(pairs.device).widest_float
    first, second = pairs.add_(_WORD // 2).unbind(-1)
    # u + rest = 1; each is computed from integers, so that both keep their last digits.
    u, rest = ((n.to(wide) + 0.5).mul_(1.0 / _WORD) for n in (first, _WORD - 1 - first))
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
    row_start: Rows = 0,
    device: torch.device | str = "cpu",
    kind: str = "",
    columns: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Return integers in [low, high) of ``shape``; the bias of their probabilities is at most (high - low) / 2^32.

    Raises :class:`ShardwiseError` unless 0 < high - low < 2^31.
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
    row_start: Rows = 0,
    kind: str = "",
    columns: Tensor | None = None,
) -> Tensor:
    """Return a tensor like ``p`` whose elements are 1 with the probabilities in ``p``, else 0."""
    words = _words(seed, step, ordinal, p.shape, batch, row_start, p.device, kind, columns).to(torch.int64)
    exact = p if p.dtype is torch.float64 else p.float()  # a product with 2^32 is exact
    below = exact.nan_to_num(0.0).clamp(0, 1).mul(_WORD).ceil().to(torch.int64)
    return words.add_(_WORD // 2).lt(below).to(p.dtype)
