"""The shapes of batches that users say may vary: the largest of each, by "FIELD.DIM"."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shardwise.capture.forms import Form, form_of, resized
from shardwise.core.errors import ConfigError, check_count
from shardwise.core.fields import has_rows

Sizes = Mapping[str, Mapping[int, int]]
"""Sizes by field and dim."""


def sizes_of(varies: Mapping[str, int], example: Mapping[str, Tensor]) -> dict[str, dict[int, int]]:
    """Return the sizes that ``varies`` names, of the fields of ``example``.

    Raises :class:`ConfigError` for a dim that a field has not, and for a size that is no number."""
    found: dict[str, dict[int, int]] = {}
    for name, size in varies.items():
        field, _, dim = name.rpartition(".")
        check_count(f"varies.{name}", size)
        if field in example:
            found.setdefault(field, {})[_dim(name, dim, example[field])] = size
    return found


def check_fields(varies: Mapping[str, int], example: Mapping[str, Tensor]) -> None:
    """Raise :class:`ConfigError` where ``varies`` names a field that a batch has not."""
    for name in varies:
        field = name.rpartition(".")[0]
        if field not in example:
            dims = [f"{one}.{dim}" for one, value in example.items() for dim in range(1, value.dim())]
            raise ConfigError.on("varies", f'"{name}": the batch has no field "{field}"', ", ".join(dims) or "none")


def enlarged(example: Mapping[str, Tensor], sizes: Sizes) -> Mapping[str, Tensor]:
    """Return an example with the largest sizes of the dims that vary."""
    form: Form = tuple(
        (name, tuple(sizes.get(name, {}).get(dim, size) for dim, size in enumerate(shape, 1)), dtype)
        if has_rows(name) else (name, shape, dtype)
        for name, shape, dtype in form_of(example)
    )  # fmt: skip
    return resized(example, form)


def as_large(example: Mapping[str, Tensor], sizes: Sizes) -> list[str]:
    """Return the dims of an example, as "FIELD.DIM", that are as large as one that varies, and are not said to vary."""
    named = {example[name].shape[dim] for name, dims in sizes.items() for dim, n in dims.items()
             if n != example[name].shape[dim]}  # fmt: skip
    rows = {name: value.shape for name, value in example.items() if has_rows(name)}
    return [
        f"{name}.{dim}" for name, shape in rows.items() for dim, size in enumerate(shape)
        if dim and size in named and dim not in sizes.get(name, {})
    ]  # fmt: skip


def check_sizes(fields: Mapping[str, Tensor], most: Sizes) -> None:
    """Raise :class:`ConfigError` where a field is larger than the ``most`` that may come."""
    for name, dims in most.items():
        for dim, size in dims.items():
            if name in fields and (here := fields[name].shape[dim]) > size:
                wrong = f'field "{name}" has size {here} in dim {dim}'
                raise ConfigError.on("batch", wrong, f'at most {size}, as varies says of "{name}.{dim}"')


def shown(batch: Mapping[str, Tensor]) -> str:
    """Return the shapes of a batch's rows in words."""
    return ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in batch.items())


def _dim(name: str, dim: str, value: Tensor) -> int:
    if not dim.isdecimal() or not 0 < int(dim) < value.dim():
        legal = " or ".join(map(str, range(1, value.dim()))) or "none, for it has one number a row"
        raise ConfigError.on("varies", f'"{name}": "{dim}" is no dim of its rows', legal)
    return int(dim)
