"""Multiply half-precision matrices into float32, for weight gradients whose sums are not rounded on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WideProduct = Callable[[Tensor, Tensor, Tensor, bool], None]
"""It is called as (goal, left, right, add), and writes or adds ``left @ right``, or batches of these, to ``goal``."""


def into_float32(goal: Tensor, left: Tensor, right: Tensor, add: bool) -> None:
    """Multiply (…, m, k) by (…, k, n) into (…, m, n), as a :data:`WideProduct`, by torch's own kernels."""
    wide: Any = {"out_dtype": torch.float32, "out": goal}
    if goal.dim() == 2:
        torch.addmm(goal, left, right, **wide) if add else torch.mm(left, right, **wide)
    else:
        torch.baddbmm(goal, left, right, **wide) if add else torch.bmm(left, right, **wide)


def multiplies_wide(product: WideProduct, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a product of each form runs there, and gives a sum that has too many digits for ``dtype``."""
    size, large = 16, 2048.0  # 2049 has twelve digits: fp16 holds eleven, bf16 eight
    left = torch.ones(size, size, dtype=dtype, device=device)
    right = torch.zeros(size, size, dtype=dtype, device=device)
    right[0], right[1] = large, 1.0
    for batch in ((), (2,)):
        goal = torch.full((*batch, size, size), 0.25, device=device)
        columns, rows = (one.expand(*batch, size, size).mT.contiguous().mT for one in (left, right))
        try:
            for add, expected in ((True, large + 1.25), (False, large + 1)):
                product(goal, columns, rows, add)
                if not bool((goal == expected).all()):
                    return False
        except (RuntimeError, TypeError):  # no such kernel, or no such argument
            return False
    return True
