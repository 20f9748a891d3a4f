"""Which random calls are those of a loop over rows, and what is refused beside them."""

from collections.abc import Callable

import pytest
import torch

from shardwise.capture.draws import Draw, batch_dims
from shardwise.capture.intercept import Intercept
from shardwise.capture.keyed_calls import KeyedRandom
from shardwise.core.errors import ConfigError

Forward = Callable[[int], object]


def drawing(forward: Forward) -> Callable[[int], list[Draw]]:
    def draws(rows: int) -> list[Draw]:
        random = KeyedRandom(1)
        random.begin(0, 0)
        with Intercept(random):
            forward(rows)
        return random.draws

    return draws


def results(forward: Forward, rows: int, start: int = 0, known: Forward | None = None) -> object:
    """Return what a forward of rows from ``start`` on gives, with keys that a trial of ``known`` has shown."""
    random = KeyedRandom(1, batch_dims(drawing(known or forward), (2,)))
    random.begin(0, start, rows)
    with Intercept(random):
        found = forward(rows)
    random.end()
    return found


def two_of_each(rows: int) -> list[tuple[list[int], list[int]]]:
    return [(torch.randperm(7).tolist(), torch.randperm(5).tolist()) for _ in range(rows)]


def one_loop_after_the_other(rows: int) -> list[tuple[list[int], list[int]]]:
    def permutation(n: int) -> list[int]:
        return torch.randperm(n).tolist()

    first = [permutation(7) for _ in range(rows)]
    second = [permutation(7) for _ in range(rows)]
    return list(zip(first, second, strict=True))


def around_others(rows: int) -> list[list[float]]:
    noise = torch.rand(rows, 2)
    some = [torch.randperm(4).tolist() for _ in range(rows)]
    return [[*a, *b, *c] for a, b, c in zip(noise.tolist(), some, torch.randn(rows, 2).tolist(), strict=True)]


@pytest.mark.parametrize("forward", [two_of_each, one_loop_after_the_other, around_others])
def test_a_part_of_the_rows_draws_what_is_theirs(forward: Forward) -> None:
    whole = results(forward, 6)
    assert isinstance(whole, list)
    assert results(forward, 2, 3) == whole[3:5]
    assert len({str(one) for one in whole}) == 6


def by_level(rows: int) -> None:
    for _ in range(3):
        for _ in range(rows):
            torch.randperm(5)


def of_all_rows_each(rows: int) -> None:
    for _ in range(rows):
        torch.rand(rows, 3)


def for_all_but_one(rows: int) -> None:
    for _ in range(rows - 1):
        torch.randperm(5)


@pytest.mark.parametrize("forward", [by_level, of_all_rows_each, for_all_but_one])
def test_calls_that_are_not_one_for_each_row_are_refused(forward: Forward) -> None:
    with pytest.raises(ConfigError, match="which random functions forward calls depends on the number of rows"):
        batch_dims(drawing(forward), (2,))


def for_each(rows: int, number: int | None = None) -> None:
    for _ in range(number or rows):
        torch.randperm(5)


@pytest.mark.parametrize("number", [3, 5])
def test_a_step_with_other_calls_stops(number: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"randperm.* is called {number} times in a loop over 4 rows; .*; legal: one"
    ):
        results(lambda rows: for_each(rows, number if rows == 4 else None), 4)


def test_a_permutation_of_the_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="randperm.* cannot be keyed by sample"):
        batch_dims(drawing(lambda rows: torch.randperm(rows)), (2,))
    with pytest.raises(ConfigError, match="multinomial.* cannot be keyed by sample"):
        batch_dims(drawing(lambda rows: torch.ones(8).multinomial(rows)), (2,))


def test_keys_say_which_call_is_for_which_row() -> None:
    draws = drawing(around_others)
    keys = batch_dims(draws, (2,))
    assert keys.calls == (("rand", (0, 1)), ("randperm", None), ("randn", (0, 1)))
    assert keys.assigned(draws(3)) == [(0, None), (1, 0), (1, 1), (1, 2), (2, None)]
