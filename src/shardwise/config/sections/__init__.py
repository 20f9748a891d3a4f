"""The sections of a config: each key has a rule, and words that say what it does.

A key whose default is None gets a default that depends on other keys (`defaults.py`), or stays None if it does not
apply. In a loaded config the defaults are filled in.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..rules import Rule
from .checkpoint import CheckpointConfig
from .data import DataConfig
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .train import TrainConfig

__all__ = [
    "SECTIONS",
    "CheckpointConfig",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "rules",
]

SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
}


def rules(section: str) -> dict[str, Rule]:
    """Return the rule of each key of a section."""
    return {field.name: field.metadata["rule"] for field in fields(SECTIONS[section])}
