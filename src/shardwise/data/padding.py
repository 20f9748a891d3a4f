"""A collator for samples of different lengths: it fills rows up to the longest of their batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from shardwise.core.errors import ConfigError, check_count


class Padding:
    """Make a batch of samples that are dicts: fields of ``fill`` are filled at the end of their dims, others stacked.

    Args:
        fill: the number with which each field is filled, as ``{"input_ids": 0, "labels": -100}``.
        multiple_of: sizes are rounded up to a multiple of it, so that there are fewer shapes, each of which is traced.
        mask: a field that the batch gets besides, 1 where a row has a value of its own in the first field of ``fill``,
            and 0 where it was filled.
    """

    def __init__(self, fill: Mapping[str, float], multiple_of: int = 1, mask: str | None = None) -> None:
        check_count("pad_to_multiple_of", multiple_of)
        if not fill:
            raise ConfigError.on("padding", "no field to fill", 'the fields with their numbers, as {"input_ids": 0}')
        self.fill, self.multiple_of, self.mask = dict(fill), multiple_of, mask

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return the batch; raise :class:`ConfigError` for samples that have not the fields, or no sizes to fill."""
        self.check(samples)
        rest = [{name: value for name, value in one.items() if name not in self.fill} for one in samples]
        batch: dict[str, Any] = {name: self._filled(name, [one[name] for one in samples]) for name in self.fill}
        if self.mask is not None:
            first = next(iter(self.fill))
            own = [torch.ones_like(torch.as_tensor(one[first]), dtype=torch.int64) for one in samples]
            batch[self.mask] = self._put_together(own, 0)
        return batch | (default_collate(rest) if rest[0] else {})

    def check(self, samples: Sequence[Any]) -> None:
        """Raise :class:`ConfigError` for samples that are no dicts, or have not the fields, or others of several
        sizes."""
        if wrong := [one for one in samples if not isinstance(one, Mapping)]:
            raise ConfigError.on("padding", f"a sample is of type {type(wrong[0]).__name__}", "dicts")
        for name in self.fill:
            missing = next((i for i, one in enumerate(samples) if name not in one), None)
            if missing is not None:
                raise ConfigError.on("padding", f'sample {missing} of a batch has no field "{name}"', _fields(samples))
        if self.mask is not None and self.mask in samples[0]:
            raise ConfigError.on(
                "padding", f'the samples have a field "{self.mask}" already', "another name for a mask"
            )
        for name in samples[0]:
            rows = [one[name] for one in samples if name not in self.fill and name in one]
            if len(shapes := sorted({str(_shape(one)) for one in rows})) > 1:
                raise ConfigError.on("padding", f'rows of "{name}" have shapes {" and ".join(shapes)}', _fillable(name))

    def _filled(self, name: str, values: Sequence[Any]) -> Tensor:
        rows = [torch.as_tensor(value) for value in values]
        if len({one.dim() for one in rows}) != 1 or not rows[0].dim():
            found = " and ".join(sorted({str(tuple(one.shape)) for one in rows}))
            raise ConfigError.on(
                "padding", f'rows of "{name}" have shapes {found}', "as many dims in each, at least one"
            )
        if len({one.dtype for one in rows}) != 1:
            found = " and ".join(sorted({str(one.dtype) for one in rows}))
            raise ConfigError.on("padding", f'rows of "{name}" are {found}', "one dtype")
        if not rows[0].is_floating_point() and self.fill[name] != int(self.fill[name]):
            raise ConfigError.on(
                "padding", f'"{name}" is {rows[0].dtype}, filled with {self.fill[name]}', "a whole number"
            )
        return self._put_together(rows, self.fill[name])

    def _put_together(self, rows: Sequence[Tensor], fill: float) -> Tensor:
        longest = (max(one.shape[dim] for one in rows) for dim in range(rows[0].dim()))
        shape = [-(-size // self.multiple_of) * self.multiple_of for size in longest]
        return torch.stack([F.pad(one, _after(one.shape, shape), value=fill) for one in rows])


@dataclass(frozen=True)
class Padded:
    """Data whose samples are put together by a :class:`Padding`."""

    data: Any
    padding: Padding

    def longest(self, most: int) -> list[Any]:
        """Return the first samples of a map-style dataset, at ``most`` so many, those with most to fill first."""
        samples = [self.data[i] for i in range(min(most, len(self.data)))]
        self.padding.check(samples)
        return sorted(samples, key=lambda one: -sum(torch.as_tensor(one[n]).numel() for n in self.padding.fill))


def _after(shape: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Return what :func:`torch.nn.functional.pad` takes to fill a tensor up at the end of its dims."""
    return [n for have, want in zip(reversed(shape), reversed(whole), strict=True) for n in (0, want - have)]


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value),) if isinstance(value, (list, tuple)) else tuple(getattr(value, "shape", ()))


def _fillable(name: str) -> str:
    return f'one shape, or a number with which "{name}" is filled too'


def _fields(samples: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(map(str, samples[0])) or "none"
