"""Checks that the files that a config names exist."""

from __future__ import annotations

import os
from collections.abc import Callable

from .draft import ConfigDraft


def there(path: str, test: Callable[[str], bool]) -> bool:
    """Return ``test(path)``, or False if no file can have this name."""
    try:
        return test(path)
    except (OSError, ValueError):
        return False


def file_exists(draft: ConfigDraft, key: str) -> None:
    """Refuse a reference to a function in a file that does not exist."""
    if draft[key] is None or not draft.sound(key):
        return
    place = draft[key].rpartition(":")[0]
    if place.endswith(".py") and not there(place, os.path.isfile):
        draft.refuse(key, "a Python file that exists", f"There is no {place}")
