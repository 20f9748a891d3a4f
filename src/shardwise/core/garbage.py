"""Python's garbage collector, while much is made that stays: it scans all of it again and again, and finds nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch off Python's garbage collector, which takes a tenth of the time of an import of torch, or of a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
