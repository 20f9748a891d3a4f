"""This finds the fewest seconds, of tables of seconds and bytes, whose bytes are within a limit: elimination again, of
what may still be part of a better answer.

For each price of a byte, elimination gives the least sum through every element of every table.  An element cannot be
part of a better answer if that sum is more than the seconds of the answer in hand and the bytes of the limit cost at
the price.  Of what is left, each eliminated variable leaves not one least sum but all sums that no other beats in both
seconds and bytes.  Those of equal variables are the same, so the sums of 32 equal layers follow from the sums of one,
whichever of the layers differ.  If sums become too many, those with the largest bounds on the whole answer are dropped,
and the least of these bounds is part of the result.  Nothing depends on time: every process finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardwise.shard.solver.variable_elimination import CostFactor, Elimination, Indices, Table

Costs = np.ndarray[Any, np.dtype[np.complex128]]
"""Seconds, and bytes as the imaginary part: both add up side by side."""

EXACT = 1e-9
"""Seconds are equal if they differ by less than this fraction of the whole."""

MOST = (1 << 8, 1 << 12, 1 << 15)
"""The number of sums kept of a variable in each attempt; what one attempt finds leaves less to the next."""


class Objective(NamedTuple):
    """This is the price of a second and of a byte."""

    seconds: float = 1.0
    nbytes: float = 0.0

    def of(self, costs: Any) -> Any:
        """Return the price of numbers or tables; what is infinite stays so."""
        good = np.isfinite(costs)
        finite = np.where(good, costs, 0)
        return np.where(good, self.seconds * finite.real + self.nbytes * finite.imag, math.inf)

    def factors(self, factors: Iterable[CostFactor]) -> list[CostFactor]:
        """Return factors with one number for each element; those that shared a table still do."""
        every = list(factors)
        tables = {key: self.of(table) for key, table in {id(f.table): f.table for f in every}.items()}
        return [CostFactor(f.variables, tables[id(f.table)]) for f in every]


SECONDS, BYTES = Objective(), Objective(0.0, 1.0)


class Fewest(NamedTuple):
    """These are the values of all variables, None where none are within the limit and better than what was known; no
    answer within the limit has fewer seconds than ``bound``."""

    values: list[int] | None
    bound: float


def fewest(
    sizes: Sequence[int],
    factors: Sequence[CostFactor],
    limit: float,
    known: float,
    prices: Sequence[Objective],
    most: Sequence[int] = MOST,
) -> Fewest:
    """Return the fewest seconds, less than ``known``, within ``limit`` bytes; ``prices`` serve to rule elements out."""
    best: list[int] | None = None
    views = [_View(weights, Elimination(sizes, weights.factors(factors))) for weights in prices]
    for number in most:
        run = _Run(factors, limit, known, views, number)
        found = run.run()
        if found is not None and found[1] < known * (1 - EXACT):
            best, known = found
        if run.bound >= known * (1 - EXACT):
            break
    return Fewest(best, min(run.bound, known))


class _View:
    """This is the elimination of all variables at one price."""

    def __init__(self, weights: Objective, elimination: Elimination) -> None:
        self.weights, self.elimination = weights, elimination
        self.through = elimination.through()


class _Sums(NamedTuple):
    """These are the sums that a kind leaves, sorted by element of its table, for which they begin at ``start``: each
    has its ``costs``, the element of the kind's sum at which it is taken (``at``), and the sums that went into it
    (``parts``)."""

    start: Indices
    costs: Costs
    at: Indices
    parts: tuple[Indices, ...]


class _Open(NamedTuple):
    """These are sums that are being made; ``bounds`` are the least totals of which they are parts, at each price."""

    at: Indices
    costs: Costs
    bounds: Table  # [price, sum]
    parts: tuple[Indices, ...] = ()

    def some(self, which: Any) -> _Open:
        return _Open(
            self.at[which], self.costs[which], self.bounds[:, which], tuple(part[which] for part in self.parts)
        )


class _Run:
    """This is one attempt, which keeps up to ``most`` sums of a variable."""

    def __init__(
        self, factors: Sequence[CostFactor], limit: float, known: float, views: Sequence[_View], most: int
    ) -> None:
        self.limit, self.known, self.views, self.most = limit, known, views, most
        self.bound = known
        self.weights = [view.weights for view in views]
        self.cuts = np.array([w.seconds * known + w.nbytes * limit for w in self.weights])[:, None]
        self.first = views[0].elimination
        self.pairs = {id(own): f.table for own, f in zip(self.first.tables, factors, strict=False)}
        self.made = {id(kind.table): number for number, kind in enumerate(self.first.kinds)}
        self.sums: list[_Sums] = []

    def run(self) -> tuple[list[int], float] | None:
        """Return the values of all variables, and their seconds."""
        for number in range(len(self.first.kinds)):
            self.sums.append(self.leave(number))
        last = self.sums[-1]
        if not len(last.costs):
            return None
        best = int(last.costs.real.argmin())
        return self.values(best), float(last.costs.real[best])

    def leave(self, number: int) -> _Sums:
        """Return what is left when variables of a kind are eliminated."""
        kind = self.first.kinds[number]
        bounds = np.array([view.through[number].ravel() for view in self.views])
        at = np.flatnonzero((bounds <= self.cuts * (1 + EXACT)).all(0))
        places = np.unravel_index(at, kind.shape)
        costs, children = np.zeros(len(at), np.complex128), []
        for term, (table, dims) in enumerate(kind.terms):
            if id(table) in self.made:
                children.append((term, self.made[id(table)], dims))
            else:
                costs += self.pairs[id(table)][tuple(places[d] for d in dims)]
        found = self.trimmed(self.hopeful(_Open(at, costs, bounds[:, at])))
        for term, child, dims in children:
            found = self.joined(found, number, term, child, dims)
            found = found.some(self.unbeaten(found.at, found.costs))
            found = self.trimmed(found)
        entries = found.at // kind.shape[-1]
        kept = self.unbeaten(entries, found.costs)
        found, entries = found.some(kept), entries[kept]
        start = np.searchsorted(entries, np.arange(math.prod(kind.shape[:-1]) + 1))
        return _Sums(start, found.costs, found.at, found.parts)

    def joined(self, found: _Open, number: int, term: int, child: int, dims: tuple[int, ...]) -> _Open:
        """Return sums joined with each of the sums that the kind ``child`` left, which went into this one."""
        kind, sums = self.first.kinds[number], self.sums[child]
        places = np.unravel_index(found.at, kind.shape)
        shape = tuple(kind.shape[d] for d in dims)
        entry = (
            np.ravel_multi_index(tuple(places[d] for d in dims), shape) if dims else np.zeros(len(found.at), np.intp)
        )
        counts = sums.start[entry + 1] - sums.start[entry]
        kept = self.within(found.bounds, counts, 16 * self.most)
        found, entry, counts = found.some(kept), entry[kept], counts[kept]
        rows = np.repeat(np.arange(len(counts)), counts)
        own = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + sums.start[entry][rows]
        least = [view.elimination.kinds[number].terms[term][0].ravel()[entry] for view in self.views]
        costs = sums.costs[own]
        more = np.array([w.of(costs) - one[rows] for w, one in zip(self.weights, least, strict=True)])
        found = found.some(rows)
        return self.hopeful(_Open(found.at, found.costs + costs, found.bounds + more, (*found.parts, own)))

    def hopeful(self, found: _Open) -> _Open:
        """Return those that may be part of a better answer."""
        return found.some((found.bounds <= self.cuts * (1 + EXACT)).all(0) & (found.costs.imag <= self.limit))

    def unbeaten(self, entries: Indices, costs: Costs) -> Indices:
        """Return which are not equalled or beaten by another of the same entry, sorted by entry."""
        grid = max(self.known, 1e-300) * EXACT * 1e-4
        _, rank = np.unique(np.floor(costs.real / grid), return_inverse=True)
        order = np.lexsort((rank, costs.imag, entries))
        entries, rank = entries[order], rank[order]
        group = np.cumsum(np.diff(entries, prepend=entries[:1]) != 0)
        height = rank - group * (len(rank) + 1)  # each group is below all groups before it
        lowest = np.minimum.accumulate(height)
        good = np.ones(len(height), bool)
        good[1:] = height[1:] < lowest[:-1]
        return order[good]

    def trimmed(self, found: _Open) -> _Open:
        return found.some(self.within(found.bounds, np.ones(len(found.at), np.intp), self.most))

    def within(self, bounds: Table, counts: Indices, most: int) -> Any:
        """Return those of the least bounds, together at most ``most``; the others bound the answer."""
        if counts.sum() <= most:
            return slice(None)
        seconds = self.seconds(bounds)
        order = np.argsort(seconds, kind="stable")
        gone = order[np.cumsum(counts[order]) > most]
        self.bound = min(self.bound, float(seconds[gone].min()))
        kept = np.ones(len(counts), bool)
        kept[gone] = False
        return kept

    def seconds(self, bounds: Table) -> Table:
        """Return the least seconds that bounds allow within the limit."""
        found = np.full(bounds.shape[1], -math.inf)
        for weights, row in zip(self.weights, bounds, strict=True):
            if weights.seconds:
                np.maximum(found, (row - weights.nbytes * self.limit) / weights.seconds, out=found)
        return found

    def values(self, best: int) -> list[int]:
        """Return the values of all variables, found back from one of the last sums."""
        run = self.first
        given = run.number - len(run.eliminated)  # the number of factors that were given
        numbers = self.chosen([n for n in run.ended if n >= given], self.sums[-1], best)
        out = [0] * len(run.sizes)
        for number, one in reversed(list(enumerate(run.eliminated, given))):
            sums, mine = self.sums[one.kind], numbers[number]
            out[one.variable] = int(sums.at[mine]) % run.sizes[one.variable]
            numbers |= self.chosen([n for n in one.taken if n >= given], sums, mine)
        return out

    @staticmethod
    def chosen(left: Sequence[int], sums: _Sums, mine: int) -> dict[int, int]:
        """Return which of the sums of each factor that was left went into sum ``mine``."""
        return {number: int(part[mine]) for number, part in zip(left, sums.parts, strict=True)}


__all__ = ["BYTES", "EXACT", "SECONDS", "Costs", "Fewest", "Objective", "fewest"]
