"""What a layer of experts does beside its products: rows are sorted by expert, and put back in their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for numbers of experts ``ids`` (slots): the order that sorts them, its inverse, the sorted numbers, and
    where the rows of each expert end (experts), as int32. Slots of one expert keep their order."""
    found, order = ids.sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    ends = torch.searchsorted(found, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    return order, inverse, found, ends.int()


class _Taken(torch.autograd.Function):
    """Autograd's own backward would add row by row, as rows of any table may be taken several times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.slots = slots
        return x.index_select(0, order if slots == 1 else order // slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        order, inverse = ctx.saved_tensors
        found = _Taken.apply(grad, inverse, order, 1)  # type: ignore[no-untyped-call]
        return found if ctx.slots == 1 else found.unflatten(0, (-1, ctx.slots)).sum(1), None, None, None


def taken(x: Tensor, order: Tensor, inverse: Tensor, slots: int) -> Tensor:
    """Return the rows of ``x`` (slots / ``slots``, ...) in an order of slots."""
    found: Tensor = _Taken.apply(x, order, inverse, slots)  # type: ignore[no-untyped-call]
    return found


__all__ = ["by_expert", "taken"]
