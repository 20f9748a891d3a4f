"""Read the sizes of tensors of a captured graph, which are numbers or expressions in the number of rows."""

from __future__ import annotations

import zlib
from typing import Any

import torch


def depends_on_data(size: Any) -> bool:
    """Return whether a size depends on data; one that later ops have shown to be a number (``bincount``'s) does not,
    although it has no hint."""
    return isinstance(size, torch.SymInt) and not size.node.has_hint() and bool(size.node.expr.free_symbols)


def concrete(size: Any) -> int:
    """Return a size as a number: the example's where it is symbolic.

    A size that depends on data gets a number that no other size is likely to have."""
    if depends_on_data(size):
        return 1009 + zlib.crc32(str(size.node.expr).encode()) % 9973
    return int(size.node.hint if isinstance(size, torch.SymInt) and size.node.has_hint() else expression(size))


def expression(size: Any) -> Any:
    """Return a size as an int or a sympy expression; equal ones are equal for every number of rows."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else size
    return expr if getattr(expr, "free_symbols", None) else int(expr)


def size_for_rows(size: Any, rows: int, most: int | None = None) -> int:
    """Return a size for a microbatch of ``rows`` rows; one that depends on data needs ``most``, and is that."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if most is not None and depends_on_data(size):
        return most
    return int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, rows)))
