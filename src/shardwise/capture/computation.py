"""What a user's own loop computes with its model up to ``backward``, in place of one call of the model and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn


class Computation(ABC):
    """It stands where a loss function does, and calls the model itself: once, several times, or not with its fields."""

    @abstractmethod
    def run(self, module: nn.Module, fields: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the scalar loss of a batch, and after it the values that the loop wants to see."""

    @abstractmethod
    def bare(self) -> Computation:
        """Return the same without the values that the loop wants to see."""
