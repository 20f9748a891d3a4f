"""This module defines options of a plan: fields of frozen dataclasses whose metadata says what is legal for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import Field, field, fields
from typing import Any

from shardwise.core.errors import check_choice, check_count, check_value


def word(default: str, legal: Sequence[str], key: str = "") -> Any:
    """Return an option that is one of the ``legal`` words; users write it as ``key``, by default the field's name."""
    return field(default=default, metadata={"legal": tuple(legal), "key": key})


def count(default: int, least: int = 1, key: str = "") -> Any:
    """Return an option that is an integer of at least ``least``; users write it as ``key``, as in :func:`word`."""
    return field(default=default, metadata={"least": least, "key": key})


def number(default: float, below: float = math.inf, most: float = math.inf, key: str = "") -> Any:
    """Return an option that is a number of at least 0, less than ``below`` and at most ``most``; users write it as
    ``key``, as in :func:`word`."""
    return field(default=default, metadata={"below": below, "most": most, "key": key})


def key_of(option: Field[Any]) -> str:
    """Return the name of an option that users write: in TOML, in a config and in :meth:`shardwise.Plan.of`."""
    return option.metadata.get("key") or option.name


def check_options(options: Any) -> None:
    """Raise :class:`ConfigError` unless all words, counts and numbers of the dataclass ``options`` are legal."""
    for option in fields(options):
        value = getattr(options, option.name)
        if "legal" in option.metadata:
            check_choice(key_of(option), value, option.metadata["legal"])
        elif "least" in option.metadata:
            check_count(key_of(option), value, option.metadata["least"])
        elif "below" in option.metadata:
            check_number(key_of(option), value, option.metadata["below"], option.metadata["most"])


def check_number(where: str, value: object, below: float = math.inf, most: float = math.inf) -> None:
    """Raise :class:`ConfigError` unless ``value`` is a number of at least 0, less than ``below``, at most ``most``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_number and 0 <= value < below and value <= most  # type: ignore[operator]
    bound = f" less than {below:g}" if below < math.inf else ""
    bound = f" at most {most:g}" if most < math.inf else bound
    check_value(where, value, fits, f"a number of at least 0{bound}")
