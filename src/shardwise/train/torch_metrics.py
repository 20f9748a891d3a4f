"""Objects of torchmetrics as metrics: each rank updates a copy of its own, and the states of all are merged."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError

from .metrics import Fields, Metric, logits_and_labels


def is_torch_metric(value: Any) -> bool:
    """Return whether a value is a metric of torchmetrics, or a collection of them; it is not imported for that."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(value, library.Metric | library.MetricCollection)


def torch_metrics(name: str | None, value: Any) -> Iterator[TorchMetric]:
    """Yield the metrics of what a user gives, a metric or a collection."""
    if hasattr(value, "items"):
        for own, metric in value.items(copy_state=False):
            yield TorchMetric(str(own), _checked(metric))
    else:
        yield TorchMetric(name or type(value).__name__, _checked(value))


def _checked(metric: Any) -> Any:
    full = metric.full_state_update  # None where nobody has said that it is not needed
    own = type(metric).merge_state is not sys.modules["torchmetrics"].Metric.merge_state
    if not own and (full is not False or metric.dist_sync_on_step):
        what = "dist_sync_on_step" if full is False else f"full_state_update = {full}"
        wrong = f"{type(metric).__name__} has {what}, so states of several ranks cannot be merged"
        legal = "full_state_update = False without dist_sync_on_step, or a function of (outputs, batch)"
        raise ConfigError.on("metrics", wrong, legal)
    return metric


@dataclass
class TorchMetric(Metric):
    """A metric of torchmetrics.  It gets the logits of the model's outputs and the labels of the batch, as
    (N, classes) and (N,) where there are several targets in a row: give it ``ignore_index=-100`` if some do not
    count."""

    name: str
    metric: Any

    def begin(self, device: torch.device) -> Any:
        own = self.metric.clone().to(device)
        own.reset()
        return own

    def add(self, state: Any, outputs: Any, batch: Fields) -> Any:
        logits, labels = logits_and_labels(self.name, outputs, batch, False)
        if logits.dim() == labels.dim() + 1 and labels.dim() > 1:
            logits, labels = logits.flatten(0, -2), labels.flatten()
        state.update(logits, labels)
        return state

    def packed(self, state: Any) -> bytes:
        return pickle.dumps(state.to("cpu"))

    def values(self, states: Sequence[bytes], loss: float) -> dict[str, float]:
        whole: Any = None
        for one in map(pickle.loads, states):
            if not one.update_called:
                continue
            if whole is None:
                whole = one
            else:
                whole.merge_state(one)
        if whole is None:
            return {self.name: float("nan")}
        found = whole.compute()
        return dict(self._numbers(self.name, found))

    def _numbers(self, name: str, found: Any) -> Iterator[tuple[str, float]]:
        if isinstance(found, dict):
            for key, value in found.items():
                yield from self._numbers(f"{name}_{key}", value)
        elif isinstance(found, Tensor) and found.dim():
            for place, value in enumerate(found.flatten().tolist()):
                yield f"{name}_{place}", float(value)
        else:
            yield name, float(found)
