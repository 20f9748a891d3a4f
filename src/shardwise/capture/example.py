"""The rows on which a model is captured and tried."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.capture.casts import cast_field
from shardwise.capture.wrapped import WithLoss
from shardwise.core.fields import has_rows
from shardwise.core.structure import like

HINT_ROWS = 6  # the number of rows of the captured example: export would specialise 1


def rows_seen(rows: int | None) -> tuple[int, ...]:
    """Return for which numbers of rows calls that run as written are seen, for a capture of ``rows`` rows (None: any).

    Two tell what follows from the number."""
    return (HINT_ROWS, HINT_ROWS - 2) if rows is None else (rows,)


def example_rows(batch: Mapping[str, Tensor], rows: int) -> Mapping[str, Tensor]:
    """Return ``rows`` rows that repeat those of ``batch``, as distinct tensors, since export merges equal ones; a field
    without rows stays what it is."""
    out = {}
    for name, value in batch.items():
        if not has_rows(name):
            out[name] = value.detach().cpu().clone()
            continue
        index = torch.arange(rows) % max(value.shape[0], 1)
        out[name] = value.detach().cpu()[index].clone()
    return like(out, batch)


def example_of(wrapped: WithLoss, batch: Mapping[str, Tensor], rows: int | None) -> dict[str, Tensor]:
    """Return an example of ``rows`` rows (None: of a number that no size has by chance), in the dtypes that compute."""
    return {k: cast_field(v, wrapped.precision) for k, v in example_rows(batch, rows or HINT_ROWS).items()}


def shaken_value(value: Tensor, index: int) -> Tensor:
    """Return other values for parameter ``index`` of a model, about as large."""
    if not value.is_floating_point() or not value.numel():
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(index)).to(value)
    return value + noise * (0.5 / (value.numel() / len(value)) ** 0.5 if value.dim() > 1 else 0.3)
