"""Sizes of what calls return, as runs of them show them."""

import pytest
import torch

from shardwise.capture.call_sizes import Line, Size, evaluated, following, in_runs

ROWS, OTHER, LONGER = (6, 5), (4, 5), (6, 9)  # of what is given in three runs


@pytest.mark.parametrize(
    ("found", "size"),
    [
        ((3, 3, 3), 3),
        ((6, 4, 6), Line(0, 0, 1, 0)),
        ((5, 5, 9), Line(0, 1, 1, 0)),
        ((11, 7, 11), Line(0, 0, 2, -1)),
        ((12, 12, 20), Line(0, 1, 2, 2)),
        ((30, 20, 54), None),  # of both
        ((3, 3, 5), None),  # every second place
        ((6, 4, 5), None),
    ],
)
def test_a_size_follows_from_one_that_is_given(found: tuple[int, ...], size: Size | None) -> None:
    (taken,) = in_runs([[torch.zeros(shape), "no tensor"] for shape in (ROWS, OTHER, LONGER)])
    assert taken == ((6, 4, 6), (5, 5, 9))
    assert following(found, [taken]) == size
    if size is not None:
        runs = zip(found, (ROWS, OTHER, LONGER), strict=True)
        assert all(evaluated(size, [torch.zeros(shape)]) == one for one, shape in runs)


def test_of_several_sizes_the_nearest_says_it() -> None:
    taken = [((8, 6, 8),), ((6, 4, 6),), ((3, 3, 3),)]
    assert following((6, 4, 6), taken) == Line(1, 0, 1, 0)
    assert following((7, 5, 7), taken) in (Line(0, 0, 1, -1), Line(1, 0, 1, 1))
