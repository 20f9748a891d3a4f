"""A few cases of a product in which its columns still meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Case = TypeVar("Case", bound=tuple[Any, ...])


def covering(
    cases: Sequence[Case],
    columns: Callable[[Case], tuple[Any, ...]] = tuple,
    strength: int = 2,
    begun: Iterable[Case] = (),
) -> Iterator[Case]:
    """Those in which any ``strength`` columns have every combination of values that some case has: ``begun``, then greedily the case with
    most new ones."""
    found = {case: set(itertools.combinations(enumerate(columns(case)), strength)) for case in cases}
    left = set().union(*found.values())
    for case in begun:
        left -= found[case]
        yield case
    while left:
        best = max(cases, key=lambda case: len(left & found[case]))
        left -= found[best]
        yield best
