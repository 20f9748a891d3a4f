"""The optimizer Lion, as :mod:`torch.optim` would have it."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.runtime.by_tensor import ByTensor


class Lion(ByTensor):
    """Each element moves by the learning rate, in the direction of the sign of an average of its gradients (Chen et al.
    2023, arXiv 2302.06675, algorithm 2).

    Args:
        params: Tensors of any shape, or groups of them.
        lr: The learning rate.
        betas: The share of the average in the direction, and the share of it that is kept for the next step.
        weight_decay: The share of a parameter, times the learning rate, that is taken off; it is decoupled, as AdamW's.
        foreach: It must be false; it is there because torch's optimizers have it.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
        *, foreach: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        average, (direct, keep) = state["exp_avg"], group["betas"]
        if group["weight_decay"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(average.lerp(param.grad, 1 - direct).sign_(), alpha=-group["lr"])
        average.lerp_(param.grad, 1 - keep)
