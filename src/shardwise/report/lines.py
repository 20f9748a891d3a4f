"""Files of JSON lines, as a run leaves them."""

from __future__ import annotations

import json
from typing import Any


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """The object of a line, None where it is no JSON object: one that a killed run was writing, or that a full disk
    cut.
    """
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None
