"""Batches of a mixture of experts whose tokens choose clearly: rounding to half precision cannot change a choice, which
would change the gradients of the experts concerned by as much as they are.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

CANDIDATES = 40


class _Margins(TorchDispatchMode):
    """Finds the ``least`` difference between the last score that is chosen and the next one."""

    least = math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default and args[1] < args[0].shape[-1]:
            scores, k = args[0].sort(-1, descending=True).values, args[1]
            self.least = min(self.least, float((scores[..., k - 1] - scores[..., k]).min()))
        return func(*args, **(kwargs or {}))


def margin(module: nn.Module, batch: dict[str, Tensor]) -> float:
    """Return how much the last score that a token chooses is above the next one, at least."""
    with _Margins() as margins, torch.no_grad():
        module(**batch)
    return margins.least


def clearest(module: nn.Module, batch: dict[str, Tensor], words: int) -> dict[str, Tensor]:
    """Return the batch, with its words (from 1 to ``words`` - 1) in place of each other, that has the widest margin."""
    alone = copy.deepcopy(module).eval()
    found = [batch]
    for seed in range(CANDIDATES):
        others = 1 + torch.randperm(words - 1, generator=torch.Generator().manual_seed(seed))
        found.append({**batch, "input_ids": torch.cat([torch.zeros(1, dtype=torch.int64), others])[batch["input_ids"]]})
    return max(found, key=lambda one: margin(alone, one))
