"""The least sum of tables over variables with few values each: exact elimination, one variable after the other.

Which variable goes next is a greedy choice: that whose elimination makes the smallest table.  Equal parts of a problem (the blocks of a
model) cost once: what is made of the same tables in the same way is kept.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]


class Factor(NamedTuple):
    """A term of the sum: ``table[values of variables]``; infinite where these do not go together.

    Factors that share the table object, and not just equal numbers, are recognised as alike.
    """

    variables: tuple[int, ...]
    table: Table


class TooWide(Exception):
    """Elimination would need a table of more elements than was allowed."""


class Least(NamedTuple):
    """The least sum, the value of each variable where it is taken, and the elements of the largest table that finding it took."""

    total: float
    values: list[int]
    largest: int


class _Gone(NamedTuple):
    """An eliminated variable: its best value for each of its neighbours' values."""

    variable: int
    neighbours: tuple[int, ...]
    best: np.ndarray[Any, np.dtype[np.intp]]


def least(sizes: Sequence[int], factors: Iterable[Factor], limit: int = 1 << 26) -> Least:
    """The least sum of ``factors`` over variables with ``sizes`` values each; of equal sums always the same one.

    :class:`TooWide` where a table would have more than ``limit`` elements.
    """
    run = _Elimination(sizes, limit)
    for factor in factors:
        run.add(factor)
    return run.solve()


class _Elimination:
    def __init__(self, sizes: Sequence[int], limit: int) -> None:
        self.sizes, self.limit = sizes, limit
        self.factors: list[dict[int, Factor]] = [{} for _ in sizes]  # of each variable, by number
        self.number, self.total, self.largest = 0, 0.0, 0
        self.known: dict[Any, tuple[Table, Any]] = {}
        self.tables: list[Table] = []  # whose identities are in keys

    def add(self, factor: Factor) -> None:
        self.tables.append(factor.table)
        if not factor.variables:
            self.total += float(factor.table)
        for variable in factor.variables:
            self.factors[variable][self.number] = factor
        self.number += 1

    def solve(self) -> Least:
        heap = [(self.weight(v), v) for v in range(len(self.sizes))]
        heapq.heapify(heap)
        gone: list[_Gone] = []
        done = [False] * len(self.sizes)
        while heap:
            weight, variable = heapq.heappop(heap)
            if done[variable]:
                continue
            if (now := self.weight(variable)) != weight:
                heapq.heappush(heap, (now, variable))
                continue
            done[variable] = True
            gone.append(self.eliminate(variable))
            for neighbour in gone[-1].neighbours:
                heapq.heappush(heap, (self.weight(neighbour), neighbour))
        values = [0] * len(self.sizes)
        for variable, neighbours, best in reversed(gone):
            values[variable] = int(best[tuple(values[n] for n in neighbours)])
        return Least(self.total, values, self.largest)

    def neighbours(self, variable: int) -> tuple[int, ...]:
        """In the order in which its factors name them."""
        found = dict.fromkeys(v for factor in self.factors[variable].values() for v in factor.variables)
        found.pop(variable, None)
        return tuple(found)

    def weight(self, variable: int) -> int:
        return math.prod(self.sizes[v] for v in self.neighbours(variable)) * self.sizes[variable]

    def eliminate(self, variable: int) -> _Gone:
        around = self.neighbours(variable)
        place = {v: i for i, v in enumerate((*around, variable))}
        terms = list(self.factors[variable].items())
        key = (self.sizes[variable], *((id(f.table), tuple(place[v] for v in f.variables)) for _, f in terms))
        if key not in self.known:
            shape = [self.sizes[v] for v in (*around, variable)]
            self.largest = max(self.largest, math.prod(shape))
            if self.largest > self.limit:
                raise TooWide(f"a table of {self.largest} elements; limit: {self.limit}")
            self.known[key] = _minimum(shape, [(f.table, [place[v] for v in f.variables]) for _, f in terms])
        table, best = self.known[key]
        for number, factor in terms:
            for v in factor.variables:
                del self.factors[v][number]
        self.add(Factor(around, table))
        return _Gone(variable, around, best)


def _minimum(shape: Sequence[int], terms: Sequence[tuple[Table, Sequence[int]]]) -> tuple[Table, Any]:
    """The least of a sum of tables along the last of its dims, and where that is; each table has some of the dims."""
    total = np.zeros(shape)
    for table, dims in terms:
        order = np.argsort(dims)
        wide = [1] * len(shape)
        for d in dims:
            wide[d] = shape[d]
        total += table.transpose(order).reshape(wide)
    best = total.argmin(-1)
    return np.take_along_axis(total, best[..., None], -1)[..., 0], best


def total(factors: Iterable[Factor], values: Sequence[int]) -> float:
    """The sum at some values."""
    return float(sum(f.table[tuple(values[v] for v in f.variables)] for f in factors))


__all__ = ["Factor", "Least", "TooWide", "least", "total"]
