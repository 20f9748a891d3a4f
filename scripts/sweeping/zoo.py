"""All models of the sweep, by library."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Iterable

from sweeping.case import Entry

LIBRARIES = {
    "transformers": "of_transformers",
    "torchvision": "of_torchvision",
    "timm": "of_timm",
    "diffusers": "of_diffusers",
    "peft": "of_peft",
    "torch_geometric": "of_geometric",
}
"""The libraries, and the file of this package that has the zoo of each."""


@functools.cache
def library(name: str) -> dict[str, Entry]:
    """Return a library's models by name; :class:`ImportError` where it is not installed."""
    module = importlib.import_module(f"sweeping.{LIBRARIES[name]}")
    return {entry.name: entry for entry in module.entries()}


def find(name: str) -> Entry:
    """Return a model by its name in results."""
    return library(name.partition("/")[0])[name]


def ordered(entries: Iterable[Entry]) -> list[Entry]:
    """Return models in the order in which a sweep tries them: by turn, and then spread over libraries and families, so
    that part of a sweep is a sample of all."""
    return sorted(entries, key=lambda entry: (entry.turn, hashlib.sha256(entry.name.encode()).digest()))
