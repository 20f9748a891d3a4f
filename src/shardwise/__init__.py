"""Train any PyTorch model on any set of devices as if they were one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.core.mesh import Mesh
    from shardwise.core.optim import OptimizerChoice
    from shardwise.core.parameter_groups import ParameterGroup
    from shardwise.core.plan import Plan
    from shardwise.data.padding import Padding
    from shardwise.initial.initial import record
    from shardwise.initial.values import Values
    from shardwise.train.checkpoints import Checkpoints
    from shardwise.train.distribute import distribute
    from shardwise.train.errors import LossScaleError, NonFiniteError
    from shardwise.train.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "Checkpoints": "shardwise.train.checkpoints",
    "distribute": "shardwise.train.distribute",
    "Mesh": "shardwise.core.mesh",
    "LossScaleError": "shardwise.train.errors",
    "NonFiniteError": "shardwise.train.errors",
    "OptimizerChoice": "shardwise.core.optim",
    "Padding": "shardwise.data.padding",
    "ParameterGroup": "shardwise.core.parameter_groups",
    "Plan": "shardwise.core.plan",
    "Trainer": "shardwise.train.trainer",
    "Values": "shardwise.initial.values",
    "record": "shardwise.initial.initial",
}
__all__ = [
    "Checkpoints", "distribute", "LossScaleError", "Mesh", "NonFiniteError", "OptimizerChoice", "Padding",
    "ParameterGroup", "Plan", "Trainer", "Values", "record",
]  # fmt: skip


def __dir__() -> list[str]:
    """Return the public names, which are there on first use."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations"})


def __getattr__(name: str) -> Any:
    """Import on first use: ``shardwise --help`` and config errors need no torch."""
    from importlib import import_module

    if name == "nn":
        return import_module("shardwise.nn")
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    from shardwise.core.garbage import without_gc

    with without_gc():
        return getattr(import_module(_HOMES[name]), name)
