"""This module defines the mesh: ranks arranged on named axes.

"Axis" is always used for a mesh and "dim" for a tensor.  Ranks are in row-major order: the first axis varies slowest.

An axis ``tp`` of n ranks can be split into two *sub-axes*: ``tp//m`` of n/m ranks and within it ``tp%m`` of m ranks.
Their names say how the coordinates on them follow from the coordinate on ``tp``.  Sub-axes need no declaration: a
function that takes names of axes takes names of sub-axes too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import TypeAlias

from shardwise.core.errors import (
    ConfigError,
    ShardwiseError,
    check_count,
    check_text,
    check_value,
    did_you_mean,
)

Axes: TypeAlias = str | tuple[str, ...]
"""This names one axis of a mesh, or several in the order of their coordinates."""

Coordinates = tuple[tuple[str, int], ...]
"""These are pairs of an axis and a coordinate; a class of ranks is defined by the coordinates that it fixes."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis has a name and a size, the number of ranks along it."""

    name: str
    size: int

    def __post_init__(self) -> None:
        check_text("mesh axis name", self.name)
        check_value("mesh axis name", self.name, self.name.isidentifier(), "letters, digits and underscores")
        check_count(f"mesh.{self.name}.size", self.size)


def _names(names: Axes) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def sub_axes(axis: str, m: int) -> tuple[str, str]:
    """Return the names of the two sub-axes of ``axis``, the major one first; the minor one has ``m`` ranks."""
    return f"{axis}//{m}", f"{axis}%{m}"


def axis_of(name: str) -> str:
    """Return the axis that a sub-axis belongs to; the name of an axis is returned unchanged."""
    return _parsed(name)[0]


