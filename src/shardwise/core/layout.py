"""This module defines the layout of a tensor on a mesh.

Each mesh axis either shards a tensor or replicates it.  Dims are factored: a fused qkv dim of 3 x heads x head_size is
three factors, and an axis shards one of them, so that the pieces of a rank need not be contiguous in the dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from shardwise.core.errors import ShardwiseError
from shardwise.core.mesh import Axes, Mesh, joined
from shardwise.core.tensor_options import CONTEXT


def shard_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return part ``index`` of ``size`` elements split into ``parts`` balanced parts, as (start, stop).

    The sizes of parts differ by at most one.  The boundaries of ``a`` parts are among those of ``a * b`` parts, so
    gathering over the minor of two axes gives exactly the shards of the major one, even if they are uneven.
    """
    if parts < 1 or not 0 <= index < parts:
        raise ShardwiseError(f"part {index} of {parts} does not exist; legal: 0 to {parts - 1} of at least 1")
    return size * index // parts, size * (index + 1) // parts


def shard_sizes(size: int, parts: int) -> list[int]:
    """Return the number of elements in each of the parts of :func:`shard_range`."""
    return [stop - start for start, stop in (shard_range(size, parts, index) for index in range(parts))]


def rank_rows(rows: int, microbatches: int, parts: int, index: int) -> tuple[tuple[int, int], ...]:
    """Return part ``index`` of ``parts`` of each microbatch, as (start, stop) in the ``rows`` rows of the batch."""
    ranges = []
    for microbatch in range(microbatches):
        first, last = shard_range(rows, microbatches, microbatch)
        start, stop = shard_range(last - first, parts, index)
        ranges.append((first + start, first + stop))
    return tuple(ranges)


