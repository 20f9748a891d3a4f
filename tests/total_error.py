"""The error of a whole run: what low precision is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.verify.compare import relative_error


def total_error(ours: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The relative error of all floating tensors together, as of one long vector.

    Tensor by tensor, the ratio of two runs' rounding errors is that of two random numbers.
    """
    if ours.keys() != truth.keys() or any(ours[name].shape != truth[name].shape for name in truth):
        return math.inf
    floating = [name for name in truth if truth[name].is_floating_point()]
    mine, theirs = (
        torch.cat([side[name].detach().cpu().double().flatten() for name in floating]) for side in (ours, truth)
    )
    return relative_error(mine, theirs)
