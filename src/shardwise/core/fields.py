"""Names that say of a batch field that it has no rows, and of a result that it is kept beside the loss."""

from __future__ import annotations

WHOLE = "whole "
KEPT = "kept "
OUTPUT = "output "
LOAD = "load "
DRAWN = "drawn "
"""It begins the names of fields that a step draws itself, from the generators of Python and numpy."""


def has_rows(field: str) -> bool:
    """Return whether a field has the rows of the batch in its first dim; any other is the same on all ranks."""
    return not field.startswith(WHOLE)


def is_drawn(field: str) -> bool:
    """Return whether a step draws a field itself."""
    return field.removeprefix(WHOLE).startswith(DRAWN)


def is_kept(name: str) -> bool:
    """Return whether a result is no buffer: a value that the user's loop looks at, an output of the model, or the load
    of its experts."""
    return name.startswith((KEPT, OUTPUT, LOAD))


def is_output(name: str) -> bool:
    """Return whether a result is an output of the model in an evaluation: a row for each row of the batch."""
    return name.startswith(OUTPUT)