def joined(names: Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` with every two adjacent sub-axes of one axis, major before minor, replaced by that axis."""
    found: list[str] = []
    for name in names:
        axis, sign, m = _parsed(name)
        if sign == "%" and found and found[-1] == sub_axes(axis, m)[0]:
            found[-1] = axis
        else:
            found.append(name)
    return tuple(found)


@cache
def _parsed(name: str) -> tuple[str, str, int]:
    """Split the name of a sub-axis into (axis, "//" or "%", m), and that of an axis into (axis, "", 1)."""
    for sign in ("//", "%"):
        axis, found, m = name.partition(sign)
        if found:
            return axis, sign, int(m)
    return name, "", 1


def _place(name: str, size: int, at: int) -> tuple[int, int]:
    """Return the size of ``name``, which is an axis of ``size`` ranks or a sub-axis of one, and the coordinate on
    ``name`` of a rank that is ``at`` on the axis."""
    _, sign, m = _parsed(name)
    return (min(size, m), at % m) if sign == "%" else (size // m, at // m)


def _moved(name: str, at: int, place: int) -> int:
    """Return the coordinate on an axis of a rank that is ``at`` on it, once it moves to ``place`` on ``name``."""
    _, sign, m = _parsed(name)
    return at // m * m + place if sign == "%" else place * m + at % m


@dataclass(frozen=True)
class Mesh:
    """A mesh arranges ranks ``0 … size-1`` on named axes.  An axis that it does not have counts as one of size 1."""

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        for axis in self.axes:
            check_value("mesh", axis, isinstance(axis, Axis), "an Axis(name, size)")
            if self.names.count(axis.name) > 1:
                raise ConfigError(f'mesh: axis "{axis.name}" is there twice; legal: each name once, of {self.names}.')

    @staticmethod
    def of(**sizes: int) -> Mesh:
        """Return a mesh of axes in the order given, the first varying slowest: ``Mesh.of(dp=2, tp=4)``."""
        return Mesh(tuple(Axis(name, size) for name, size in sizes.items()))

    @staticmethod
    def spanned(sizes: Mapping[str, int]) -> Mesh:
        """Return the mesh of the axes that these axes and sub-axes, given with their sizes, belong to."""
        found: dict[str, int] = {}
        for name, size in sizes.items():
            found[axis_of(name)] = found.get(axis_of(name), 1) * size
        return Mesh.of(**found)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the axes, slowest first."""
        return tuple(axis.name for axis in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the axes, slowest first."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.shape)

    def axis_size(self, names: Axes) -> int:
        """Return the number of ranks along ``names`` together; an absent axis counts as 1."""
        key = _names(names)
        found = self._along.get(key)
        if found is None:
            found = math.prod(_place(name, self._sizes.get(axis_of(name), 1), 0)[0] for name in dict.fromkeys(key))
            self._along[key] = found
        return found

    @cached_property
    def _along(self) -> dict[tuple[str, ...], int]:
        """Return the results of :meth:`axis_size` so far; they are kept because they are needed often."""
        return {}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.shape, strict=True))

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Return, for each axis, the distance in ranks between neighbours on it."""
        return {name: math.prod(self.shape[i + 1 :]) for i, name in enumerate(self.names)}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on every axis; ShardwiseError if the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise ShardwiseError(f"rank {rank} is not in the mesh; legal: 0 to {self.size - 1}.")
        return {name: rank // stride % self._sizes[name] for name, stride in self._strides.items()}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at ``coordinates``, where an axis not named is at 0; ShardwiseError if there is none."""
        for name, value in coordinates.items():
            size = self.axis_size(name)
            if not 0 <= value < size:
                hint = "" if name in self.names else did_you_mean(name, self.names)
                raise ShardwiseError(f'coordinate {value} on axis "{name}" is not legal; legal: 0 to {size - 1}.{hint}')
        return self._at(coordinates)

    def _at(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at coordinates that are known to be legal."""
        return sum(coordinates.get(name, 0) * stride for name, stride in self._strides.items())

    def group(self, rank: int, names: Axes) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only on the axes ``names``, the first axis varying slowest."""
        here = self.coordinates(rank)
        wanted = [name for name in _names(names) if axis_of(name) in here]
        found = []
        for place in product(*(range(self.axis_size(name)) for name in wanted)):
            there = dict(here)
            for name, at in zip(wanted, place, strict=True):
                there[axis_of(name)] = _moved(name, there[axis_of(name)], at)
            found.append(self._at(there))
        return tuple(found)

    def index(self, rank: int, names: Axes) -> int:
        """Return the position of ``rank`` in ``group(rank, names)``."""
        key = rank, _names(names)
        found = self._indices.get(key)
        if found is None:
            here, found = self.coordinates(rank), 0
            for name in key[1]:
                axis = axis_of(name)
                size, at = _place(name, self._sizes.get(axis, 1), here.get(axis, 0))
                found = found * size + at
            self._indices[key] = found
        return found

    @cached_property
    def _indices(self) -> dict[tuple[int, tuple[str, ...]], int]:
        """Return the results of :meth:`index` so far; they are kept because they are needed often."""
        return {}

    def other_axes(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the axes that are not in ``names``; of an axis with one sub-axis in ``names``, return the other."""
        given = tuple(names)
        known = {axis_of(name): name for name in given}
        known |= {axis_of(name): axis_of(name) for name in given if {*sub_axes(*_parsed(name)[::2])} <= {*given}}
        found: list[str] = []
        for axis in self.axes:
            _, sign, m = _parsed(known.get(axis.name, axis.name))
            found += [axis.name] if axis.name not in known else [sub_axes(axis.name, m)[sign == "//"]] if sign else []
        return tuple(found)

    def places(self, rank: int, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """Return for each of the axes ``names`` the number of ranks along it and the coordinate of ``rank`` on it."""
        return {name: (self.axis_size(name), self.index(rank, name)) for name in names}

    def links(self, per_host: int) -> dict[str, str]:
        """Return for each axis of several ranks "host" if one of its groups spans several hosts, else "device"; each
        ``per_host`` consecutive ranks are on one host."""
        check_count("ranks of a host", per_host)
        found, stride = dict[str, str](), self.size
        for axis in self.axes:
            # Groups repeat every ``span`` ranks; neighbours in a group are ``stride`` ranks apart.
            span, stride = stride, stride // axis.size
            firsts = (base + at for base in range(0, self.size, span) for at in range(stride))
            across = any(first // per_host != (first + span - stride) // per_host for first in firsts)
            if axis.size > 1:
                found[axis.name] = "host" if across else "device"
        return found

    def offset(self, rank: int, axis: str, k: int, wrap: bool = False) -> int:
        """Return the rank ``k`` further along ``axis``; past the end, ``wrap`` around or raise ShardwiseError."""
        here = self.coordinates(rank)
        size = self.axis_size(axis)
        there = here.get(axis, 0) + k
        if wrap:
            there %= size
        return self.rank({**{name: at for name, at in here.items() if name != axis}, axis: there})

    def classes(self, names: Axes) -> tuple[Coordinates, ...]:
        """Return the classes of ranks that the axes ``names`` tell apart, as their fixed coordinates in rank order."""
        wanted = tuple(name for name in self.names if name in _names(names))
        places = product(*(range(self.axis_size(name)) for name in wanted))
        return tuple(tuple(zip(wanted, place, strict=True)) for place in places)

    def members(self, coordinates: Coordinates) -> tuple[int, ...]:
        """Return the ranks at these fixed ``coordinates``, in rank order."""
        fixed = dict(coordinates)
        free = tuple(name for name in self.names if name not in fixed)
        return self.group(self.rank(fixed), free)
