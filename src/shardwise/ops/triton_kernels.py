"""Kernels for GPUs in Triton: one launch for keyed random words or masks, and one for the gradient of a softmax's loss.

``keyed_random.py`` and ``cross_entropy.py`` say what is computed; plain torch ops compute the same there, on devices
without Triton.  The random words are equal to the bit, the loss to rounding.  Import this module only where
:attr:`shardwise.backend.Backend.triton` is true.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

_FIRST = threading.Lock()  # Triton compiles at the first launch, and ranks may be threads

# ---- random words ----------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    return x * 0x846CA68B


@triton.jit
def _hashed(x, before, after):
    x = _mix(x ^ before)
    return (x ^ (x >> 16)) ^ after


@triton.jit(do_not_specialize=["first_row", "key_0", "key_1", "key_2", "key_3", "threshold"])
def _fill(
    out, columns, per_row, blocks, first_row, key_0, key_1, key_2, key_3, threshold,
    NAMED: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // blocks
    index = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = (index >= 0) & (index < per_row)  # the last block of 2^31 elements goes beyond int32
    column = tl.load(columns + index, mask=inside, other=0) if NAMED else index
    offset = _hashed((first_row + row).to(tl.uint32), key_0.to(tl.uint32), key_1.to(tl.uint32))
    factor = _mix(offset) | 1
    word = _hashed(column.to(tl.uint32), key_2.to(tl.uint32), key_3.to(tl.uint32))
    word = _mix((word ^ offset) * factor).to(tl.int32, bitcast=True)
    at = out + row.to(tl.int64) * per_row + index
    tl.store(at, (word >= threshold) if MASK else word, mask=inside)


def fill_words(
    out: Tensor, keys: tuple[int, int, int, int], first_row: int, columns: Tensor | None = None, threshold: int = 0
) -> None:
    """Fill ``out`` (rows, per_row) with keyed words, int32; a boolean one with whether they reach ``threshold``.

    ``keys``, ``first_row`` and ``threshold`` are signed 32-bit numbers; ``columns`` are the indices of the elements in
    a row, by default 0 to per_row - 1.
    """
    rows, per_row = out.shape
    block = min(2048, triton.next_power_of_2(per_row))
    blocks = triton.cdiv(per_row, block)
    with _FIRST:
        _fill[(rows * blocks,)](
            out, out if columns is None else columns.contiguous(), per_row, blocks, first_row, *keys, threshold,
            NAMED=columns is not None, MASK=out.dtype is torch.bool, BLOCK=block,
        )  # fmt: skip


# ---- cross-entropy ---------------------------------------------------------------------------------------------------


@triton.jit
def _softmax_loss(
    scores, row_stride, target, valid, scale, gradient, sums, classes,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    gradient += row * classes
    top = tl.full((), float("-inf"), WIDE)
    total = tl.zeros((), WIDE)
    for start in range(0, classes, BLOCK):
        index = start + tl.arange(0, BLOCK)
        z = tl.load(scores + index, mask=index < classes, other=float("-inf")).to(WIDE)
        above = tl.maximum(top, tl.max(z, 0))
        base = tl.where(above == float("-inf"), 0.0, above)  # a block may have nothing but -inf
        total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base), 0)
        top = above
    tl.store(sums + row, tl.log(total) + top)
    used = tl.load(valid + row)
    named = tl.load(target + row)
    weight = tl.load(scale)
    factor = tl.where(used, weight / total, 0.0)
    taken = tl.where(used, weight, 0.0)
    for start in range(0, classes, BLOCK):
        index = start + tl.arange(0, BLOCK)
        z = tl.load(scores + index, mask=index < classes, other=float("-inf")).to(WIDE)
        g = tl.exp(z - top) * factor - tl.where(index == named, taken, 0.0)
        tl.store(gradient + index, g, mask=index < classes)


def softmax_loss(scores: Tensor, target: Tensor, valid: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    """Return log Σ exp of each row of ``scores`` (n, classes), (n,) in the dtype of ``scale``.

    Write to ``gradient`` (n, classes) that of ``scale`` times the sum of the rows' cross-entropies with the classes
    ``target`` (n,), zero where a row is not ``valid`` (n,).  Classes have to be next to each other in memory.
    """
    rows, classes = scores.shape
    sums = torch.empty(rows, dtype=scale.dtype, device=scores.device)
    block = min(4096, triton.next_power_of_2(classes))
    with _FIRST:
        _softmax_loss[(rows,)](
            scores, scores.stride(0), target, valid, scale, gradient, sums, classes,
            WIDE=tl.float64 if scale.dtype is torch.float64 else tl.float32, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return sums
