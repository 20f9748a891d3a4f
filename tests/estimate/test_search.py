"""``auto``: never worse than the best named schedule that fits, at or below what the zero-bubble paper's own search
found, within the limit.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.schedules import SCHEDULES
from shardwise.core.timetable import Timetable
from shardwise.estimate.fill import Filler, PlanDraft
from shardwise.estimate.search import auto
from shardwise.estimate.simulate import Costs, simulate
from shardwise.parallel.schedule import timetable
from timetables import SYNCHRONOUS, numbers, uniform

KEPT = {"1.5B": 32 / (34 + 5 * 24 * 1024 / 2304), "6.2B": 32 / 74, "14.6B": 32 / 74, "28.3B": 32 / 74}
"""What W needs of a layer's activations: 32 s b h of s b h (34 + 5 a s / h) bytes, s = 1024 (arXiv 2401.10241, tables 1
and 3).
"""

ZERO_BUBBLE = """
1.5B  8 24 18.522 18.086 9.337 0.601 0.1585 0.0433
1.5B  8 32 18.513 18.086 9.331 0.626 0.1242 0.0039
6.2B  8 24 29.718 29.444 19.927 0.527 0.1323 0.0029
6.2B  8 32 29.802 29.428 19.530 0.577 0.1045 0.0022
1.5B  8 64 18.546 18.097 9.321 0.762 0.0674 0.0026
6.2B  8 64 29.935 29.621 19.388 0.535 0.0554 0.001
14.6B 16 48 11.347 11.248 8.132 0.377 0.1397 0.0066
14.6B 16 64 11.307 11.254 8.101 0.379 0.1088 0.0054
14.6B 16 128 11.325 11.308 8.109 0.378 0.0576 0.0028
28.3B 32 96 10.419 10.207 7.715 0.408 0.1421 0.0038
28.3B 32 128 10.408 10.204 7.703 0.408 0.1106 0.0029
28.3B 32 256 10.402 10.248 7.698 0.460 0.0594 0.0018
""".strip().splitlines()
"""Tables 9 and 5 of that paper: model, ranks, microbatches, milliseconds of F, I, W and a transfer, and the bubble
rates of its searched schedules ZB-1p and ZB-2p, which may hold the activations of as many, or twice as many,
microbatches as there are ranks."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=() if i < 4 else pytest.mark.full) for i, r in enumerate(ZERO_BUBBLE)]
)
def test_published_bubble_rates(row: str) -> None:
    model, *words = row.split()
    p, m = int(words[0]), int(words[1])
    f, i, w, transfer, *rates = map(float, words[2:])
    costs = replace(uniform(p, f, i, w, transfer), weight_activations=(KEPT[model],) * p)
    for times, rate in zip((1, 2), rates, strict=True):
        found = auto(p, m, costs, times * p, "post-validate")
        assert found.simulation.bubble_of_total < rate + 5.1e-5  # as printed, to four digits
        assert max(found.simulation.peak_bytes) <= times * p * (1 + 1e-9)


def drawn(stages: int, seed: int) -> Costs:
    draw = random.Random(seed)

    def some(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) for _ in range(stages)]

    i, w = some(1, 2), some(0.5, 2)
    return Costs(
        some(1, 2),
        i,
        w,
        [0.9 * (a + b) for a, b in zip(i, w, strict=True)],
        some(0, 0.3)[1:],
        some(1, 2),
        some(0.5, 1),
        some(0, 1),
        0.1,
    )


def check_complete(found: Timetable, ranks: int, microbatches: int, stages: int) -> None:
    """Everything once, the kinds of a stage in order of microbatches."""
    lanes: dict[tuple[str, int], list[int]] = {}
    for tasks in found:
        for kind, stage, m in tasks:
            for lane in {"F": "F", "B": "IW"}.get(kind, kind):
                lanes.setdefault((lane, stage), []).append(m)
    assert lanes == {(kind, stage): list(range(microbatches)) for kind in "FIW" for stage in range(stages)}
    assert len(found) == ranks


