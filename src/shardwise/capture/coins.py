"""Random numbers that forward may read in Python: those that are drawn once for all rows (the chance of LayerDrop).

They are keyed by the seed, the step and their ordinal as all others are, so that every rank knows them before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.capture.intercept import Proceed
from shardwise.capture.keyed_calls import KeyedRandom
from shardwise.core.errors import ShardwiseError
from shardwise.graph.torch_private import without_modes, without_torch_functions

UNIFORM = ("rand", "rand_like")
EVEN = 0.5
"""What uniform numbers are before the first step: chances to leave something out are smaller, so all is there."""

FUNCTIONS: Mapping[str, Any] = {
    one.__name__: one for one in (
        torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli,
    )
}  # fmt: skip
"""The functions whose draws may be read, by the names of their ops."""


class Drawing(NamedTuple):
    """The key of the random numbers of a step."""

    seed: int
    step: int


def for_all_rows(shape: Sequence[Any], rows: int | None) -> bool:
    """Whether a tensor of this shape is drawn once for all of ``rows`` rows; None says that their number is a symbol in
    sizes."""
    known = all(isinstance(size, int) for size in shape)
    return known and (rows is None or all(size % rows for size in shape))


def drawn(drawing: Drawing | None, ordinal: int, name: str, *args: Any, **kwargs: Any) -> Tensor:
    """Return what the random call ``ordinal`` of a forward, that of the function of this ``name``, draws for all rows;
    before the first step, without a ``drawing``, uniform numbers are :data:`EVEN`."""
    keyed = KeyedRandom(0 if drawing is None else drawing.seed)
    keyed.begin(0 if drawing is None else drawing.step, 0, ordinal=ordinal)
    found: Tensor = keyed(FUNCTIONS[name], args, kwargs, _refuse)
    return found.fill_(EVEN) if drawing is None and name in UNIFORM else found


def _refuse(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    raise ShardwiseError(f"{func} draws nothing that is keyed")


class Coins:
    """A layer of :class:`~shardwise.capture.intercept.Intercept` that counts draws, and hands what is ``drawn`` for all
    rows to ``take`` with the result that stands for it; ``value`` returns the value of an argument, None if it has
    none."""

    def __init__(
        self, drawing: Drawing | None, rows: int, value: Callable[[Any], Any], take: Callable[[Tensor, Tensor], None]
    ) -> None:
        self.drawing, self.rows, self.value, self.take = drawing, rows, value, take
        self._keyed, self._ordinal = KeyedRandom(0), 0

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if not self._keyed.counts(func, args, kwargs):
            return proceed(func, args, kwargs)
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        result = proceed(func, args, kwargs)
        given = [self.value(one) for one in args]
        known = not any(one is None for one in given)
        if known and func in FUNCTIONS.values() and for_all_rows(result.shape, self.rows):
            with without_modes(), without_torch_functions():
                value = drawn(self.drawing, ordinal, func.__name__, *given, **kwargs)
            self.take(result, value)
        return result
