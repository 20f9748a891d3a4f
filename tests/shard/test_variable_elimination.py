"""Elimination finds the least sum: against all values, of random tables."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from sums import total

from shardwise.shard.solver.variable_elimination import CostFactor, Elimination, TooWide


def drawn(seed: int) -> tuple[list[int], list[CostFactor]]:
    """Up to 7 variables of up to 4 values, and factors of up to 4 of them, some of the tables shared, some elements
    infinite.
    """
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 7))]
    factors: list[CostFactor] = []
    for _ in range(draw.randint(0, 9)):
        variables = tuple(draw.sample(range(len(sizes)), draw.randint(0, min(4, len(sizes)))))
        shape = tuple(sizes[v] for v in variables)
        alike = [f.table for f in factors if f.table.shape == shape]
        table = draw.choice(alike) if alike and draw.random() < 0.5 else numbers.integers(0, 9, shape).astype(float)
        if draw.random() < 0.3 and table.size > 1:
            table = np.where(numbers.random(shape) < 0.2, np.inf, table)
        factors.append(CostFactor(variables, table))
    return sizes, factors


@pytest.mark.parametrize("seed", range(300))
def test_the_least_sum_is_that_of_all_values(seed: int) -> None:
    sizes, factors = drawn(seed)
    found = Elimination(sizes, factors).least()
    truth = min(total(factors, values) for values in itertools.product(*map(range, sizes)))
    assert found.total == truth == total(factors, found.values)
    assert Elimination(sizes, factors).least().values == found.values


@pytest.mark.parametrize("seed", range(300))
def test_through_every_element_goes_the_least_of_all_values(seed: int) -> None:
    """Of the variables of a kind: with its value, and the values of its neighbours, the least of everything; alike ones
    count together.
    """
    sizes, factors = drawn(seed)
    run = Elimination(sizes, factors)
    every = {values: total(factors, values) for values in itertools.product(*map(range, sizes))}
    truth = [np.full(kind.shape, np.inf) for kind in run.kinds]
    for one in run.eliminated:
        for values, cost in every.items():
            at = tuple(values[v] for v in (*one.neighbours, one.variable))
            truth[one.kind][at] = min(truth[one.kind][at], cost)
    truth[-1][:] = min(every.values())
    for found, right in zip(run.through(), truth, strict=True):
        np.testing.assert_array_equal(found, right)


def test_equal_blocks_cost_once() -> None:
    """A chain of blocks that share their tables: as many tables are made for 100 of them as for 5."""
    numbers = np.random.default_rng(0)
    side, pair = numbers.random((6, 6)), numbers.random((6, 6))

    def chain(blocks: int) -> list[CostFactor]:
        """In each block two variables hang on one of the chain."""
        return [
            factor
            for i in range(0, 3 * blocks, 3)
            for factor in (
                CostFactor((i, i + 1), side),
                CostFactor((i + 1, i + 2), side),
                *([CostFactor((i, i + 3), pair)] * (i < 3 * blocks - 3)),
            )
        ]

    few, many = (Elimination([6] * 3 * n, chain(n)).least() for n in (3, 100))
    assert few.largest == many.largest == 36
    small = Elimination([6] * 6, chain(2)).least()
    assert small.total == min(total(chain(2), values) for values in itertools.product(range(6), repeat=6))


def test_tables_have_a_limit() -> None:
    factors = [CostFactor((i, j), np.zeros((9, 9))) for i, j in itertools.combinations(range(6), 2)]
    assert Elimination([9] * 6, factors).least().largest == 9**6
    with pytest.raises(TooWide, match="531441 elements; limit: 1000"):
        Elimination([9] * 6, factors, limit=1000).least()
