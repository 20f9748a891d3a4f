"""Schedule ``auto`` for units: the best of all cuts, in the memory that there is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.timetable import Timetable
from shardwise.estimate.order import UnitCosts, order
from shardwise.estimate.search import auto
from shardwise.estimate.simulate import simulate

EVENTS = 60_000


def units(number: int, seed: int) -> UnitCosts:
    draw = random.Random(seed)
    f, i, w = ([draw.uniform(0.5, 1.5) for _ in range(number)] for _ in range(3))
    kept = [draw.uniform(500, 1500) for _ in range(number)]
    return UnitCosts(
        f, [a + b for a, b in zip(i, w, strict=True)], i, w, 0.1, kept, [x / 2 for x in kept], [100] * number
    )


def free(stages: Sequence[int], timetable: Timetable) -> list[int]:
    return [0] * len(timetable)


def test_stages_are_sums_of_units() -> None:
    one = UnitCosts([1, 2, 3], [4, 5, 6], [2, 2, 2], [1, 1, 7], 0.5, [10, 20, 30], [1, 2, 3], [7, 8, 9])
    costs = one.stages((1, 2))
    assert (costs.forward, costs.backward, costs.input, costs.weight, costs.transfer) == (
        (1, 5),
        (4, 11),
        (2, 4),
        (1, 8),
        (0.5,),
    )
    assert (costs.activations, costs.weight_activations) == ((17, 58), (1, 5))
    assert one.cut(2) == (2, 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_all_cuts(seed: int) -> None:
    one = units(8, seed)
    cuts = [one.cut(2), one.cut(4)]
    found = order(one, 2, 6, cuts, free, 0, EVENTS)
    each = [auto(2, 6, one.stages(cut), events=EVENTS) for cut in cuts]
    best = min(each, key=lambda a: a.simulation.seconds)
    assert found.found.timetable == best.timetable and found.stages == cuts[each.index(best)]
    assert found.named is not None
    assert found.named.simulation.seconds == min(a.named.simulation.seconds for a in each if a.named)
    assert found.found.simulation.seconds <= found.named.simulation.seconds
    assert simulate(found.found.timetable, found.costs).seconds == found.found.simulation.seconds


def test_what_is_chosen_fits_as_predicted() -> None:
    """Though ranks need more than the search knows of, and not the same."""
    one, seen = units(8, 9), []

    def peaks(stages: tuple[int, ...], timetable: Timetable) -> list[int]:
        held = simulate(timetable, one.stages(stages)).peak_bytes
        seen.append([round(1.1 * one + more) for one, more in zip(held, (9000, 2000), strict=True)])
        return seen[-1]

    most = order(one, 2, 8, [one.cut(2), one.cut(4)], peaks, 10**9, EVENTS)
    budget, before = most.peak, most.found.simulation.seconds
    for _ in range(5):
        found = order(one, 2, 8, [one.cut(2), one.cut(4)], peaks, budget, EVENTS)
        assert found.peak <= budget and max(peaks(found.stages, found.found.timetable)) == found.peak
        assert found.found.simulation.seconds >= before - 1e-9
        budget, before = found.peak - 1500, found.found.simulation.seconds
    assert before > most.found.simulation.seconds
    seen.clear()
    with pytest.raises(
        ConfigError, match=r'"auto": no timetable was found that fits in 9,000 bytes a rank; the least .* is [\d,]+;'
    ):
        order(one, 2, 8, [one.cut(2)], peaks, 9000, EVENTS)
    assert len(seen) < 8
    with pytest.raises(ConfigError, match="cuts: there are none; legal: the units in each stage"):
        order(one, 2, 8, [], peaks, 9000, EVENTS)
