"""Data parallelism's table: which collectives sum a gradient, and when."""

from __future__ import annotations

import pytest

from shardwise.core.flat import FlatBuffer
from shardwise.core.plan import ParameterRule, Plan
from shardwise.parallel.data import ZERO, Reduction, data_parallel, held_range, placement, reductions
from shardwise.parallel.tensor import tensor_parallel

TABLE: list[tuple[int, int, int, tuple[str, ...], str, str]] = [
    # ranks, ZeRO, replicas, other axes over which it is a partial sum: after each microbatch, and once a step
    (4, 0, 1, (), "", "sum dp"),
    (4, 1, 1, (), "", "scatter dp"),
    (4, 2, 1, (), "scatter dp", ""),
    (4, 3, 1, (), "scatter dp", ""),
    (4, 0, 2, (), "", "sum dp,dp_replicate"),
    (4, 1, 2, (), "", "scatter dp; sum dp_replicate"),
    (4, 2, 2, (), "scatter dp", "sum dp_replicate"),
    (4, 3, 4, (), "", "sum dp_replicate"),  # a shard of one part is the whole
    (1, 3, 1, (), "", ""),
    (2, 0, 1, ("tp",), "", "sum dp,tp"),
    (2, 1, 1, ("tp",), "", "scatter dp; sum tp"),
    (2, 3, 1, ("tp",), "scatter dp", "sum tp"),
    (1, 2, 1, ("tp",), "", "sum tp"),
]


def told(found: tuple[Reduction, ...]) -> str:
    return "; ".join(f"{'scatter' if one.scatters else 'sum'} {','.join(one.axes)}" for one in found)


@pytest.mark.parametrize(("ranks", "zero", "replicas", "summed", "each", "once"), TABLE)
def test_reductions(ranks: int, zero: int, replicas: int, summed: tuple[str, ...], each: str, once: str) -> None:
    plan = tensor_parallel(Plan.of(), 2, "1d") if summed else Plan.of()
    plan = data_parallel(plan, ranks, zero=zero, replicas=replicas)
    found = reductions(plan.mesh, placement(plan, "any"), summed)
    assert tuple(map(told, found)) == (each, once)


@pytest.mark.parametrize("rule", ZERO, ids=("ddp", "zero-1", "zero-2", "zero-3"))
@pytest.mark.parametrize("learns", [True, False])
def test_ranges_follow_each_other_as_ranks_do(rule: ParameterRule, learns: bool) -> None:
    """A gather lays what ranks have end to end in their order, and a scatter gives them the parts in that order."""
    layout = FlatBuffer((), numel=48, itemsize=4, segments=(), align=16)
    ranges = [held_range(rule, layout, 3, index, learns) for index in range(3)]
    if (rule.state if learns else rule.rest) == "S":
        assert [(one.start, one.stop) for one in ranges] == [(0, 16), (16, 32), (32, 48)]
    else:
        assert [(one.start, one.stop) for one in ranges] == [(0, 48)] * 3
