"""Python's garbage collector while much is made that stays: graphs, say."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_passed_by() -> Iterator[None]:
    """Let the collector look inside this context at new objects alone.

    Otherwise it goes through all that torch and the model have made before, each time that there is a quarter more.
    Where somebody has objects passed by already, nothing is done."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
