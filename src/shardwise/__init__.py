"""Train any PyTorch model on any set of devices as if they were one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoints import Checkpoints
    from shardwise.core.mesh import Mesh
    from shardwise.core.optim import OptimizerChoice
    from shardwise.core.plan import Plan
    from shardwise.loop import distribute
    from shardwise.runtime.initial_values import Values
    from shardwise.trace.initial import record
    from shardwise.trainer import LossScaleError, NonFiniteError, Trainer

__version__ = "0.1.0"

_HOMES = {
    "Checkpoints": "shardwise.checkpoints",
    "distribute": "shardwise.loop",
    "Mesh": "shardwise.core.mesh",
    "LossScaleError": "shardwise.trainer",
    "NonFiniteError": "shardwise.trainer",
    "OptimizerChoice": "shardwise.core.optim",
    "Plan": "shardwise.core.plan",
    "Trainer": "shardwise.trainer",
    "Values": "shardwise.runtime.initial_values",
    "record": "shardwise.trace.initial",
}
__all__ = [
    "Checkpoints", "distribute", "LossScaleError", "Mesh", "NonFiniteError", "OptimizerChoice", "Plan", "Trainer", "Values", "record",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import on first use: ``shardwise --help`` and config errors need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
