"""The form of a batch: what a capture depends on of the shapes of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from shardwise.core.fields import has_rows
from shardwise.core.structure import like

Form = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""What a capture depends on of a batch: the shape of a row of each field, or of all of one without rows, and dtypes."""


Dims = Mapping[str, frozenset[int]]
"""Dims by field."""

NOTHING_VARIES: Dims = MappingProxyType({})


def form_of(batch: Mapping[str, Tensor]) -> Form:
    """Return the form of a batch."""
    return tuple(
        sorted((name, tuple(one.shape[1:] if has_rows(name) else one.shape), one.dtype) for name, one in batch.items())
    )


def differing(one: Form, other: Form) -> dict[str, frozenset[int]] | None:
    """Return the dims of fields in which two forms differ; None where they differ in more than sizes."""
    found = {}
    if [(name, len(shape), dtype) for name, shape, dtype in one] != [(n, len(shape), d) for n, shape, d in other]:
        return None
    for (name, here, _), (_, there, _) in zip(one, other, strict=True):
        first = 1 if has_rows(name) else 0
        if dims := frozenset(first + i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b):
            found[name] = dims
    return found


def resized(batch: Mapping[str, Tensor], form: Form) -> Mapping[str, Tensor]:
    """Return a batch of a form, with the values of ``batch`` again and again where it is larger."""
    out = dict(batch)
    for name, shape, _ in form:
        for dim, size in enumerate(shape, 1 if has_rows(name) else 0):
            here = out[name].shape[dim]
            if here != size:
                out[name] = out[name].index_select(dim, torch.arange(size, device=out[name].device) % max(here, 1))
    return like(out, batch)
