"""What our own optimizers have in common: each updates one tensor after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ByTensor(torch.optim.Optimizer):
    """An optimizer whose step is an update of each parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    @abstractmethod
    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter with the hyperparameters of its group."""
