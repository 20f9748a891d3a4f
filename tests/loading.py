"""Modules are filled with saved weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.checkpoint.weights import fit_weights


@torch.no_grad()
def load_weights(path: Path, module: nn.Module) -> None:
    """Fill ``module`` with what ``fit_weights`` finds for it; it stays unchanged where that raises."""
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    for name, value in fit_weights(path, module).items():
        state[name].copy_(value)
