"""Which boxes of whole parameters a range of a rank's bucket has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from shardwise.core.flat import FlatBuffer
from shardwise.core.layout import Box
from shardwise.core.mesh import Mesh
from shardwise.core.pieces import range_parts
from shardwise.units.share import entry_ranges
from shardwise.units.trace import Bucket, Parameter


def boxes(
    bucket: Bucket, layout: FlatBuffer, mesh: Mesh, rank: int, flat: Tensor, origin: int, start: int, stop: int
) -> Iterator[tuple[Parameter, Box, Tensor]]:  # fmt: skip
    """Yield elements ``start`` to ``stop`` of the bucket of any ``rank``, which has this ``layout``, as boxes of whole
    parameters, each with its values: a view of ``flat``, which begins with element ``origin``."""
    for entry, first, last in entry_ranges(layout, start, stop):
        parameter = bucket.by_name[entry.name]
        for part in range_parts(parameter.placed, mesh, rank, first - entry.offset, last - entry.offset):
            yield parameter, part.whole, _rectangle(flat, entry.offset - origin, entry.shape, part.local)


def _rectangle(flat: Tensor, offset: int, shape: Sequence[int], box: Box) -> Tensor:
    """Return the view of a ``box`` of a row-major tensor of ``shape`` whose first element is, or would be, element
    ``offset`` of ``flat``.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = offset + sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    return flat.as_strided(box.shape, strides, flat.storage_offset() + first)
