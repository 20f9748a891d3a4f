"""The optimizer LAMB, as :mod:`torch.optim` would have it."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.runtime.by_tensor import ByTensor


class Lamb(ByTensor):
    """The update of Adam, with weight decay added, takes each tensor as far as its norm says (You et al. 2020, arXiv
    1904.00962, algorithm 2, with the identity for the function of the norm).

    Args:
        params: Tensors of any shape, or groups of them.
        lr: The learning rate; a tensor moves by this share of its norm, or by its own if the update or the tensor is 0.
        betas: How much of the averages of gradients and of their squares each step keeps; both begin with 0 and are
            divided by what is missing to 1.
        eps: What is added to the divisor.
        weight_decay: The share of a tensor that is added to its update.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        mean, square, (keep, keep_square) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        mean.lerp_(param.grad, 1 - keep)
        square.mul_(keep_square).addcmul_(param.grad, param.grad, value=1 - keep_square)
        step = float(state["step"])
        update = (square / (1 - keep_square**step)).sqrt_().add_(group["eps"])
        torch.div(mean, update, out=update)
        update.div_(1 - keep**step)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        norm, length = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        trust = torch.where((norm > 0) & (length > 0), norm / length, torch.ones_like(norm))
        param.sub_(update.mul_(trust * group["lr"]))
