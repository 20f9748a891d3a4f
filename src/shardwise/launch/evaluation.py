"""Evaluate a model on the validation split: its mean loss, and for text also its perplexity."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch

from shardwise.backend import Backend
from shardwise.data.loader import Batch
from shardwise.train.trainer import Trainer


def evaluate(trainer: Trainer, batches: Iterable[Batch], *, perplexity: bool) -> dict[str, Any]:
    """Return the mean loss of ``batches``, weighted by their numbers of targets (or rows); all ranks call it together.

    ``perplexity`` adds exp(loss), which is meaningful if the loss is a mean cross-entropy in nats per token.  The host
    reads the result once, at the end, so that a GPU runs the batches without waiting.
    """
    start = time.perf_counter()
    device = trainer.comm.device
    total = torch.zeros((), dtype=Backend.of(device).widest_float, device=device)
    weight = torch.zeros_like(total)
    rows = 0
    for batch in batches:
        result = trainer.evaluate(batch)
        counted = result.weight > 0  # a batch without targets has no mean
        total += torch.where(counted, result.loss.to(total.dtype) * result.weight.to(total.dtype), 0.0)
        weight += result.weight.to(total.dtype)
        rows += batch.rows
    loss = float(total / weight) if rows else math.nan
    found: dict[str, Any] = {"validation_loss": loss if math.isfinite(loss) else None, "rows": rows}
    if perplexity and math.isfinite(loss):
        found["perplexity"] = math.exp(min(loss, 700.0))
    return {**found, "seconds": time.perf_counter() - start}
