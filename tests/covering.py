"""A few cases of a product in which its columns still meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

Case = TypeVar("Case", bound=tuple[Any, ...])


def covering(
    cases: Sequence[Case],
    columns: Callable[[Case], tuple[Any, ...]] = tuple,
) -> Iterator[Case]:
    """Those in which any two columns have every pair of values that some case has: greedily, the case with most new
    ones next.
    """
    numbers: dict[Any, int] = {}  # of the pairs; sets of them are bits, which thousands of cases take
    found = [
        sum(1 << numbers.setdefault(pair, len(numbers)) for pair in itertools.combinations(enumerate(columns(case)), 2))
        for case in cases
    ]
    left = (1 << len(numbers)) - 1
    while left:
        best = max(range(len(cases)), key=lambda i: (left & found[i]).bit_count())
        left &= ~found[best]
        yield cases[best]


def few(cases: Sequence[Mapping[str, Any]], count: int) -> set[int]:
    """The indices of ``count`` cases with as many values as possible: each adds most new ones, and is far from those
    chosen before.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    chosen: list[int] = []
    seen: set[tuple[str, str]] = set()
    while len(chosen) < min(count, len(cases)):
        left = [i for i in range(len(cases)) if i not in chosen]
        best = max(left, key=lambda i: (len(values[i] - seen), min((abs(i - j) for j in chosen), default=0), -i))
        chosen.append(best)
        seen |= values[best]
    return set(chosen)
