"""Checks on values that depend on parameters: what a forward reads in Python only to find that all is well.

Such a read stops a capture, for its answer is known in a step alone.  But where one device would stop with an error by
the other answer (``if not (high >= low).all(): raise``), or the check is for numbers that are not finite, the answer of
a healthy step is taken for granted, and each step makes sure of it (``ops/expected.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.capture.intercept import Proceed
from shardwise.capture.running import here

BRANCHES: frozenset[Any] = frozenset({
    Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose,
})  # fmt: skip
"""The functions of torch that read a truth value."""
SINGLE = BRANCHES & {Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero}

NUMBERS: frozenset[Any] = frozenset({
    Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__index__,
})  # fmt: skip
"""Those that read numbers; a capture keeps most of them as symbols."""

FINITE = frozenset({torch.isfinite, torch.isnan, torch.isinf, Tensor.isfinite, Tensor.isnan, Tensor.isinf})
OF_FINITE = frozenset({
    torch.all, torch.any, torch.logical_not, torch.logical_or, torch.logical_and, Tensor.all, Tensor.any,
    Tensor.logical_not, Tensor.logical_or, Tensor.logical_and, Tensor.__invert__, Tensor.__or__, Tensor.__and__,
})  # fmt: skip


class Check(NamedTuple):
    """A read of a truth value in a forward with values: its ``answer``, whether it asks for finite numbers, and where
    it stands."""

    answer: bool
    finite: bool
    place: str


class Noting:
    """A layer of :class:`~shardwise.capture.intercept.Intercept` that notes reads of truth values in a forward with
    values, and gives one of them, ``other``, the other answer; while ``paused`` it notes none."""

    def __init__(self, other: int | None = None) -> None:
        self.checks: list[Check] = []
        self.other, self.paused = other, False
        self._finite: dict[int, Tensor] = {}

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        found = proceed(func, args, kwargs)
        if self.paused:
            return found
        asks = func in FINITE or any(id(one) in self._finite for one in args if isinstance(one, Tensor))
        if func in BRANCHES:
            self.checks.append(Check(bool(found), asks, here()))
            return found ^ (self.other == len(self.checks) - 1)
        if isinstance(found, Tensor) and asks and (func in FINITE or func in OF_FINITE):
            self._finite[id(found)] = found  # an id means something as long as its tensor lives
        return found


def raises(forward: Callable[[Noting], None], number: int) -> bool:
    """Whether a forward raises where read ``number`` has the other answer."""
    try:
        forward(Noting(number))
    except KeyboardInterrupt:
        raise
    except BaseException:  # the user's code may raise anything, and end the process
        return True
    return False


__all__ = ["BRANCHES", "NUMBERS", "SINGLE", "Check", "Noting", "raises"]
