"""The sample order is a permutation, keyed by seed and epoch, the same in whatever pieces it is asked for."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.order import sample_order

SEEDS = st.integers(0, 2**63 - 1)


@settings(deadline=None)
@given(SEEDS, st.integers(0, 10**6), st.integers(1, 3000))
def test_it_is_a_permutation(seed: int, epoch: int, size: int) -> None:
    order = sample_order(seed, epoch, 0, size, size)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 255, 257, 4095, 4097, 65537])
def test_sizes_around_the_powers_of_two(size: int) -> None:
    assert np.array_equal(np.sort(sample_order(7, 0, 0, size, size)), np.arange(size))


@settings(deadline=None)
@given(SEEDS, st.integers(1, 500), st.data())
def test_pieces_give_the_whole(seed: int, size: int, data: st.DataObject) -> None:
    whole = sample_order(seed, 3, 0, size, size)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert np.array_equal(sample_order(seed, 3, start, stop, size), whole[start:stop])


def test_a_huge_epoch_is_not_kept_in_memory() -> None:
    size = 10**15 + 37
    order = sample_order(1, 0, size - 1000, size, size)
    assert len(set(order.tolist())) == 1000
    assert order.min() >= 0
    assert order.max() < size
    assert abs(order.mean() / size - 0.5) < 0.05


def test_seed_and_epoch_change_it() -> None:
    orders = {(s, e): tuple(sample_order(s, e, 0, 200, 200)) for s in (0, 1, 2**40, 2**63 - 1) for e in (0, 1, 2)}
    assert len(set(orders.values())) == len(orders)
    # (1, 0) and (0, 1) must not be mixed up, nor any two agree in more places than chance has it (1 of 200).
    for one, other in combinations(orders.values(), 2):
        assert np.sum(np.array(one) == np.array(other)) < 12


@pytest.mark.slow
@pytest.mark.parametrize("size", [37, 64, 100])
def test_every_place_is_as_likely(size: int) -> None:
    seeds = 3000
    counts = np.zeros((size, size))
    for seed in range(seeds):
        counts[np.arange(size), sample_order(seed, 0, 0, size, size)] += 1
    expected = seeds / size
    freedom = (size - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)


def test_neighbours_are_torn_apart() -> None:
    order = sample_order(0, 0, 0, 10_000, 10_000)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.03
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001
    assert np.abs(np.diff(order)).mean() == pytest.approx(10_000 / 3, rel=0.05)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_places_outside_the_epoch(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not inside"):
        sample_order(0, 0, start, stop, 10)
