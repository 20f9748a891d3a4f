"""FLOPs of every product, 2 a multiply-add."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise.kernels.flop_counter import Meter

PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], int]] = {
    "mm": (torch.mm, [(2, 3), (3, 4)], 24), "bmm": (torch.bmm, [(5, 2, 3), (5, 3, 4)], 120),
    "addmm": (torch.addmm, [(4,), (2, 3), (3, 4)], 24), "baddbmm": (torch.baddbmm, [(5, 2, 4), (5, 2, 3), (5, 3, 4)],
    120), "addbmm": (torch.addbmm, [(2, 4), (5, 2, 3), (5, 3, 4)], 120), "mv": (torch.mv, [(2, 3), (3,)], 6),
    "addmv": (torch.addmv, [(2,), (2, 3), (3,)], 6), "dot": (torch.dot, [(3,), (3,)], 3),
    "vdot": (torch.vdot, [(3,), (3,)], 3), "linear": (torch.nn.functional.linear, [(2, 3), (4, 3)], 24),
}  # fmt: skip
"""By name: the op, the shapes of its operands, and its multiply-adds."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    op, shapes, adds = PRODUCTS[name]
    with Meter("cpu") as meter:
        op(*(torch.empty(shape, device="meta") for shape in shapes))
    assert meter.flops == 2 * adds
