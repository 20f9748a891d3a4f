"""The optimizers that torch has not, against their published formulas, written out as they are in the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.optimizers import LARGEST
from shardwise.runtime.lamb import Lamb
from shardwise.runtime.lion import Lion
from shardwise.runtime.shampoo import Shampoo

STEPS = 7
SHAPES = [(5, 3), (4,), (), (2, 3, 4)]


def lion(x: Tensor, gradients: Iterator[Tensor], rate: float, beta1: float, beta2: float, decay: float) -> Tensor:
    """Chen et al. 2023, arXiv 2302.06675, algorithm 2."""
    m = torch.zeros_like(x)
    for g in gradients:
        c = beta1 * m + (1 - beta1) * g
        x = x - rate * (torch.sign(c) + decay * x)
        m = beta2 * m + (1 - beta2) * g
    return x


def lamb(
    x: Tensor, gradients: Iterator[Tensor], rate: float, beta1: float, beta2: float, eps: float, decay: float
) -> Tensor:
    """You et al. 2020, arXiv 1904.00962, algorithm 2, for one layer; the function of the norm is the identity."""
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        r = (m / (1 - beta1**t)) / (torch.sqrt(v / (1 - beta2**t)) + eps)
        norm, length = (math.sqrt(float((one**2).sum())) for one in (x, r + decay * x))
        x = x - rate * norm / length * (r + decay * x)
    return x


def shampoo(x: Tensor, gradients: Iterator[Tensor], rate: float, eps: float, decay: float) -> Tensor:
    """Gupta et al. 2018, arXiv 1802.09568, algorithm 2, with weight decay apart.  On dim i stands the power -1/(2k) of
    eps I plus the sum of G G' of all gradients, which are G on that dim: the singular vectors and values of all G side
    by side give it."""
    shape, x = x.shape, x.reshape(x.shape or (1,))
    history: list[Tensor] = []
    for g in gradients:
        history.append(g.reshape(x.shape))
        update, letters = history[-1], "abc"[: x.dim()]
        for i, size in enumerate(x.shape):
            beside = torch.cat([one.movedim(i, 0).reshape(size, -1) for one in history], 1)
            if size > LARGEST:  # section 3.3: the diagonal alone
                power = torch.diag((eps + (beside**2).sum(1)) ** (-1 / (2 * x.dim())))
            else:
                vectors, values, _ = torch.linalg.svd(beside)
                squares = torch.zeros(size, dtype=x.dtype)
                squares[: len(values)] = values**2
                power = vectors @ torch.diag((eps + squares) ** (-1 / (2 * x.dim()))) @ vectors.T
            update = torch.einsum(f"z{letters[i]},{letters}->{letters.replace(letters[i], 'z')}", power, update)
        x = x - rate * (update + decay * x)
    return x.reshape(shape)


PUBLISHED: dict[str, tuple[Callable[..., Tensor], type[torch.optim.Optimizer], dict[str, Any], tuple[float, ...]]] = {
    "lion": (lion, Lion, {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.3}, (0.02, 0.8, 0.95, 0.3)),
    "lion without decay": (lion, Lion, {"lr": 0.1}, (0.1, 0.9, 0.99, 0.0)),
    "lamb": (
        lamb, Lamb, {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}, (0.05, 0.8, 0.95, 1e-3, 0.3),
    ),
    "lamb without decay": (lamb, Lamb, {"lr": 0.05}, (0.05, 0.9, 0.999, 1e-6, 0.0)),
    "shampoo": (shampoo, Shampoo, {"lr": 0.1, "eps": 1e-2, "weight_decay": 0.3}, (0.1, 1e-2, 0.3)),
    "shampoo without decay": (shampoo, Shampoo, {"lr": 0.1, "eps": 1e-3}, (0.1, 1e-3, 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("shape", [*SHAPES, (LARGEST + 2, 2)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_formula(name: str, shape: tuple[int, ...]) -> None:
    formula, kind, options, numbers = PUBLISHED[name]
    generator = torch.Generator().manual_seed(len(shape))
    first, *gradients = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS + 1))
    parameter = torch.nn.Parameter(first.clone())
    optimizer = kind([parameter], **options)  # type: ignore[call-arg]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), formula(first, iter(gradients), *numbers), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(parameter, first, rtol=1e-4)
