"""Programs of one rank whose every backward is in two parts, the second at any legal place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from shardwise.core.timetable import Task
from shardwise.lower.compute import Compute

Key = Callable[[int, int], tuple[int, ...]]
"""(microbatch, number of microbatches) → after which microbatch the second part comes; ties are broken by what follows.
"""

ORDERS: dict[str, Key] = {
    "at once": lambda m, number: (m,),
    "a microbatch later": lambda m, number: (m + 1,),
    "two microbatches later": lambda m, number: (m + 2,),
    "at the end": lambda m, number: (number, m),
    "at the end, backwards": lambda m, number: (number, -m),
}


def ordered(microbatches: int, order: str) -> list[Task]:
    """1F1B of one stage, with W where ``order`` has it."""
    keyed = [
        ((m, -microbatches - 2, at), Task(kind, 0, m)) for m in range(microbatches) for at, kind in enumerate("FI")
    ]
    keyed += [((*ORDERS[order](m, microbatches), 0)[:3], Task("W", 0, m)) for m in range(microbatches)]
    return [task for _, task in sorted(keyed)]


@contextmanager
def split(order: str) -> Iterator[None]:
    """Programs that are lowered meanwhile have their backwards in two parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compute, "groups", lambda self: [(task,) for task in ordered(self.plan.microbatches, order)])
        yield
