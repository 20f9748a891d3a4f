"""A few cases of a product in which its columns still meet."""

from __future__ import annotations

import heapq
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
    # The number of new pairs of a case only falls, so those that were counted earlier are at least as many.
    most = [(-pairs.bit_count(), i) for i, pairs in enumerate(found)]
    heapq.heapify(most)
    while left:
        counted, best = most[0]
        new = (left & found[best]).bit_count()
        if new < -counted:
            heapq.heapreplace(most, (-new, best))
            continue
        left &= ~found[best]
        yield cases[best]


def few(cases: Sequence[Mapping[str, Any]], count: int) -> set[int]:
    """The indices of ``count`` cases with as many values as possible: each adds most new ones, and is far from those
    chosen before.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    chosen: set[int] = set()
    seen: set[tuple[str, str]] = set()
    near = [0] * len(cases)  # how far each case is from the nearest one that was chosen
    while len(chosen) < min(count, len(cases)):
        left = [i for i in range(len(cases)) if i not in chosen]
        best = max(left, key=lambda i: (len(values[i] - seen), near[i], -i))
        near = [min(n, abs(i - best)) if chosen else abs(i - best) for i, n in enumerate(near)]
        chosen.add(best)
        seen |= values[best]
    return chosen
