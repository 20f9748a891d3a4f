"""A run leaves files of JSON lines, which may be cut short."""

from __future__ import annotations

import json
from typing import Any


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if it is no JSON object, as one that a killed run or a full disk cut."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
