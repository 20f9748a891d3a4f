"""Write TOML, and read a single TOML value."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections of keys as TOML text; None is left out, and a table in a section gets a header of its own."""
    blocks = []
    for section, values in tables.items():
        plain = {name: value for name, value in values.items() if value is not None and not isinstance(value, dict)}
        blocks.append(_block(section, plain))
        blocks += [_block(f"{section}.{name}", value) for name, value in values.items() if isinstance(value, dict)]
    return "\n".join(blocks)


def inline(value: Any) -> str:
    """Return a value as TOML on one line; a value of a type that TOML does not have is written as by Python."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(name)} = {inline(item)}" for name, item in value.items()) + "}"
    return str(value)


def shown(value: Any, width: int = 200) -> str:
    """Return a value as text for a message: one printable line of at most ``width`` characters."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in inline(value))
    return text if len(text) <= width else f"{text[: width - 1]}…"


def parse(text: str) -> Any:
    """Return the value of a TOML text (``3``, ``[0.9, 0.95]``), or the text itself if it is none (``runs/first``)."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if found.keys() == {"value"} else text


def _block(header: str, values: Mapping[str, Any]) -> str:
    return "\n".join([f"[{header}]", *(f"{_key(name)} = {inline(value)}" for name, value in values.items()), ""])


def _key(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else _quote(name)


def _quote(text: str) -> str:
    """Quote a text: JSON's escapes are those of TOML, except for DEL, which JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
