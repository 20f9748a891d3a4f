"""Keyed permutations and weighted choices: their chances, and what torch would refuse."""

import itertools
from collections import Counter

import pytest
import torch

from shardwise.core.errors import ShardwiseError
from shardwise.ops.keyed_choices import keyed_multinomial, keyed_permutation

ROWS = 24_000


def test_all_permutations_are_as_likely() -> None:
    counted = Counter(tuple(keyed_permutation(1, 2, 3, 3, row).tolist()) for row in range(3000))
    assert set(counted) == set(itertools.permutations(range(3)))
    assert max(abs(number - 500) for number in counted.values()) < 5 * 500**0.5
    assert keyed_permutation(1, 2, 3, 0).tolist() == []
    assert keyed_permutation(1, 2, 3, 5, dtype=torch.int32).dtype is torch.int32


@pytest.mark.parametrize("replacement", [False, True])
def test_choices_have_the_chances_of_their_weights(replacement: bool) -> None:
    """The second of two without replacement has the chance that is left when the first is gone."""
    weights = torch.tensor([3.0, 0.0, 1.0, 4.0, 0.0])
    drawn = keyed_multinomial(weights.expand(ROWS, 5), 2, replacement, 1, 2, 3, (0, 1))
    counted = Counter(map(tuple, drawn.tolist()))
    for first, second in itertools.product(range(5), repeat=2):
        left = weights.clone()
        left[first] *= replacement
        chance = float(weights[first] / weights.sum() * left[second] / left.sum())
        assert abs(counted[first, second] - ROWS * chance) <= 5 * (ROWS * chance * (1 - chance)) ** 0.5


@pytest.mark.parametrize("replacement", [False, True])
def test_a_part_of_the_rows_has_their_choices(replacement: bool) -> None:
    weights = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    whole = keyed_multinomial(weights, 3, replacement, 1, 2, 3, (0, 1))
    assert torch.equal(keyed_multinomial(weights[4:], 3, replacement, 1, 2, 3, (0, 1), 4), whole[4:])
    assert torch.equal(keyed_multinomial(weights[5], 3, replacement, 1, 2, 3, None, 5), whole[5])


@pytest.mark.parametrize(
    ("weights", "number", "replacement"),
    [
        ([0.5, -0.1], 1, True),
        ([0.5, float("nan")], 1, True),
        ([0.5, float("inf")], 1, False),
        ([0.0, 0.0], 1, True),
        ([0.5, 0.5], 3, False),
        ([0.5, 0.5], 0, True),
    ],
)
def test_what_torch_refuses(weights: list[float], number: int, replacement: bool) -> None:
    with pytest.raises(RuntimeError):
        torch.multinomial(torch.tensor(weights), number, replacement)
    with pytest.raises(ShardwiseError, match="torch.multinomial of .*; legal: "):
        keyed_multinomial(torch.tensor(weights), number, replacement, 1, 2, 3)
