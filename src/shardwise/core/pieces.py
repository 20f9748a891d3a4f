"""Which elements of a whole tensor a rank's local one has, in boxes of both.

On each dim a rank owns intervals of the whole tensor, several where a minor factor of the dim is sharded; in its local
tensor they lie end to end.  So what it owns is a grid of boxes, each a rectangle of both tensors.
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
    """A rectangle that is ``local`` in a rank's tensor and ``whole`` in that of all ranks."""

    local: Box
    whole: Box

    def within(self, box: Box) -> Part | None:
        """What of it is in a ``box`` of the local tensor, None if that is nothing."""
        local = self.local.intersect(box)
        if local is None:
            return None
        shift = [there - here for there, here in zip(self.whole.start, self.local.start, strict=True)]
        return Part(local, Box(_moved(local.start, shift), _moved(local.stop, shift)))


def parts(layout: Layout, mesh: Mesh, rank: int) -> list[Part]:
    """What ``rank`` owns, in row-major order: nothing, if that is empty."""
    dims = [_end_to_end(intervals) for intervals in layout.intervals(mesh, rank)]
    return [Part(_box([local for local, _ in cell]), _box([whole for _, whole in cell])) for cell in product(*dims)]


def range_parts(layout: Layout, mesh: Mesh, rank: int, start: int, stop: int) -> Iterator[Part]:
    """The elements ``start`` to ``stop`` of the local tensor of ``rank``, row-major, each in one part."""
    owned = parts(layout, mesh, rank)
    for box in range_boxes(layout.local_shape(mesh, rank), start, stop):
        yield from (found for one in owned if (found := one.within(box)) is not None)


def _end_to_end(intervals: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Each interval of a dim where it lies in the local tensor, and where in the whole one."""
    found, end = [], 0
    for start, stop in intervals:
        found.append(((end, end + stop - start), (start, stop)))
        end += stop - start
    return found


def _box(intervals: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(start for start, _ in intervals), tuple(stop for _, stop in intervals))


def _moved(at: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(at, by, strict=True))
