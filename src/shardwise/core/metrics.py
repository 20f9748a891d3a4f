"""The names of metrics, and which of two values is the better one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

LOSS = "validation_loss"
PERPLEXITY = "perplexity"
READY = ("accuracy", "top-K (such as top-5)", PERPLEXITY, "f1", "f1-binary")
"""The metrics that need no function of the user, in words."""

_READY = re.compile(r"accuracy|top-[1-9]\d*|perplexity|f1|f1-binary", re.ASCII)
_LESS = (LOSS, PERPLEXITY)
RESERVED = ("step", "rows", "seconds", LOSS)
"""What else an evaluation has under a name of its own."""

Goal = Literal["max", "min"]


def is_ready(name: str) -> bool:
    """Return whether ``name`` is that of a ready-made metric."""
    return bool(_READY.fullmatch(name))


def top(name: str) -> int:
    """Return K of the metric ``top-K``; 1 for ``accuracy``."""
    return int(name.partition("-")[2]) if name.startswith("top-") else 1


def goal_of(name: str, given: Goal | None = None) -> Goal:
    """Return whether more of a metric is better: as ``given``, else less of the loss and of perplexity, and more of any
    other."""
    return given or ("min" if name in _LESS else "max")


@dataclass(frozen=True)
class Watch:
    """A metric by which evaluations are compared."""

    metric: str
    goal: Goal

    def better(self, one: Any, other: Any) -> bool:
        """Return whether value ``one`` is better than ``other``; what is no finite number is worse than any number."""
        if not _number(one):
            return False
        return not _number(other) or (one > other if self.goal == "max" else one < other)

    def best(self, evaluations: Sequence[dict[str, Any]]) -> int | None:
        """Return the place of the best of some evaluations, the earliest of equal ones; None where none has a
        number."""
        found: int | None = None
        for place, one in enumerate(evaluations):
            if self.better(one.get(self.metric), None if found is None else evaluations[found].get(self.metric)):
                found = place
        return found

    def without_gain(self, evaluations: Sequence[dict[str, Any]]) -> int:
        """Return the number of evaluations since the best one."""
        found = self.best(evaluations)
        return len(evaluations) if found is None else len(evaluations) - 1 - found


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
