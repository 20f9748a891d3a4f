"""This finds the least sum of tables over variables with few values each: it eliminates one variable after the other.

Which variable goes next is a greedy choice: the one whose elimination makes the smallest table.  Equal parts of a
problem (the blocks of a model) cost once: what is made of the same tables in the same way is of one :class:`Kind`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.intp]]

LIMIT = 1 << 26
"""The most elements of a table."""


class CostFactor(NamedTuple):
    """This is a term of the sum, ``table[values of variables]``; it is infinite where these do not go together.

    Factors that share the table object, and not just equal numbers, are recognised as equal.
    """

    variables: tuple[int, ...]
    table: Any


class TooWide(Exception):
    """Elimination would need a table of more elements than was allowed."""


class Least(NamedTuple):
    """This is the least sum, the value of each variable where it is taken, and the elements of the largest table that
    finding it took."""

    total: float
    values: list[int]
    largest: int


class Kind(NamedTuple):
    """Equal variables share this in their elimination: the ``shape`` of the sum of ``terms``, tables with the dims that
    each has of it (the last is the variable's); the least along this dim (``table``), and where it is (``best``)."""

    shape: tuple[int, ...]
    terms: tuple[tuple[Table, tuple[int, ...]], ...]
    table: Table
    best: Indices

    @classmethod
    def of(cls, shape: tuple[int, ...], terms: tuple[tuple[Table, tuple[int, ...]], ...]) -> Kind:
        whole = _sum(shape, terms)
        best = whole.argmin(-1)
        return cls(shape, terms, np.take_along_axis(whole, best[..., None], -1)[..., 0], best)


class Eliminated(NamedTuple):
    """This is an eliminated variable, its neighbours, the number of its kind, and those of the factors that went with
    it, in the order of the kind's terms."""

    variable: int
    neighbours: tuple[int, ...]
    kind: int
    taken: tuple[int, ...]


class Elimination:
    """This eliminates all variables, with ``sizes`` values each, of the sum of ``factors``; those that share tables in
    the same way share what is computed of them.  :class:`TooWide` is raised where a table would have more than
    ``limit`` elements.

    Factors are numbered as they are given; after them comes what each of ``eliminated`` leaves.  The last of ``kinds``
    is what is left when all are gone: it has one element.
    """

    def __init__(self, sizes: Sequence[int], factors: Iterable[CostFactor], limit: int = LIMIT) -> None:
        self.sizes, self.limit = sizes, limit
        self.around: list[dict[int, CostFactor]] = [{} for _ in sizes]  # the factors of each variable, by number
        self.ended: dict[int, CostFactor] = {}  # factors without variables, by number
        self.number, self.largest = 0, 0
        self.known: dict[Any, int] = {}
        self.kinds: list[Kind] = []
        self.eliminated: list[Eliminated] = []
        self.tables: list[Table] = []  # these stay alive, as keys have their ids
        for factor in factors:
            self.add(factor)
        self.run()

    def add(self, factor: CostFactor) -> None:
        self.tables.append(factor.table)
        if not factor.variables:
            self.ended[self.number] = factor
        for variable in factor.variables:
            self.around[variable][self.number] = factor
        self.number += 1

    def run(self) -> None:
        heap = [(self.weight(v), v) for v in range(len(self.sizes))]
        heapq.heapify(heap)
        done = [False] * len(self.sizes)
        while heap:
            weight, variable = heapq.heappop(heap)
            if done[variable]:
                continue
            if (now := self.weight(variable)) != weight:
                heapq.heappush(heap, (now, variable))
                continue
            done[variable] = True
            self.eliminate(variable)
            for neighbour in self.eliminated[-1].neighbours:
                heapq.heappush(heap, (self.weight(neighbour), neighbour))
        self.kinds.append(Kind.of((1,), tuple((f.table, ()) for f in self.ended.values())))

    def least(self) -> Least:
        """Return the least sum; of equal sums it is always the same one."""
        values = [0] * len(self.sizes)
        for variable, neighbours, kind, _ in reversed(self.eliminated):
            values[variable] = int(self.kinds[kind].best[tuple(values[n] for n in neighbours)])
        return Least(float(self.kinds[-1].table), values, self.largest)

    def neighbours(self, variable: int) -> tuple[int, ...]:
        """Return neighbours in the order in which the factors of the variable name them."""
        found = dict.fromkeys(v for factor in self.around[variable].values() for v in factor.variables)
        found.pop(variable, None)
        return tuple(found)

    def weight(self, variable: int) -> int:
        return math.prod(self.sizes[v] for v in self.neighbours(variable)) * self.sizes[variable]

    def eliminate(self, variable: int) -> None:
        around = self.neighbours(variable)
        place = {v: i for i, v in enumerate((*around, variable))}
        taken = dict(self.around[variable])
        terms = tuple((f.table, tuple(place[v] for v in f.variables)) for f in taken.values())
        key = (self.sizes[variable], *((id(table), dims) for table, dims in terms))
        if key not in self.known:
            shape = tuple(self.sizes[v] for v in (*around, variable))
            self.largest = max(self.largest, math.prod(shape))
            if self.largest > self.limit:
                raise TooWide(f"a table of {self.largest} elements; limit: {self.limit}")
            self.known[key] = len(self.kinds)
            self.kinds.append(Kind.of(shape, terms))
        for number, factor in taken.items():
            for v in factor.variables:
                del self.around[v][number]
        self.eliminated.append(Eliminated(variable, around, self.known[key], tuple(taken)))
        self.add(CostFactor(around, self.kinds[self.known[key]].table))

    def through(self) -> list[Table]:
        """Return for each kind and each element of its sum the least total sum that contains the element; for equal
        variables it is the least over all of them."""
        made = {id(kind.table): number for number, kind in enumerate(self.kinds)}
        # For each kind, this is the least sum of all that its table is not made of.
        rest = [np.full(kind.table.shape, math.inf) for kind in self.kinds]
        rest[-1] = np.zeros(())
        found: list[Table] = []
        # A kind that takes a table comes after the kind that made it.
        for number, kind in reversed(list(enumerate(self.kinds))):
            whole = _sum(kind.shape, kind.terms) + rest[number][..., None]
            found.append(whole)
            for table, dims in kind.terms:
                if id(table) in made:
                    least = whole.min(tuple(d for d in range(whole.ndim) if d not in dims)).transpose(
                        np.argsort(np.argsort(dims))
                    )
                    good, other = np.isfinite(table), rest[made[id(table)]]
                    np.minimum(other, least - np.where(good, table, 0), out=other, where=good)
        return found[::-1]


def _sum(shape: tuple[int, ...], terms: Iterable[tuple[Table, tuple[int, ...]]]) -> Table:
    """Return the sum of tables, each with some dims of ``shape``."""
    found = np.zeros(shape)
    for table, dims in terms:
        wide = [1] * len(shape)
        for d in dims:
            wide[d] = shape[d]
        found += table.transpose(np.argsort(dims)).reshape(wide)
    return found


__all__ = [
    "LIMIT",
    "Elimination",
    "CostFactor",
    "Eliminated",
    "Kind",
    "Least",
    "Indices",
    "Table",
    "TooWide",
]
