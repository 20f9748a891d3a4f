"""This module lays out tensors for ZeRO: end to end in one flat buffer, which is divided equally among the ranks.

Ranges are equal, padded and aligned, so that an all-gather or a reduce-scatter of the buffer copies nothing.  Only
checkpoints need to know which boxes of which tensors a range holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Box, shard_range

ALIGN = 64
"""The alignment of tensors and of shards, in bytes."""


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """An entry is one tensor in a flat buffer; its first element is at ``offset``, counted in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Return the offset just past the last element, in elements."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """A flat buffer holds tensors of one dtype end to end, ordered by the number of their optimizer group.

    Args:
        entries: The tensors in order of their offsets, each aligned to ``align`` bytes.
        numel: The number of elements of the whole buffer with all padding.
        itemsize: The size of an element in bytes.
        segments: One contiguous range ``(optimizer group, start, stop)`` for each group, in elements.
        align: The alignment of entries and shards in bytes.
    """

    entries: tuple[FlatEntry, ...]
    numel: int
    itemsize: int
    segments: tuple[tuple[int, int, int], ...]
    align: int = ALIGN

    @staticmethod
    def pack(
        items: Sequence[tuple[str, tuple[int, ...], int]], parts: int, itemsize: int, align: int = ALIGN
    ) -> FlatBuffer:
        """Lay out ``items``, each (name, shape, optimizer group), so that ``parts`` equal shards are aligned.

        Groups come in the order of their numbers; within a group the order of ``items`` is kept.
        :class:`ShardwiseError` if a name comes twice or elements of ``itemsize`` bytes cannot be aligned.
        """
        if parts < 1 or itemsize < 1 or align % itemsize:
            raise ShardwiseError(f"cannot pack for {parts} parts with items of {itemsize} bytes aligned to {align}")
        names = [name for name, _, _ in items]
        if len(set(names)) < len(names):
            raise ShardwiseError(f"cannot pack {max(names, key=names.count)!r} twice into one buffer")
        unit = align // itemsize
        groups = sorted({group for _, _, group in items})
        entries: list[FlatEntry] = []
        segments: list[tuple[int, int, int]] = []
        end = 0
        for group in groups:
            start = _round_up(end, unit)
            for name, shape, its_group in items:
                if its_group == group:
                    entries.append(FlatEntry(name, tuple(shape), _round_up(end, unit)))
                    end = entries[-1].stop
            segments.append((group, start, max(start, end)))
        return FlatBuffer(tuple(entries), _round_up(end, parts * unit), itemsize, tuple(segments), align)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges (start, stop) of padding, whose elements belong to no tensor."""
        edges = [0, *(edge for entry in self.entries for edge in (entry.offset, entry.stop)), self.numel]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    def shard(self, parts: int, index: int) -> FlatShard:
        """Return shard ``index`` of ``parts`` equal ones; raise ShardwiseError if the buffer is not packed for them."""
        if not 0 <= index < parts:
            raise ShardwiseError(f"shard {index} of {parts} does not exist; legal: 0 to {parts - 1}")
        if self.numel * self.itemsize % (parts * self.align):
            raise ShardwiseError(
                f"a buffer of {self.numel} elements has no {parts} aligned shards; pack it for {parts}"
            )
        size = self.numel // parts
        return FlatShard(index * size, (index + 1) * size)

    def served(self, servers: int, index: int) -> FlatShard:
        """Return the aligned range that rank ``index`` has if the first ``servers`` ranks share the buffer, as equally
        as lines of ``align`` bytes allow; it is empty on the other ranks."""
        unit = self.align // self.itemsize or 1
        if index >= servers:
            return FlatShard(self.numel, self.numel)
        start, stop = shard_range(-(-self.numel // unit), servers, index)
        return FlatShard(start * unit, min(stop * unit, self.numel))


@dataclass(frozen=True, slots=True)
class FlatShard:
    """A flat shard is the elements ``start`` to ``stop`` - 1 of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Return the number of elements, padding included."""
        return self.stop - self.start

    def segments(self, buffer: FlatBuffer) -> tuple[tuple[int, int, int], ...]:
        """Return ``(optimizer group, start, stop)`` of this shard's part of each group, in elements of the buffer."""
        cut = ((group, max(start, self.start), min(stop, self.stop)) for group, start, stop in buffer.segments)
        return tuple((group, start, stop) for group, start, stop in cut if start < stop)

    def boxes(self, buffer: FlatBuffer) -> list[tuple[str, Box]]:
        """Return the boxes of tensors in this shard, as (name, box) in the order of its elements, without padding."""
        found = []
        for entry in buffer.entries:
            start, stop = max(self.start, entry.offset), min(self.stop, entry.stop)
            boxes = range_boxes(entry.shape, start - entry.offset, stop - entry.offset)
            found += [(entry.name, box) for box in boxes]
        return found


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return elements ``start`` to ``stop`` - 1 of a row-major tensor as boxes in order, at most 2n - 1 for n dims.

    A range consists of a piece of its first row, whole rows, and a piece of its last row.  The pieces of rows are split
    in the same way, but each of them only on one side.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inside = math.prod(shape[1:])
    first, begin = divmod(start, inside)
    last, end = divmod(stop, inside)
    if first == last:
        return _in_row(first, range_boxes(shape[1:], begin, end))
    found: list[Box] = []
    if begin:
        found += _in_row(first, range_boxes(shape[1:], begin, inside))
        first += 1
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        found.append(Box((first, *zeros), (last, *shape[1:])))
    return found + _in_row(last, range_boxes(shape[1:], 0, end))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.start), (row + 1, *box.stop)) for box in boxes]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
