"""Evaluate a model on the validation data of a run: its mean loss, for text its perplexity, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.core.metrics import LOSS, PERPLEXITY
from shardwise.data.loader import Batch
from shardwise.train.evaluation import evaluate
from shardwise.train.metrics import Metric, Perplexity
from shardwise.train.trainer import Trainer


def evaluated(
    trainer: Trainer,
    batches: Iterable[Batch],
    metrics: Sequence[Metric] = (),
    example: Mapping[str, Tensor] | None = None,
    *,
    perplexity: bool,
) -> dict[str, Any]:
    """Return what an evaluation has found, fit for JSON: what is no finite number is None; all ranks call it together.

    ``perplexity`` adds exp(loss), which is meaningful if the loss is a mean cross-entropy in nats per token.
    """
    if perplexity and all(one.name != PERPLEXITY for one in metrics):
        metrics = [Perplexity(), *metrics]
    found = evaluate(trainer.engine, batches, metrics, example)
    values: dict[str, Any] = {LOSS: _number(found.loss), "rows": found.rows}
    values |= {name: _number(value) for name, value in found.metrics.items()}
    if perplexity and values[PERPLEXITY] is None:
        del values[PERPLEXITY]
    return {**values, "seconds": found.seconds}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
