"""Names that say of a batch field that it has no rows, and of a result that it is kept for the user's own loop."""

from __future__ import annotations

WHOLE = "whole "
KEPT = "kept "


def has_rows(field: str) -> bool:
    """Return whether a field has the rows of the batch in its first dim; any other is the same on all ranks."""
    return not field.startswith(WHOLE)


def is_kept(name: str) -> bool:
    """Return whether it is a value that a program computes for the user's loop, and no buffer of the model."""
    return name.startswith(KEPT)
