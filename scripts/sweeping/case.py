"""A model of the sweep: its name, and what makes it with its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS = (7, 5)
"""The rows of the two batches: neither can be divided evenly by 2 ranks or 2 microbatches."""
WORDS, LENGTH, LABELS = 120, 12, 3
SAMPLES = 4000  # of a wave
Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]


@dataclass
class Case:
    """A module in training mode, a batch for each step, and a loss function if the module returns none itself.

    ``weight`` is what a user would say of the loss (``model.loss_weight``) where a trial of the module cannot tell."""

    module: nn.Module
    batches: list[dict[str, Tensor]]
    loss: Loss | None = None
    weight: str | None = None


@dataclass(frozen=True)
class Entry:
    """A model of ``family`` with a ``head``, both by the library's names; ``make`` builds it with its batches."""

    library: str
    family: str
    head: str
    make: Callable[[], Case]
    turn: int = 0  # models of an earlier turn are tried first

    @property
    def name(self) -> str:
        """The name in results: ``transformers/bert/masked``."""
        return f"{self.library}/{self.family}/{self.head}"


class Draws:
    """What batches are drawn from: a generator of their own, so that each batch of a model is always the same."""

    def __init__(self, seed: int, rows: int) -> None:
        self.generator, self.rows = torch.Generator().manual_seed(seed), rows

    def numbers(self, *shape: int) -> Tensor:
        """Return normal numbers, of shape (rows, \\*shape)."""
        return torch.randn(self.rows, *shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers of [0, 1), of shape (rows, \\*shape)."""
        return torch.rand(self.rows, *shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return integers of [low, high), of shape (rows, \\*shape)."""
        return torch.randint(low, high, (self.rows, *shape), generator=self.generator)

    def padding(self, length: int) -> Tensor:
        """Return a mask of shape (rows, length) whose rows end at unequal lengths: 1 is a token, 0 padding at the
        right."""
        lengths = torch.tensor([length - (2 * row) % (length // 2 + 1) for row in range(self.rows)])
        return (torch.arange(length) < lengths[:, None]).long()

    def targets(self, high: int, length: int, mask: Tensor | None = None) -> Tensor:
        """Return classes of shape (rows, length) in which each row ignores (-100) another number of positions, and all
        that ``mask`` says are padding."""
        found = self.integers(0, high, length)
        for row in range(self.rows):
            found[row, : (3 * row) % (length // 2 + 1)] = -100
        return found if mask is None else found.masked_fill(mask == 0, -100)


def batches(make: Callable[[Draws], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the batches of a trial; ``make`` gives one."""
    return [make(Draws(11 + step, rows)) for step, rows in enumerate(ROWS)]
