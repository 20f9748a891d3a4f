"""Batches on which one device computes the same but for rounding: how much it then differs from itself tells which
tensors are rounding alone, such as the gradient of a bias before a BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.capture.wrapped import rows_in
from shardwise.core.fields import has_rows
from shardwise.core.layout import shard_sizes

TURNS = 2
"""There are as many orders of rows.  By a single one some scalars would come out the same by chance: their error is a
single random number."""


def turned(fields: Mapping[str, Tensor], pieces: int, turns: int) -> tuple[dict[str, Tensor], list[int]]:
    """Return a batch with the rows of each of its ``pieces`` in the opposite order, the first row last if ``turns`` is
    two, and the rows' numbers before.

    All sums over rows are then added in another order.  To change the last bits of the inputs is not enough: the means
    of a BatchNorm stay the same, as the changes cancel."""
    rows = rows_in(fields)
    each = torch.split(torch.arange(rows), shard_sizes(rows, pieces))
    order = torch.cat([piece.flip(0).roll(1 - turns) for piece in each])
    return {n: v[order.to(v.device)] if has_rows(n) else v for n, v in fields.items()}, order.tolist()


__all__ = ["TURNS", "turned"]
