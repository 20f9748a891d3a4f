"""The optimizer Shampoo, as :mod:`torch.optim` would have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.core.optimizers import LARGEST
from shardwise.runtime.by_tensor import ByTensor


class Shampoo(ByTensor):
    """A gradient of k dims is multiplied on each dim by the power -1/(2k) of a matrix, the sum over all steps of what
    the gradient is times itself over the other dims (Gupta et al. 2018, arXiv 1802.09568, algorithm 2).

    Of a dim longer than ``LARGEST`` it takes the diagonal of that matrix, as the paper's section 3.3 has it.

    Args:
        params: Tensors of any shape, or groups of them; one without a dim counts as a vector of one element.
        lr: The learning rate.
        eps: This times the identity is added to the matrices.
        weight_decay: The share of a parameter, times the learning rate, that is taken off; it is decoupled, as AdamW's.
    """

    def __init__(self, params: Any, lr: float = 1e-1, eps: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[param], param.grad
        assert gradient is not None
        gradient = gradient.reshape(-1) if not gradient.dim() else gradient
        update, dims = gradient, gradient.dim()
        for dim, size in enumerate(gradient.shape):
            rows = gradient.movedim(dim, 0).reshape(size, -1)
            diagonal, key = size > LARGEST, f"factor_{dim}"
            if key not in state:
                state[key] = param.new_zeros((size,) if diagonal else (size, size))
            factor: Tensor = state[key]
            if diagonal:
                factor.add_(rows.square().sum(1))
                shape = [-1 if i == dim else 1 for i in range(dims)]
                update = update * (factor + group["eps"]).pow_(-1 / (2 * dims)).view(shape)
            else:
                factor.addmm_(rows, rows.T)
                power = _power(factor, group["eps"], -1 / (2 * dims))
                update = torch.tensordot(power, update, dims=([1], [dim])).movedim(0, dim)
        if group["weight_decay"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update.reshape(param.shape), alpha=-group["lr"])


def _power(matrix: Tensor, eps: float, exponent: float) -> Tensor:
    """Return a power of a symmetric matrix without negative eigenvalues, to which ``eps`` times the identity is
    added."""
    values, vectors = torch.linalg.eigh(matrix)
    found: Tensor = (vectors * values.clamp_(min=0).add_(eps).pow_(exponent)) @ vectors.T
    return found
