"""Make the initial value of a large tensor some rows at a time, so that who needs a part of it never holds the whole.

A server of a table, or a rank that has a shard of one, copies its part out of each piece.  All of the tensor is drawn,
for a random number depends on how many came before it, but only one piece is there at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise.graph.dtypes import default_dtype
from shardwise.initial.recording import RecordedOperand, RecordedOperation, aten, packet, seedable

PIECE = 1 << 20
"""About as many elements are there at a time."""

TOGETHER = 16
"""torch's normal_ draws this many numbers together on a CPU, and what is over at the end in another way."""

SERIAL = frozenset((aten.normal_, aten.uniform_))
"""These draw one element after the other, so pieces of a tensor get the numbers that the whole would."""

ELEMENTWISE = SERIAL | {
    aten.fill_, aten.zero_, aten.add_, aten.sub_, aten.mul_, aten.div_, aten.neg_, aten.abs_, aten.clamp_,
    aten.clamp_min_, aten.clamp_max_,
}  # fmt: skip
"""What these write to an element is rounded once, or is one of few values, so it is the same wherever the element lies.
Kernels of other functions compute the last elements of a range in another way, which differs in the last bit."""

Steps = Sequence[tuple[RecordedOperation, Callable[[], torch.Generator] | None]]
"""The operations that a value depends on, in order; a random one with the maker of its generator."""


def in_pieces(steps: Steps, operand: RecordedOperand, nbytes: int) -> Iterator[tuple[int, Tensor]] | None:
    """Yield (first row, rows) of a tensor, from the first to the last; a piece is overwritten when the next is made.

    None if it is small, or if what is done to it cannot be done to its pieces.
    """
    width = math.prod(operand.shape[1:])
    rows = max(1, PIECE // max(1, width) // TOGETHER) * TOGETHER
    if not operand.shape or operand.shape[0] < 2 * rows:
        return None
    whole = operand.offset == 0 and _is_row_major(operand) and operand.covers(nbytes)
    if not whole or not all(_is_elementwise(operation, operand) for operation, _ in steps):
        return None
    return _drawn(steps, operand, rows, width)


def _drawn(steps: Steps, operand: RecordedOperand, rows: int, width: int) -> Iterator[tuple[int, Tensor]]:
    total, memory = operand.shape[0], torch.empty(2 * rows * width, dtype=operand.dtype)
    generators = [None if make is None else make() for _, make in steps]
    first = 0
    while first < total:
        # the last piece has what is over, for fewer numbers than TOGETHER would be drawn in another way
        count = rows if total - first >= 2 * rows else total - first
        piece = memory[: count * width].zero_()
        for (operation, _), generator in zip(steps, generators, strict=True):
            _run(operation, piece, first * width, generator)
        yield first, piece.view(count, *operand.shape[1:])
        first += count


def _run(operation: RecordedOperation, piece: Tensor, start: int, generator: torch.Generator | None) -> None:
    """Do to a piece, which begins at element ``start``, what the operation does to its window of the whole."""
    window, *args = operation.args
    first = max(window.offset - start, 0)
    last = min(window.offset + math.prod(window.shape) - start, piece.numel())
    if first < last:
        with torch.no_grad(), default_dtype(operation.default_dtype):
            if generator is None:
                operation.function(piece[first:last], *args, **operation.kwargs)
            else:
                seedable(operation.function)(piece[first:last], *args, **operation.kwargs, generator=generator)


def _is_elementwise(operation: RecordedOperation, whole: RecordedOperand) -> bool:
    """Return whether an operation changes elements of the tensor, each by itself, and looks at nothing else."""
    if operation.function is None or operation.made or not operation.args:
        return False
    window, *others = (*operation.args, *operation.kwargs.values())
    if not isinstance(window, RecordedOperand) or not all(isinstance(x, int | float | None) for x in others):
        return False
    if window.storage != whole.storage or window.dtype != whole.dtype or not _is_row_major(window):
        return False
    if operation.kwargs.get("alpha", 1) != 1:  # rounded twice, or once
        return False
    if operation.is_random:
        return packet(operation.function) in SERIAL and window.shape == whole.shape
    return packet(operation.function) in ELEMENTWISE


def _is_row_major(operand: RecordedOperand) -> bool:
    expected = 1
    for stride, size in reversed(list(zip(operand.strides, operand.shape, strict=True))):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
