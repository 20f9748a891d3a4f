"""The sections of a config: each key has a rule, and words that say what it does.

A key whose default is None gets a default that depends on other keys (`defaults.py`), or stays None if it does not
apply. In a loaded config the defaults are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..rules import Rule
from .checkpoint import CheckpointConfig
from .data import DataConfig
from .model import ModelConfig
from .optimizer import OptimizerConfig
from .parallel import ParallelConfig
from .train import TrainConfig
from .validation import ValidationConfig

__all__ = [
    "SECTIONS",
    "CheckpointConfig",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "ValidationConfig",
    "rules",
]

SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "validation": ValidationConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
}


MOVED = {
    "data.validation": "validation.share",
    "train.eval_every": "validation.every",
    "train.eval_batches": "validation.batches",
}
"""Keys that have another place now; a config may still have them under the old one."""


def moved(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a config with each key at its place of today."""
    found = {name: dict(keys) if isinstance(keys, Mapping) else keys for name, keys in tables.items()}
    for old, new in MOVED.items():
        (section, name), (place, today) = old.split("."), new.split(".")
        if isinstance(found.get(section), dict) and name in found[section]:
            value = found[section].pop(name)
            if isinstance(target := found.setdefault(place, {}), dict):
                target.setdefault(today, value)
    return found


def rules(section: str) -> dict[str, Rule]:
    """Return the rule of each key of a section."""
    return {field.name: field.metadata["rule"] for field in fields(SECTIONS[section])}
