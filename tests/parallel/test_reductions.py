"""Data parallelism's table: which collectives sum a gradient, and when."""

from __future__ import annotations

import pytest

from shardwise.core.plan import Plan
from shardwise.parallel.data import Reduction, data_parallel, placement, reductions
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
