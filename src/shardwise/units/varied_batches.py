"""Batches like an example, for trials of a model that was not captured.

An example has seldom all that later batches have: padding, ignored targets, masks with holes, rows that differ. So a
few of its rows are repeated with values of one field at a time replaced, many of them in the first part of the batch
and few in the second. Values that a model does not take are no evidence; it raises, or its loss is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from shardwise.core.fields import has_rows
from shardwise.graph.torch_private import TorchDispatchMode, schema

ABSENT = 4  # the most numbers that a field does not have of which trials see batches
LARGER = 30.0  # than the rows of one part are those of the other, about
IGNORED = -100  # torch's own number for a target that does not count
Fields = Mapping[str, Tensor]
Numbers = frozenset[float]


def rows_of(batch: Fields) -> int:
    """Return the number of rows of a batch."""
    return len(next(value for name, value in batch.items() if has_rows(name)))


def first_part(batch: Fields) -> int:
    """Return how many rows the first of two uneven parts has."""
    return max(1, rows_of(batch) // 3)


def cut(batch: Fields, sizes: Sequence[int]) -> list[Fields]:
    """Return the parts of a batch, of these ``sizes`` in rows, one after the other."""
    ends = list(accumulate(sizes))
    parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [{k: v[part] if has_rows(k) else v for k, v in batch.items()} for part in parts]


def repeated(batch: Fields, rows: int) -> Fields:
    """Return ``rows`` rows on the CPU: the first ones of a batch, again and again where it has fewer."""
    return {k: v.cpu()[torch.arange(rows) % len(v)] if has_rows(k) else v.cpu() for k, v in batch.items()}


class Compared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the numbers that a forward compares with, or is told to ignore: they may mark what is missing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = set[float]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((a.name for a in schema(func).arguments), args, strict=False)) | kwargs
        looked = [given.get("ignore_index")]
        if func in (torch.ops.aten.eq.Scalar, torch.ops.aten.ne.Scalar):
            looked.append(given.get("other"))
        with suppress(TypeError):  # a number that is none yet
            self.numbers.update(float(one) for one in looked if one is not None)
        return func(*args, **kwargs)


def diverse(batch: Fields, name: str | None = None) -> Fields:
    """Return the batch with noise on its floating-point fields and all values of its others in order, or only in the
    field ``name``."""
    return {
        k: v if name not in (None, k) or not has_rows(k) else _noised(v, i) if v.is_floating_point() else _sorted(v)
        for i, (k, v) in enumerate(batch.items())
    }


def uneven(batch: Fields) -> Iterator[Fields]:
    """Yield batches whose first part has rows of another size and sign than the second: what forward decides in Python
    for all rows together is then seldom what it decides for each part."""
    floating = [k for k, v in batch.items() if has_rows(k) and v.is_floating_point()]
    for one, other in ((LARGER, -1 / LARGER), (1 / LARGER, -LARGER)) if floating else ():
        factors = torch.full((rows_of(batch),), other, dtype=torch.float64)
        factors[: first_part(batch)] = one
        shaped = {k: factors.view(-1, *[1] * (batch[k].dim() - 1)) for k in floating}
        yield {k: (v * shaped[k]).to(v.dtype) if k in shaped else v for k, v in batch.items()}


def marked(batch: Fields, numbers: Numbers) -> Iterator[Fields]:
    """Yield batches in which elements of one field may not count; ``numbers`` are those that forward compares with."""
    for name, value in ((k, v) for k, v in batch.items() if has_rows(k)):
        for one in _marks(value, numbers):
            changed = _with(value, one)
            if not torch.equal(changed, value):
                yield {**batch, name: changed}


def _marks(value: Tensor, numbers: Numbers) -> list[float]:
    """Return the values that may mean, in a field, that an element does not count."""
    if value.dtype is torch.bool:
        return [0, 1]
    if value.is_floating_point():
        return sorted({0.0, *numbers}) + [float("nan")]
    limits = torch.iinfo(value.dtype)
    whole = {int(one) for one in numbers if one == one // 1 and limits.min <= one <= limits.max}
    small = {one for one in (IGNORED, -1, 0, 1) if one >= limits.min}
    absent = {one for one in _absent(value) if one <= limits.max}
    return [float(one) for one in sorted(small | whole | absent)]


def _absent(value: Tensor) -> list[int]:
    """Return numbers that a field does not have and later batches may: that above its largest, and some below."""
    there = set(value.reshape(-1).tolist())
    top = max(there, default=0) + 1
    return list(islice((one for one in range(top, -1, -1) if one not in there), ABSENT))


def _with(value: Tensor, mark: float) -> Tensor:
    """Return a field that has ``mark`` nearly everywhere in the first part of a batch, and seldom in the second."""
    changed, first = value.clone(), max(1, len(value) // 3)
    changed[:first].view(-1)[1:] = mark
    changed[first:].view(-1)[: changed[first:].numel() // 4] = mark
    return changed


def _sorted(value: Tensor) -> Tensor:
    """Return the elements of a field in order: each of them is then mostly in one part of the batch."""
    return value.reshape(-1).sort().values.reshape(value.shape)


def _noised(value: Tensor, index: int) -> Tensor:
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
    return (value * (0.5 + noise) + noise * (value == 0)).to(value.dtype)
