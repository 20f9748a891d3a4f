"""The nearest plan that fits into a budget of memory is found by a search over a short list of changes, cheapest first.

What a change costs is a rough percentage of a step's time, after the measurements in its papers; what changes the
numbers or needs more devices costs more than anything that does not, and is tried only if nothing else is enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Changes = Mapping[str, Any]
"""The new values, by the config's keys."""

Peak = Callable[[Changes], int]
"""Returns the bytes that a rank needs under some changes."""

RECOMPUTE = {"none": 0, "selective": 6, "full": 33}  # percent of a step; full repeats the forward, a third of it
ZERO = (0, 1, 3, 12)  # by stage; stage 3 communicates half as much again
GATHERED = {"step": 0, "forward": 5, "use": 10}
REDUCED = {"step": 0, "microbatch": 5}
OFFLOAD = {"none": 0, "optimizer": 100}
DOUBLED = 8  # each time that the number of microbatches doubles: products are smaller
HOST = 8
"""The most tensor-parallel ranks: they wait for each other in every layer, and have to be on one host."""


@dataclass(frozen=True)
class FitChoices:
    """The present values of what can be changed, ZeRO only if it ``shards``; ``gathered`` and ``reduced`` are None if
    they follow from the budget, ``tp`` if the model cannot be split over tensor-parallel ranks."""

    batch_size: int
    dp: int
    dp_replicate: int = 1
    zero: int = 0
    gathered: str | None = None
    reduced: str | None = None
    recompute: str = "none"
    microbatches: int = 1
    offload: str = "none"
    precision: str = "fp32"
    kind: str = "gpu"
    tp: int | None = None
    shards: bool = True


class Rung(NamedTuple):
    """A value of a key, and what it costs compared with the present value."""

    value: Any
    cost: float


class Fit(NamedTuple):
    """``changes`` lead to the nearest plan that fits (None if there is none), whose peak is ``peak`` bytes.

    ``least`` bytes is the smallest peak of all plans that were tried, and ``least_changes`` lead to it.  If no plan
    fits, ``peak`` is ``least``.
    """

    changes: Changes | None
    peak: int
    least: int
    least_changes: Changes


def nearest(now: FitChoices, budget: int, peak: Peak) -> Fit:
    """Return the plan with the cheapest changes whose ``peak`` is at most ``budget`` bytes; each peak is computed once.

    The search assumes that more of a change needs no more memory, except for the plan that needs least, which it finds
    step by step.
    """
    known: dict[tuple[tuple[str, Any], ...], int] = {}

    def asked(changes: Changes) -> int:
        key = tuple(sorted(changes.items()))
        if key not in known:
            known[key] = peak(changes)
        return known[key]

    least: tuple[int, Changes] | None = None
    for fixed, choices in _tiers(now):
        found, low = _Search(_ladders(choices), fixed, budget, asked).run()
        if least is None or low[0] < least[0]:
            least = low
        if found is not None:
            return Fit(found, asked(found), *least)
    assert least is not None
    return Fit(None, least[0], *least)


def _tiers(now: FitChoices) -> Iterator[tuple[dict[str, Any], FitChoices]]:
    """Yield the changes of each tier with its choices: the present devices, then more tensor parallelism on them; then
    both in half the precision; then all of this on twice as many devices, and so on as long as there are rows."""
    dp = now.dp
    while dp == now.dp or now.batch_size % (dp * now.microbatches) == 0:
        for precision in dict.fromkeys((now.precision, "bf16" if now.precision == "fp32" else now.precision)):
            for one in _plainer(_shared(replace(now, dp=dp, precision=precision))):
                pairs = {key: (getattr(now, key), getattr(one, key)) for key in ("dp", "tp", "precision", "zero")}
                yield {f"parallel.{key}": new for key, (old, new) in pairs.items() if new != old}, one
        dp *= 2


