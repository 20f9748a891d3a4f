"""Schedule ``auto`` cuts a model's units into stages by what each unit takes, for every possible number of stages per
rank, and chooses the best timetable of all that fit into the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardwise.core.errors import ConfigError
from shardwise.core.timetable import Timetable
from shardwise.estimate.search import Found, auto
from shardwise.estimate.simulate import Costs
from shardwise.parallel.pipeline import balance

ROUNDS = 8
"""How often a cut is searched, each time in less memory because what was found before does not fit."""

Peaks = Callable[[tuple[int, ...], Timetable], Sequence[int]]
"""Returns the most bytes that each rank of the pipeline holds, from the units in each stage and the timetable."""


@dataclass(frozen=True)
class UnitCosts:
    """Seconds and bytes of each unit that a stage can have, in the order of the model, for one microbatch.

    ``forward`` to ``weight`` are the seconds of F, B, I and W; ``transfer`` those of a message between two ranks.
    ``kept`` are the bytes that a unit keeps from F to the end of B or I, its outputs included, ``deferred`` those from
    I to the end of W; ``inputs`` are the bytes that it gets from the unit before, which a stage that begins with it
    holds too.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    transfer: float
    kept: Sequence[float]
    deferred: Sequence[float]
    inputs: Sequence[float]

    @property
    def units(self) -> int:
        return len(self.forward)

    def stages(self, sizes: Sequence[int]) -> Costs:
        """Return the costs of stages with these numbers of units."""
        bounds = list(pairwise(accumulate(sizes, initial=0)))

        def sums(values: Sequence[float]) -> list[float]:
            return [sum(values[start:stop]) for start, stop in bounds]

        held = [kept + self.inputs[start] for kept, (start, _) in zip(sums(self.kept), bounds, strict=True)]
        return Costs(
            sums(self.forward), sums(self.input), sums(self.weight), sums(self.backward),
            [self.transfer] * (len(sizes) - 1),
            held, sums(self.deferred),
        )  # fmt: skip

    def cut(self, stages: int) -> tuple[int, ...]:
        """Return the number of units in each of ``stages`` stages, such that the slowest stage is fastest."""
        return balance([f + b for f, b in zip(self.forward, self.backward, strict=True)], stages)


@dataclass(frozen=True)
class Order:
    """The units in each stage, the timetable ``found`` for their ``costs``, the most bytes that a rank then holds, and
    the best ``named`` schedule over all cuts."""

    stages: tuple[int, ...]
    found: Found
    costs: Costs
    peak: int
    named: Found | None


def order(
    units: UnitCosts,
    ranks: int,
    microbatches: int,
    cuts: Iterable[Sequence[int]],
    peaks: Peaks,
    budget: int,
    events: int = 1_000_000,
    norm: str = "barrier",
) -> Order:
    """Return the fastest order over all ``cuts`` (units in each stage) with at most ``budget`` bytes on each rank.

    The search knows only the bytes of activations; if a rank would hold too many bytes under its result, it is repeated
    with a lower limit for that rank.  :class:`ConfigError` is raised if nothing fits.
    """
    chosen: list[Order] = []
    least: list[int] = []
    for sizes in map(tuple, cuts):
        costs, limits = units.stages(sizes), [float("inf")] * ranks
        for _ in range(ROUNDS):
            try:
                found = auto(ranks, microbatches, costs, limits, norm, events=events)
            except ConfigError:
                break
            held = peaks(sizes, found.timetable)
            least.append(max(held))
            if least[-1] <= budget:
                chosen.append(Order(sizes, found, costs, least[-1], found.named))
                break
            limits = [
                min(limit, taken - (peak - budget)) if peak > budget else limit
                for limit, taken, peak in zip(limits, found.simulation.peak_bytes, held, strict=True)
            ]
    if not least:
        raise ConfigError.on("cuts", "there are none", "the units in each stage, for one number of stages or several")
    if not chosen:
        needed = f"the least that one needs is {min(least):,}"
        wrong = f"no timetable was found that fits in {budget:,} bytes a rank; {needed}"
        legal = "more memory, or less for each microbatch, such as more of them"
        raise ConfigError.on('parallel.schedule = "auto"', wrong, legal)
    best = min(chosen, key=lambda one: one.found.simulation.seconds)
    named = min((one.named for one in chosen if one.named), key=lambda one: one.simulation.seconds, default=None)
    return Order(best.stages, best.found, best.costs, best.peak, named)
