"""Metrics from what a user gives: names, functions, objects of torchmetrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.metrics import READY

from .metrics import FunctionMetric, Metric, kind, ready
from .torch_metrics import is_torch_metric, torch_metrics


def metrics_of(given: Any, module: nn.Module | None = None) -> list[Metric]:
    """Return metrics from what a user gives: names of ready-made ones, functions, objects of torchmetrics, or a dict of
    these by name; or one of these alone."""
    if isinstance(given, str | Metric) or is_torch_metric(given) or callable(given):
        given = [given]
    if not isinstance(given, Mapping | Iterable):
        raise ConfigError(f"metrics: {kind(given)}; legal: a list of metrics, or a dict of them by name")
    named = given.items() if isinstance(given, Mapping) else [(None, one) for one in given]
    found = [metric for name, one in named for metric in _made(name, one, module)]
    names = [metric.name for metric in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"metrics: {twice} is there twice; legal: a name for each")
    return found


def _made(name: str | None, one: Any, module: nn.Module | None) -> list[Metric]:
    if isinstance(one, Metric):
        return [one]
    if isinstance(one, str):
        return [ready(one, module)]
    if is_torch_metric(one):
        return list(torch_metrics(name, one))
    if callable(one):
        return [FunctionMetric(name or str(getattr(one, "__name__", type(one).__name__)), one)]
    legal = f"{', '.join(READY)}, a function of (outputs, batch), or an object of torchmetrics"
    raise ConfigError(f"metrics: {kind(one)}; legal: {legal}")
