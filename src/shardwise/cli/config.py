"""``shardwise config`` shows the values of a config, or explains its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shardwise.config import load_config
from shardwise.config.reference import Key, find, page, reference
from shardwise.core.errors import ConfigError
from shardwise.report.tables import print_json

from .common import split_arguments


def run(arguments: Sequence[str], whole: bool, json: bool) -> None:
    """Print the reference, or what the keys in ``arguments`` mean, or else the resolved config."""
    if whole and arguments:
        raise ConfigError(f"--reference {' '.join(arguments)}: legal: --reference alone, or keys without it")
    if whole:
        _keys([key for keys in reference().values() for key in keys], True) if json else print(page(), end="")
    elif arguments and not any("=" in one or one.endswith(".toml") or Path(one).is_file() for one in arguments):
        _keys([key for name in arguments for key in find(name)], json)
    else:
        path, overrides = split_arguments(arguments)
        config = load_config(path, overrides)
        print_json({"config": config.resolved(), "origins": dict(config.origins)}) if json else print(config.resolved())


def _keys(keys: Sequence[Key], json: bool) -> None:
    if json:
        print_json({key.name: asdict(key) for key in keys})
    else:
        print("\n\n".join(key.text() for key in keys))
