"""The sums that elimination finds the least of, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.shard.solver.variable_elimination import CostFactor


def total(factors: Iterable[CostFactor], values: Sequence[int]) -> Any:
    """Of tables at some values of their variables."""
    return sum(f.table[tuple(values[v] for v in f.variables)] for f in factors)
