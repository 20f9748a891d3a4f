"""Find what a config leaves to be chosen by the free memory: how long parameters stay gathered, and how often gradients
are reduced.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from shardwise.config import Config, build_plan
from shardwise.core.plan import CHOICES, Plan
from shardwise.parallel.data import shard_axes

OPEN = ("gathered", "reduced")
"""The fields of a plan that a config may leave open."""
COMBINATIONS: tuple[tuple[str, ...], ...] = tuple(itertools.product(*(tuple(reversed(CHOICES[key])) for key in OPEN)))
"""The combinations of their values; those that communicate least, and need most memory, come first."""


class EarlierChoice(NamedTuple):
    """This is what an earlier start of a run chose by its free memory: the index of one of :data:`COMBINATIONS`, and
    the bytes that the solver of tensor plans could use (0: no limit)."""

    way: int
    tensor_bytes: int

    @staticmethod
    def of(plan: Plan) -> EarlierChoice:
        """Return the choices in ``plan``."""
        return EarlierChoice(COMBINATIONS.index((plan.data.gathered, plan.data.reduced)), plan.tensor.bytes)


def left_open(config: Config) -> tuple[str, ...]:
    """Return which of ``gathered`` and ``reduced`` matter for the plan of ``config`` and have no value in it."""
    plan, parallel = build_plan(config), config.parallel
    rules = plan.data.parameters if shard_axes(plan.mesh) else ()
    gathers = any(rule.rest == "S" for rule in rules)
    reduces = any(rule.grad == "S" for rule in rules) and plan.microbatches > 1
    meant = {"gathered": gathers and parallel.gathered is None, "reduced": reduces and parallel.reduced is None}
    return tuple(key for key, is_open in meant.items() if is_open)
