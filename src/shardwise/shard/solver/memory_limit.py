"""The fewest seconds of tables of seconds and bytes whose bytes are within a limit: elimination again, of what may
still be part of a better answer.

For each price of a byte, elimination gives the least sum through every element of every table.  An element through
which that is more than an answer in hand would cost at the price cannot be part of a better one.  Of what is left, each
eliminated variable leaves not one least sum but all sums, of which none is as few seconds and as few bytes as another.
Those of equal variables are the same, so 32 equal layers are 32 times the sums of one, and no choice between the orders
in which layers differ.  Sums may become too many; then those of the largest bound on the whole answer go, and that
bound is part of the result.  Nothing depends on time: every process finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardwise.shard.solver.variable_elimination import CostFactor, Elimination, Places, Table

Costs = np.ndarray[Any, np.dtype[np.complex128]]
"""Seconds, and bytes as the imaginary part: both add up side by side."""

EXACT = 1e-9
"""Seconds are equal that differ by less, as a part of the whole."""

MOST = (1 << 8, 1 << 12, 1 << 15)
"""Sums that are kept of a variable, in one attempt after the other: what an attempt finds leaves less to the next."""


class Objective(NamedTuple):
    """What a second and a byte count for."""

    seconds: float = 1.0
    nbytes: float = 0.0

    def of(self, costs: Any) -> Any:
        """The price of numbers or tables; what is infinite stays so."""
        good = np.isfinite(costs)
        finite = np.where(good, costs, 0)
        return np.where(good, self.seconds * finite.real + self.nbytes * finite.imag, math.inf)

    def factors(self, factors: Iterable[CostFactor]) -> list[CostFactor]:
        """Factors with one number for each element; what shared a table still does."""
        every = list(factors)
        tables = {key: self.of(table) for key, table in {id(f.table): f.table for f in every}.items()}
        return [CostFactor(f.variables, tables[id(f.table)]) for f in every]


SECONDS, BYTES = Objective(), Objective(0.0, 1.0)


class Fewest(NamedTuple):
    """The values of all variables, None where none are within the limit and better than what was known; no answer
    within the limit is of fewer seconds than ``bound``."""

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
    """The fewest seconds within ``limit`` bytes, of fewer than ``known``; ``prices`` are those at which elements are
    looked at.
    """
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
    """Everything at one price."""

    def __init__(self, weights: Objective, elimination: Elimination) -> None:
        self.weights, self.elimination = weights, elimination
        self.through = elimination.through()


class _Sums(NamedTuple):
    """What a kind leaves, sorted by element of its table, those of which begin at ``start``: what each costs, at which
    element of the kind's sum it is taken, and of which sums of the kinds that went into it."""

    start: Places
    costs: Costs
    at: Places
    parts: tuple[Places, ...]


class _Open(NamedTuple):
    """Sums that are being made: ``bounds`` are the least of all in which they are parts, at each price."""

    at: Places
    costs: Costs
    bounds: Table  # [price, sum]
    parts: tuple[Places, ...] = ()

    def some(self, which: Any) -> _Open:
        return _Open(
            self.at[which], self.costs[which], self.bounds[:, which], tuple(part[which] for part in self.parts)
        )


class _Run:
    """One attempt."""

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
        """Values, and their seconds."""
        for number in range(len(self.first.kinds)):
            self.sums.append(self.leave(number))
        last = self.sums[-1]
        if not len(last.costs):
            return None
        best = int(last.costs.real.argmin())
        return self.values(best), float(last.costs.real[best])

    def leave(self, number: int) -> _Sums:
        """What is left when variables of a kind are eliminated."""
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
        """With each of the sums that a kind left that went into this one."""
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
        """Those that may be part of a better answer."""
        return found.some((found.bounds <= self.cuts * (1 + EXACT)).all(0) & (found.costs.imag <= self.limit))

    def unbeaten(self, entries: Places, costs: Costs) -> Places:
        """Those to which no other of the same entry is equal or better, sorted by entry."""
        grid = max(self.known, 1e-300) * EXACT * 1e-4
        _, rank = np.unique(np.floor(costs.real / grid), return_inverse=True)
        order = np.lexsort((rank, costs.imag, entries))
        entries, rank = entries[order], rank[order]
        group = np.cumsum(np.diff(entries, prepend=entries[:1]) != 0)
        height = rank - group * (len(rank) + 1)  # each group is below all before it
        lowest = np.minimum.accumulate(height)
        good = np.ones(len(height), bool)
        good[1:] = height[1:] < lowest[:-1]
        return order[good]

    def trimmed(self, found: _Open) -> _Open:
        return found.some(self.within(found.bounds, np.ones(len(found.at), np.intp), self.most))

    def within(self, bounds: Table, counts: Places, most: int) -> Any:
        """Those of the least bounds that are together no more than ``most``; the others' bound is the answer's."""
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
        """The least seconds that bounds allow within the limit."""
        found = np.full(bounds.shape[1], -math.inf)
        for weights, row in zip(self.weights, bounds, strict=True):
            if weights.seconds:
                np.maximum(found, (row - weights.nbytes * self.limit) / weights.seconds, out=found)
        return found

    def values(self, best: int) -> list[int]:
        """The values of all variables, found back from one of the last sums."""
        run = self.first
        given = run.number - len(run.gone)  # factors before those that were left
        numbers = self.chosen([n for n in run.ended if n >= given], self.sums[-1], best)
        out = [0] * len(run.sizes)
        for number, one in reversed(list(enumerate(run.gone, given))):
            sums, mine = self.sums[one.kind], numbers[number]
            out[one.variable] = int(sums.at[mine]) % run.sizes[one.variable]
            numbers |= self.chosen([n for n in one.taken if n >= given], sums, mine)
        return out

    @staticmethod
    def chosen(left: Sequence[int], sums: _Sums, mine: int) -> dict[int, int]:
        """Which of the sums of each factor that was left went into one."""
        return {number: int(part[mine]) for number, part in zip(left, sums.parts, strict=True)}


__all__ = ["BYTES", "EXACT", "SECONDS", "Costs", "Fewest", "Objective", "fewest"]