def axis_ranges(size: int, axes: Sequence[str], parts: int, index: int) -> tuple[tuple[int, int], ...]:
    """Return what ``size`` elements that ``axes`` shard over ``parts`` ranks give the rank of this index: ranges
    (start, stop) in order, which may be empty.

    The sequence, over ``cp``, is shared out in zigzag order: each rank has a piece of the first half and, counted from
    the end, one of the second, so that under a causal mask all ranks have the same work (Llama 3, arXiv 2407.21783,
    section 3.3.2).  All else is shared out in pieces as they come.  In both orders the pieces of a minor axis are parts
    of those of the major one.
    """
    start, stop = shard_range(size, parts, index)
    if not axes or axes[0] != CONTEXT:
        return ((start, stop),)
    # Half of what comes before a piece is at the start of the sequence, and the rest at its end.
    return (start // 2, stop // 2), (size - (stop - stop // 2), size - (start - start // 2))


@dataclass(frozen=True, slots=True)
class Box:
    """A box is a rectangle of a tensor: ``start[d] <= index[d] < stop[d]`` on each dim ``d``."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ShardwiseError(f"a box from {self.start} to {self.stop} has two numbers of dims")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extent on each dim, which is 0 if stop is not beyond start."""
        return tuple(max(stop - start, 0) for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects the box in an array."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements in both boxes, or None if there are none."""
        start = tuple(map(max, zip(self.start, other.start, strict=True)))
        stop = tuple(map(min, zip(self.stop, other.stop, strict=True)))
        box = Box(start, stop)
        return box if box.numel else None

    def within(self, origin: Sequence[int]) -> Box:
        """Return the box as it is counted from ``origin``."""
        return Box(
            tuple(a - b for a, b in zip(self.start, origin, strict=True)),
            tuple(a - b for a, b in zip(self.stop, origin, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        """Return whether every element of ``other`` is in this box."""
        return not other.numel or self.intersect(other) == other


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of a dim has a size and the mesh axes that shard it, the major axis first.

    It may be a concatenation of ``parts``, given by their sizes, that are sharded one by one, such as the 8 heads of
    queries, 2 of keys and 2 of values of a fused projection.
    """

    size: int
    axes: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "parts", tuple(self.parts))
        if self.size < 0:
            raise ShardwiseError(f"a factor of size {self.size} is not legal; legal: 0 or more")
        if self.parts and (sum(self.parts) != self.size or min(self.parts) < 0):
            raise ShardwiseError(
                f"a factor of size {self.size} is no concatenation of parts of {self.parts}; legal: parts that add up "
                "to it"
            )

    def ranges(self, mesh: Mesh, rank: int) -> list[tuple[int, int]]:
        """Return the ranges (start, stop) of this factor that ``rank`` owns, in order; adjacent ranges are merged."""
        if not self.axes:
            return [(0, self.size)]
        found: list[tuple[int, int]] = []
        first, ranks, index = 0, mesh.axis_size(self.axes), mesh.index(rank, self.axes)
        for size in self.parts or (self.size,):
            for start, stop in axis_ranges(size, self.axes, ranks, index):
                adjacent = found and found[-1][1] == first + start
                found.append((found.pop()[0] if adjacent else first + start, first + stop))
            first += size
        return found


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout is the placement of one tensor: each of its dims is a row-major product of factors."""

    dims: tuple[tuple[Factor, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(tuple(dim) for dim in self.dims))
        seen = [axis for dim in self.dims for factor in dim for axis in factor.axes]
        twice = sorted({axis for axis in seen if seen.count(axis) > 1})
        if twice:
            raise ShardwiseError(f"layout {self}: axis {', '.join(twice)} is used twice; legal: once")

    @staticmethod
    def replicated(shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor of this shape that is whole on every rank."""
        return Layout(tuple((Factor(size),) for size in shape))

    @staticmethod
    def sharded(shape: Sequence[int], dims: Mapping[int, Axes]) -> Layout:
        """Return a layout by dims and the axes that shard them, major first: ``sharded((8, 6), {1: ("x", "y")})``."""
        unknown = [dim for dim in dims if not 0 <= dim < len(shape)]
        if unknown:
            raise ShardwiseError(f"dim {unknown[0]} of a tensor of shape {tuple(shape)} does not exist")
        axes = {dim: (names,) if isinstance(names, str) else tuple(names) for dim, names in dims.items()}
        return Layout(tuple((Factor(size, axes.get(dim, ())),) for dim, size in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(math.prod(factor.size for factor in dim) for dim in self.dims)

    @property
    def sharding_axes(self) -> frozenset[str]:
        """Return the axes that shard the tensor."""
        return frozenset(axis for dim in self.dims for factor in dim for axis in factor.axes)

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of the local tensor on ``rank``."""
        return tuple(math.prod(sum(b - a for a, b in factor.ranges(mesh, rank)) for factor in dim) for dim in self.dims)

    def nbytes(self, itemsize: int, mesh: Mesh, rank: int) -> int:
        """Return the number of bytes of the local tensor on ``rank``, at ``itemsize`` bytes per element."""
        return math.prod(self.local_shape(mesh, rank)) * itemsize

    def boxes(self, mesh: Mesh, rank: int) -> list[Box]:
        """Return the boxes of the whole tensor that ``rank`` owns, in row-major order, or none if it owns nothing.

        There are several if a minor factor of a dim is sharded; concatenated dim by dim they are the local tensor.
        """
        cells = product(*self.intervals(mesh, rank))
        return [Box(tuple(start for start, _ in cell), tuple(stop for _, stop in cell)) for cell in cells]

    def intervals(self, mesh: Mesh, rank: int) -> list[list[tuple[int, int]]]:
        """Return for each dim the ranges (start, stop) that ``rank`` owns, in order."""
        return [_intervals([(f.size, f.ranges(mesh, rank)) for f in dim]) for dim in self.dims]

    def __str__(self) -> str:
        """Return a text such as ``[8:dp, 3*4:tp*16, 8+2+2:tp*16]``."""
        dims = (
            "*".join(
                ":".join(
                    [
                        "+".join(map(str, factor.parts or (factor.size,))),
                        *([",".join(joined(factor.axes))] if factor.axes else []),
                    ]
                )
                for factor in dim
            )
            for dim in self.dims
        )
        return f"[{', '.join(dims)}]"


def _intervals(factors: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> list[tuple[int, int]]:
    """Return the intervals of a dim that a rank owns, from the (size, owned ranges) of its factors, major first."""
    if not factors:
        return [(0, 1)]
    (_, ranges), minor = factors[0], factors[1:]
    inside = math.prod(size for size, _ in minor)
    if all(own == [(0, size)] for size, own in minor):
        return [(start * inside, stop * inside) for start, stop in ranges if stop > start and inside]
    pieces = _intervals(minor)
    return [
        (i * inside + low, i * inside + high)
        for start, stop in ranges
        for i in range(start, stop)
        for low, high in pieces
    ]