def _shared(now: FitChoices) -> Iterator[FitChoices]:
    """Yield the same; then with twice as many tensor-parallel and half as many data-parallel ranks, and so on."""
    yield now
    if now.tp is not None and now.dp % 2 == 0 and 2 * now.tp <= HOST:
        yield from _shared(replace(now, dp=now.dp // 2, tp=2 * now.tp))


def _plainer(each: Iterable[FitChoices]) -> Iterator[FitChoices]:
    """Yield each, and on GPUs also without ZeRO: a communicator less can save more memory than ZeRO."""
    for one in each:
        yield one
        if one.zero and one.kind == "gpu":
            yield replace(one, zero=0, shards=False)


def _ladders(now: FitChoices) -> dict[str, list[Rung]]:
    """Return the values of each key that need less and less memory, the present one first."""
    per_rank = now.batch_size // now.dp
    divisors = [m for m in range(now.microbatches, per_rank + 1) if per_rank % m == 0]
    found = {
        "parallel.microbatches": [Rung(m, DOUBLED * math.log2(m / now.microbatches)) for m in divisors],
        "parallel.recompute": _from(RECOMPUTE, now.recompute),
        "parallel.zero": [Rung(z, ZERO[z] - ZERO[now.zero]) for z in range(now.zero, 4)],
    }
    if now.dp // now.dp_replicate == 1 or not now.shards:
        found["parallel.zero"] = found["parallel.zero"][:1]
    if now.gathered is not None and found["parallel.zero"][-1].value == 3:
        found["parallel.gathered"] = _from(GATHERED, now.gathered)
    if now.reduced is not None and found["parallel.zero"][-1].value >= 2:
        found["parallel.reduced"] = _from(REDUCED, now.reduced)
    if now.kind == "gpu":  # the host of a CPU rank is the same memory
        found["parallel.offload"] = _from(OFFLOAD, now.offload) if now.offload in OFFLOAD else [Rung(now.offload, 0)]
    return found


def _from(costs: Mapping[str, float], now: str) -> list[Rung]:
    words = list(costs)
    return [Rung(word, costs[word] - costs[now]) for word in words[words.index(now) :]]


Place = tuple[int, ...]  # the index of a rung on every ladder


@dataclass
class _Search:
    ladders: Mapping[str, Sequence[Rung]]
    fixed: Changes
    budget: int
    peak: Peak

    def run(self) -> tuple[Changes | None, tuple[int, Changes]]:
        """Return the cheapest changes that fit (None if none do), and the least of all peaks with its changes."""
        corner = self.lowest()
        least = self.at(corner), self.changes(corner)
        if least[0] > self.budget:
            return None, least
        bottom = self.needed(corner)
        misfits: list[Place] = []
        for place in sorted(itertools.product(*map(range, self.sizes())), key=self.order):
            if any(p < b for p, b in zip(place, bottom, strict=True)) or any(_within(place, m) for m in misfits):
                continue
            if self.at(place) <= self.budget:
                return self.changes(place), least
            misfits.append(place)
        return self.changes(corner), least

    def sizes(self) -> list[int]:
        return [len(ladder) for ladder in self.ladders.values()]

    def changes(self, place: Place) -> Changes:
        rungs = zip(self.ladders.items(), place, strict=True)
        return {**self.fixed, **{key: ladder[at].value for (key, ladder), at in rungs if at}}

    def at(self, place: Place) -> int:
        return self.peak(self.changes(place))

    def order(self, place: Place) -> tuple[float, int]:
        costs = [ladder[at].cost for ladder, at in zip(self.ladders.values(), place, strict=True)]
        return sum(costs), sum(map(bool, place))

    def lowest(self) -> Place:
        """Start from all changes at once, and go one step along one ladder at a time as long as that needs less memory,
        or costs less for as much."""

        def rank(one: Place) -> tuple[int, tuple[float, int]]:
            return self.at(one), self.order(one)

        place = tuple(size - 1 for size in self.sizes())
        while True:
            near = [
                (*place[:i], at, *place[i + 1 :]) for i,
                size in enumerate(self.sizes()) for at in (place[i] - 1, place[i] + 1)
                if 0 <= at < size
            ]  # fmt: skip
            best = min(near, key=rank, default=place)
            if rank(best) >= rank(place):
                return place
            place = best

    def needed(self, corner: Place) -> Place:
        """Return for each ladder the first rung with which the plan that needs least still fits."""
        return tuple(
            next(
                at
                for at in range(corner[i] + 1)
                if at == corner[i] or self.at((*corner[:i], at, *corner[i + 1 :])) <= self.budget
            )
            for i in range(len(corner))
        )


def _within(place: Place, other: Place) -> bool:
    return all(a <= b for a, b in zip(place, other, strict=True))