@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 3, 1), (2, 1, 1), (2, 5, 1), (3, 7, 1), (4, 8, 1), (2, 4, 2), (3, 7, 2), (2, 5, 3)]
)
@pytest.mark.parametrize("norm", ["barrier", "post-validate"])
def test_no_worse_than_any_named_schedule_that_fits(p: int, m: int, v: int, norm: str) -> None:
    costs = drawn(p * v, 10 * p + v)
    named = {n: simulate(timetable(n, p, m, v), costs, norm) for n in SYNCHRONOUS if (p, m, v) in numbers(n, 4, 8)}
    better = 0
    for limit in sorted({max(one.peak_bytes) for one in named.values()}):
        found = auto(p, m, costs, limit, norm, events=100_000)
        check_complete(found.timetable, p, m, p * v)
        assert max(found.simulation.peak_bytes) <= limit * (1 + 1e-9)
        assert found.simulation.seconds == simulate(found.timetable, costs, norm).seconds
        fitting = [one.seconds for one in named.values() if max(one.peak_bytes) <= limit]
        assert found.simulation.seconds <= min(fitting) * (1 + 1e-9)
        if found.name in SCHEDULES:
            assert found.timetable == timetable(found.name, p, m, v)
        else:
            assert found.name.startswith("auto from ")
            better += 1
    assert better or (p, v) not in ((3, 1), (4, 1), (3, 2))


def test_equal_costs_find_the_named_schedules() -> None:
    """With F = I = W and no transfers nothing is better than these in their memory."""
    for limit, name in ((4, "zb-h1"), (7, "zb-h2")):
        assert auto(4, 8, uniform(4), limit, "post-validate").name == name
    assert auto(4, 8, uniform(8), 8, "post-validate").name == "zbv"


def test_deterministic() -> None:
    costs = drawn(4, 3)
    assert auto(4, 9, costs, 9, events=60_000).timetable == auto(4, 9, costs, 9, events=60_000).timetable


def test_less_memory_than_any_named_schedule() -> None:
    """Below 1F1B's memory there still are timetables, down to one microbatch at a time; below, the least is told."""
    costs = replace(uniform(4), activations=(10, 20, 30, 20))
    before = 0.0
    for limit in (1000, 50, 40, 30):
        found = auto(4, 6, costs, limit)
        assert max(found.simulation.peak_bytes) <= limit and found.simulation.seconds >= before
        before = found.simulation.seconds
    with pytest.raises(
        ConfigError, match="activations: no timetable fits in 29 bytes a rank; legal: at least 30 bytes"
    ):
        auto(4, 6, costs, 29)
    with pytest.raises(ConfigError, match="legal: at least 2 bytes"):
        auto(2, 4, uniform(4), 1)


def test_many_microbatches_begin_with_few() -> None:
    """40 microbatches on 3 ranks: the lags are found with 9 and carried over."""
    costs = replace(uniform(3, 1.1, 1.0, 0.8, 0.3), weight_activations=(0.4,) * 3)
    found = auto(3, 40, costs, 6, "post-validate", events=200_000)
    check_complete(found.timetable, 3, 40, 3)
    assert found.name == "auto from zb-h2"
    named = simulate(timetable("zb-h2", 3, 40), costs, "post-validate")
    assert found.simulation.bubble_of_total < 0.25 * named.bubble_of_total


def test_fills_gaps() -> None:
    """Rank 0 of 1F1B waits for the first gradient with nothing to do, then for the second with W 0 due: a gap of 1.5 is
    half of a W of 3.
    """
    costs = Costs([1, 1], [1, 2.5], [3, 3])
    draft = PlanDraft.of(timetable("1f1b", 2, 2), "I")
    filler = Filler(costs, {0: 0, 1: 1}, 2, [float("inf")] * 2)

    def first(fit: float) -> str:
        filled = filler.fill(draft, fit, (0, 0))
        assert filled is not None
        table, begin, end = filled
        found = simulate(table, costs)
        assert begin == [start[0] for start in found.start] and end == [stop[-1] for stop in found.stop]
        return " ".join(f"{kind}{m}" for kind, _, m in table[0])

    # F0 F1, I0 from 4.5 to 5.5; the gradient of microbatch 1 is there at 8.
    assert first(0.5) == first(0.8) == "F0 F1 I0 W0 I1 W1"
    assert first(0.9) == "F0 F1 I0 I1 W0 W1"


def test_refused() -> None:
    with pytest.raises(ConfigError, match="costs: 5 stages cannot be the same number on each of 2 ranks"):
        auto(2, 4, uniform(5), 10)
    with pytest.raises(ConfigError, match="norm: 'never' is not legal"):
        auto(2, 4, uniform(2), 10, "never")
    with pytest.raises(ConfigError, match="microbatches: 0 is not legal"):
        auto(2, 0, uniform(2), 10)
