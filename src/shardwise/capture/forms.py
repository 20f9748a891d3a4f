"""The form of a batch: what a capture depends on of the shapes of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def other_forms(form: Form, varies: Dims, known: Sequence[Form]) -> list[Form]:
    """Return forms in which all dims that vary have another size than in ``form``, of each dim two: of those ``known``
    as many as show some, for the rest one for each size that there is, and then as many in which these dims have a
    third size."""
    left, found = {(name, dim) for name, dims in varies.items() for dim in dims}, []
    for one in known:
        dims = differing(form, one) or {}
        at = {(name, dim) for name, each in dims.items() for dim in each}
        if at & left and all(dim in varies.get(name, ()) for name, dim in at):
            found.append(one)
            left -= at
    sizes = {(n, d): size for n, shape, _ in form for d, size in enumerate(shape, 1 if has_rows(n) else 0)}
    for size in dict.fromkeys(sizes[at] for at in sizes if at in left):
        other = size - 2 if size > 3 else size + 2  # an even size stays even
        new = {at: other if at in left and own == size else own for at, own in sizes.items()}
        found.append(tuple((n, tuple(new[at] for at in new if at[0] == n), dtype) for n, _, dtype in form))
    return [*found, *(_third(form, one) for one in found)]


def _third(form: Form, other: Form) -> Form:
    """Return a form in which the dims that differ in two of them have another size, as far from them as they are from
    each other: two sizes alone would seem to follow from each other by any rule."""
    return tuple(
        (name, tuple(map(_further, here, there)), dtype)
        for (name, here, dtype), (_, there, _) in zip(form, other, strict=True)
    )


def _further(one: int, other: int) -> int:
    less = 2 * min(one, other) - max(one, other)
    return less if less > 1 else 2 * max(one, other) - min(one, other)


def resized(batch: Mapping[str, Tensor], form: Form) -> Mapping[str, Tensor]:
    """Return a batch of a form, with the values of ``batch`` again and again where it is larger."""
    out = dict(batch)
    for name, shape, _ in form:
        for dim, size in enumerate(shape, 1 if has_rows(name) else 0):
            here = out[name].shape[dim]
            if here != size:
                out[name] = out[name].index_select(dim, torch.arange(size, device=out[name].device) % max(here, 1))
    return like(out, batch)
