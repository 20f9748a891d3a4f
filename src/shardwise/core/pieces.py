"""This module maps between a rank's local tensor and the whole tensor, box by box.

On each dim a rank owns intervals of the whole tensor, several if a minor factor of the dim is sharded; in its local
tensor they lie end to end.  So the rank owns a grid of boxes, each of which is a rectangle in both tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from shardwise.core.flat import range_boxes
from shardwise.core.layout import Box, Layout
from shardwise.core.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Part:
    """A part is a rectangle that is at ``local`` in a rank's tensor and at ``whole`` in the whole tensor."""

    local: Box
    whole: Box

    def within(self, box: Box) -> Part | None:
        """Return what this part and a ``box`` of the local tensor have in common, or None if they do not overlap."""
        local = self.local.intersect(box)
        if local is None:
            return None
        shift = [there - here for there, here in zip(self.whole.start, self.local.start, strict=True)]
        return Part(local, Box(_moved(local.start, shift), _moved(local.stop, shift)))


def parts(layout: Layout, mesh: Mesh, rank: int) -> list[Part]:
    """Return the parts that ``rank`` owns, in row-major order; there are none if its local tensor is empty."""
    dims = [_end_to_end(intervals) for intervals in layout.intervals(mesh, rank)]
    return [Part(_box([local for local, _ in cell]), _box([whole for _, whole in cell])) for cell in product(*dims)]


def range_parts(layout: Layout, mesh: Mesh, rank: int, start: int, stop: int) -> Iterator[Part]:
    """Yield parts that cover the row-major elements ``start`` to ``stop`` - 1 of the local tensor of ``rank``."""
    owned = parts(layout, mesh, rank)
    for box in range_boxes(layout.local_shape(mesh, rank), start, stop):
        yield from (found for one in owned if (found := one.within(box)) is not None)


def _end_to_end(intervals: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return each interval of a dim as (start, stop) in the local tensor and (start, stop) in the whole one."""
    found, end = [], 0
    for start, stop in intervals:
        found.append(((end, end + stop - start), (start, stop)))
        end += stop - start
    return found


def _box(intervals: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(start for start, _ in intervals), tuple(stop for _, stop in intervals))


def _moved(at: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(at, by, strict=True))
