"""The fewest seconds within a limit of bytes: against all values, of random tables."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from sums import total

from shardwise.shard.solver.memory_limit import BYTES, EXACT, SECONDS, Objective, fewest
from shardwise.shard.solver.variable_elimination import CostFactor

PRICES = (SECONDS, BYTES, Objective(1.0, 0.5), Objective(1.0, 3.0))


def drawn(draw: random.Random) -> tuple[list[int], list[CostFactor]]:
    """Up to 3 equal blocks in a chain, of up to 3 variables of up to 3 values each; some elements infinite."""
    numbers = np.random.default_rng(draw.randrange(1 << 30))
    inside, blocks = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))], draw.randint(1, 3)

    def table(*shape: int) -> object:
        found = numbers.random(shape) * 9 + 1j * numbers.integers(0, 9, shape)
        return np.where(numbers.random(shape) < 0.1, np.inf, found) if found.size > 1 else found

    factors = [CostFactor((), table())]
    for count in range(draw.randint(1, 6)):
        variables = draw.sample(range(len(inside)), draw.randint(1, len(inside)))
        ahead = draw.random() < 0.5 and count > 0
        alike = table(*(inside[v] for v in variables), *([inside[0]] * ahead))
        for block in range(blocks - ahead):
            own = tuple(v + block * len(inside) for v in variables)
            factors.append(CostFactor((*own, (block + 1) * len(inside)) if ahead else own, alike))
    return inside * blocks, factors


@pytest.mark.quick(40)
@pytest.mark.parametrize("seed", range(150))
def test_no_values_within_the_limit_take_fewer_seconds(seed: int) -> None:
    """However few sums are kept, the bound is true; where enough are, it is what was found."""
    draw = random.Random(seed)
    sizes, factors = drawn(draw)
    every = [total(factors, values) for values in itertools.product(*map(range, sizes))]
    every = [one for one in every if np.isfinite(one)]
    limits = [draw.randint(0, int(one.imag) + 2) for one in draw.sample(every, min(3, len(every)))]
    for limit in limits:
        truth = min((one.real for one in every if one.imag <= limit), default=np.inf)
        known = draw.choice([90.0 * len(factors), truth if np.isfinite(truth) else 40.0, draw.uniform(0, 60)])
        prices = draw.sample(PRICES, draw.randint(1, len(PRICES)))
        for most in ((1,), (2, 4), (1 << 8,)):
            values, bound = fewest(sizes, factors, limit, known, prices, most)
            assert bound <= min(truth, known) * (1 + EXACT)
            if values is not None:
                cost = total(factors, values)
                assert cost.imag <= limit and truth * (1 - EXACT) <= cost.real < known
        assert bound == pytest.approx(min(truth, known), rel=EXACT)
        assert (values is not None) or truth >= known * (1 - 2 * EXACT)


def test_equal_blocks_are_told_apart_only_by_number() -> None:
    """Of 40 equal blocks each is fast or small: half of them small, whichever, and no more than one sum for each number
    of them.
    """
    own = np.array([1 + 10j, 2 + 4j, 1.6 + 8j])
    side = np.array(
        [[0, 0.25, 0.25], [0.25, 0, 0.25], [0.25, 0.25, 0]], complex
    )  # blocks that differ from the one before take longer
    factors = [CostFactor((i,), own) for i in range(40)] + [CostFactor((i, i + 1), side) for i in range(39)]
    found = fewest([3] * 40, factors, 40 * 7, 1e3, [SECONDS, Objective(1.0, 1 / 6)], (200,))
    assert found.values is not None
    cost = total(factors, found.values)
    assert cost == 20 * (1 + 10j) + 20 * (2 + 4j) + 0.25
    assert found.bound == pytest.approx(cost.real, rel=EXACT)
