"""The search for the nearest plan that fits: the cheapest of all that do, among legal ones only."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from shardwise.estimate.fit import Changes, FitChoices, nearest

NOW = FitChoices(batch_size=16, dp=4, gathered="step")
SHRINKS = {
    "parallel.microbatches": {1: 1.0, 2: 0.6, 4: 0.45},
    "parallel.recompute": {"none": 1.0, "selective": 0.7, "full": 0.3},
    "parallel.zero": {0: 1.0, 1: 0.7, 2: 0.6, 3: 0.3},
    "parallel.gathered": {"step": 1.0, "forward": 0.9, "use": 0.8},
    "parallel.offload": {"none": 1.0, "optimizer": 0.5},
}
COSTS = {
    "parallel.microbatches": {1: 0, 2: 8, 4: 16},
    "parallel.recompute": {"none": 0, "selective": 6, "full": 33},
    "parallel.zero": {0: 0, 1: 1, 2: 3, 3: 12},
    "parallel.gathered": {"step": 0, "forward": 5, "use": 10},
    "parallel.offload": {"none": 0, "optimizer": 100},
}  # fmt: skip


def falling(weights: dict[str, float]) -> Any:
    """A peak that every change lowers, each key's part by itself."""

    def peak(changes: Changes) -> int:
        size = sum(weights[k] * table[changes.get(k, next(iter(table)))] for k, table in SHRINKS.items())
        size *= 0.5 if changes.get("parallel.precision") == "bf16" else 1.0
        return int(size * (4 / changes.get("parallel.dp", 4)) ** 2)

    return peak


def every(keys: Any) -> list[dict[str, Any]]:
    tables = [[(k, v) for v in SHRINKS[k]] for k in keys]
    return [{k: v for k, v in one if v != next(iter(SHRINKS[k]))} for one in itertools.product(*tables)]


def cost(changes: Changes) -> float:
    return sum(COSTS[k][v] for k, v in changes.items())


@pytest.mark.parametrize("seed", range(8))
def test_no_other_plan_is_nearer(seed: int) -> None:
    """Against all plans on the same devices in the same precision, with random shares of what each key lowers."""
    drawn = random.Random(seed)
    weights = {k: drawn.uniform(10, 1000) for k in SHRINKS}
    peak = falling(weights)
    plans = every(SHRINKS)
    low = min(map(peak, plans))
    for share in (0.02, 0.3, 0.6, 0.9):
        budget = int(low + share * (peak({}) - low))
        found = nearest(NOW, budget, peak)
        assert found.changes is not None and found.peak == peak(found.changes) <= budget
        fitting = [one for one in plans if peak(one) <= budget]
        assert cost(found.changes) == min(map(cost, fitting))
        assert found.least == low


def test_what_changes_numbers_or_needs_devices_comes_last() -> None:
    peak = falling(dict.fromkeys(SHRINKS, 100.0))
    low = min(map(peak, every(SHRINKS)))
    assert "parallel.precision" not in (nearest(NOW, low, peak).changes or {})
    less = nearest(NOW, low - 1, peak).changes
    assert less is not None and less["parallel.precision"] == "bf16" and "parallel.dp" not in less
    fewer = nearest(NOW, low // 2 - 1, peak).changes
    assert fewer is not None and fewer["parallel.dp"] == 8 and "parallel.precision" not in fewer


def test_only_legal_plans_are_tried() -> None:
    asked: list[Changes] = []

    def peak(changes: Changes) -> int:
        asked.append(dict(changes))
        return 10**6

    found = nearest(FitChoices(batch_size=12, dp=1, recompute="selective", precision="fp16", kind="cpu"), 1, peak)
    assert found.changes is None and found.least == 10**6
    for one in asked:
        dp, m = one.get("parallel.dp", 1), one.get("parallel.microbatches", 1)
        assert 12 % (dp * m) == 0 and (dp > 1 or "parallel.zero" not in one)
        assert not {"parallel.offload", "parallel.gathered", "parallel.precision"} & set(
            one
        )  # no host, not set, low already
        assert one.get("parallel.recompute", "full") == "full"
    assert {one.get("parallel.dp", 1) for one in asked} == {1, 2, 4}
    assert len(asked) == len({tuple(sorted(one.items())) for one in asked})  # each once


def test_a_change_that_needs_more_does_not_hide_a_plan_that_fits() -> None:
    """Of a model of two units ZeRO-3's slots are larger than what it shards."""

    def peak(changes: Changes) -> int:
        return {0: 100, 1: 60, 2: 50, 3: 120}[changes.get("parallel.zero", 0)] + changes.get("parallel.microbatches", 1)

    found = nearest(FitChoices(batch_size=4, dp=4), 55, peak)
    assert found == ({"parallel.zero": 2}, 51, 51, {"parallel.zero": 2})
    assert nearest(FitChoices(batch_size=4, dp=4), 20, peak).least == 51


def test_a_search_asks_for_few_of_all_plans() -> None:
    calls = []
    peak = falling(dict.fromkeys(SHRINKS, 100.0))
    nearest(NOW, 300, lambda changes: calls.append(changes) or peak(changes))
    assert len(calls) < len(every(SHRINKS)) / 3


def test_layers_are_shared_before_numbers_change_or_devices_are_added() -> None:
    """By ranks that there are, as long as they fit onto a host; and not where the model cannot be sharded."""
    asked: list[Changes] = []

    def peak(changes: Changes) -> int:
        asked.append(changes)
        half = 0.5 if changes.get("parallel.precision") == "bf16" else 1
        return int(10**6 * half / changes.get("parallel.tp", 1))

    now = FitChoices(batch_size=32, dp=16, zero=3, recompute="full", kind="cpu", tp=1)
    found = nearest(now, 3 * 10**5, peak)
    assert found.changes == {"parallel.dp": 4, "parallel.tp": 4}
    found = nearest(now, 10**5, peak)
    assert found.changes == {"parallel.dp": 2, "parallel.tp": 8, "parallel.precision": "bf16"}
    assert max(one.get("parallel.tp", 1) for one in asked) == 8
    assert {one.get("parallel.dp", 16) * one.get("parallel.tp", 1) for one in asked} == {16}
    asked.clear()
    assert nearest(replace(now, tp=None), 10**5, peak).changes is None
    assert not any("parallel.tp" in one for one in asked)
