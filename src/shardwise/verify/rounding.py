"""Batches on which one device computes the same but for rounding: how much it then differs from itself tells which
tensors are rounding alone, such as the gradient of a bias before a BatchNorm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.capture.wrapped import rows_in
from shardwise.core.fields import has_rows
from shardwise.core.layout import shard_sizes
from shardwise.core.structure import like


def turned(batch: Mapping[str, Tensor], islands: int, pieces: int) -> Mapping[str, Tensor]:
    """Return a batch with the rows of each of the ``pieces`` of each island in the opposite order."""
    each = shard_sizes(rows_in(batch), islands)
    sizes = [size for rows in each for size in shard_sizes(rows, pieces)]
    order = torch.cat([piece.flip(0) for piece in torch.split(torch.arange(sum(sizes)), sizes)])
    found = {n: value[order.to(value.device)] if has_rows(n) else value for n, value in batch.items()}
    return like(found, batch)


def shaken(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a batch whose floating-point numbers are the next ones of fp64, up and down in turn: where random numbers
    belong to rows, these cannot be in another order."""
    return like({n: _next(value) if value.is_floating_point() else value for n, value in batch.items()}, batch)


def _next(value: Tensor) -> Tensor:
    upward = torch.arange(value.numel(), device=value.device).view(value.shape) % 2 == 1
    return torch.nextafter(value.double(), torch.where(upward, math.inf, -math.inf).double())
