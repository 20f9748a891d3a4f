"""A few cases of a product in which its columns still meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Case = TypeVar("Case", bound=tuple[Any, ...])


def covering(cases: Sequence[Case], columns: Callable[[Case], tuple[Any, ...]] = tuple) -> Iterator[Case]:
    """Those in which every pair of values of any two columns occurs: greedily, the case with most new pairs first."""
    pairs = {case: set(itertools.combinations(enumerate(columns(case)), 2)) for case in cases}
    left = set().union(*pairs.values())
    while left:
        best = max(cases, key=lambda case: len(left & pairs[case]))
        left -= pairs[best]
        yield best
