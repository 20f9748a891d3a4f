"""The loggers that a config can name: observers of a run that write for TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError

from .files import write_whole

LOGGERS = {
    "tensorboard": ("tensorboard", "TensorBoard"),
    "wandb": ("wandb", "WandB"),
    "mlflow": ("mlflow", "MLflow"),
}
"""The package that a logger needs, which is an extra of this one too, and its class, in the module of its name here."""
NO_CURVES = ("step", "rows", "seconds")
IDS = "loggers.json"  # in the folder of a run: the ids under which services know the run, so that it goes on there


def check_loggers(names: Iterable[str]) -> None:
    """Raise :class:`ConfigError` where the package of a logger is not installed; nothing is imported."""
    for name in names:
        package, _ = LOGGERS[name]
        if importlib.util.find_spec(package) is None:
            raise missing(name, f"{package} is not installed")


def missing(name: str, wrong: str) -> ConfigError:
    """Return the error about the package of a logger."""
    others = ", ".join(one for one in LOGGERS if one != name)
    return ConfigError.on(f'train.loggers = ["{name}"]', wrong, f"pip install shardwise[{name}], or {others}")


def make_logger(name: str, run_dir: Path) -> Any:
    """Return the logger for the run in ``run_dir``; its package is imported, and nothing is written yet."""
    _, kind = LOGGERS[name]
    return getattr(importlib.import_module(f"{__package__}.{name}"), kind)(run_dir)


def known_id(run_dir: Path, name: str) -> str | None:
    """Return the id under which the service of a logger knows the run; None for a new one."""
    found = _ids(run_dir).get(name)
    return found if isinstance(found, str) else None


def remember_id(run_dir: Path, name: str, run: str) -> None:
    """Keep the id that a service has given the run."""
    write_whole(run_dir / IDS, json.dumps({**_ids(run_dir), name: run}) + "\n")


def _ids(run_dir: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((run_dir / IDS).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what of a hook's values is a curve: finite numbers, but for :data:`NO_CURVES`."""
    return {
        name: value
        for name, value in values.items()
        if name not in NO_CURVES
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def flat(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of a config as ``section.key``."""
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
