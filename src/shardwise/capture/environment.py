"""The environment variables that a forward reads: what it computes may depend on each of them, for any batch."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_read() -> Iterator[set[str]]:
    """Yield the names of the variables that this thread reads meanwhile, whether they are set or not.

    What this changes holds for all threads, so it has to be inside of what lets one export at a time."""
    kind, thread, names = type(os.environ), threading.get_ident(), set[str]()
    original = kind.__getitem__

    def noted(environment: os._Environ[str], name: str) -> str:
        if threading.get_ident() == thread and isinstance(name, str):
            names.add(name)
        return original(environment, name)

    kind.__getitem__ = noted
    try:
        yield names
    finally:
        kind.__getitem__ = original


def digests(names: Iterable[str]) -> dict[str, str | None]:
    """Return a hash of the value of each variable, for values may be secret; None where it is not set."""
    found = {name: os.environ.get(name) for name in sorted(names)}
    return {n: None if v is None else hashlib.sha256(f"{n}={v}".encode()).hexdigest() for n, v in found.items()}


def same(written: Mapping[str, str | None], names: Iterable[str]) -> bool:
    """Whether all variables ``written`` have the values that they had, and no other of these ``names`` was read."""
    return digests(written) == dict(written) and written.keys() >= set(names)
