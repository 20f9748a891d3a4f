"""Batches in the form that users write, as named fields: what a rank takes the rows of, and what all ranks have."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, did_you_mean
from shardwise.core.fields import WHOLE, has_rows
from shardwise.core.structure import Fields, Structure, flatten
from shardwise.graph.layouts import check_layout

CONSTANT = (str, bytes, bool, type(None), enum.Enum, torch.dtype, torch.device, type)
"""What may be in a graph: of another value another graph is captured."""

ROWS = "tensors with rows in their first dim, lists of something for each row, and numbers"


def fields_of(batch: Any, rows: int | None = None, whole: Collection[str] = (), where: str = "batch") -> Fields:
    """Return a whole batch as fields.

    Args:
        batch: containers (:func:`~shardwise.core.structure.parts_of`) of tensors, numpy arrays, numbers, lists of
            something for each row, text and other objects; or an object (:func:`~shardwise.core.structure.opened`).
        rows: the number of rows, where it is known; by default that of the first tensor.
        whole: the names of tensors that have no rows.
        where: what to call the batch in errors.

    Raises :class:`ConfigError`, which names the part, where parts have different numbers of rows or none has any.
    """
    if isinstance(batch, Fields):
        return batch
    if rows is None:
        rows = _rows_in(batch, whole, where)
    if not rows:
        raise ConfigError.on(where, "it has no rows", "a batch of one row or more")
    tree, leaves = flatten(batch, lambda part, name: _is_leaf(part, name, rows, where))
    if unknown := [one for one in whole if one not in leaves]:
        hint = did_you_mean(unknown[0], leaves)
        raise ConfigError.on(where, f'it has no part "{unknown[0]}" for whole', f"{', '.join(leaves)}.", hint)
    made = _Made()
    for name, leaf in leaves.items():
        made.add(name, leaf, rows, name in whole, where)
    fields = {**made.with_rows, **made.without}
    if not made.with_rows or not made.tensors:
        kinds = ", ".join(f"{name}: {kind_of(leaf)}" for name, leaf in leaves.items()) or "nothing"
        raise ConfigError.on(where, f"it has no tensor with rows ({kinds})", ROWS)
    return Fields(fields, Structure(tree, made.kinds, made.constants), made.objects)


def formed(batch: Any, whole: Collection[str] = ()) -> Mapping[str, Tensor]:
    """Return the fields of a batch, which are the batch itself if it is a dict of tensors with as many rows each; of
    those of a loop under ``distribute`` names say which have none."""
    flat = type(batch) in (dict, Fields) and not whole and all(isinstance(name, str) for name in batch)
    if not flat or not all(isinstance(one, Tensor) for one in batch.values()):
        return fields_of(batch, whole=whole)
    for name, one in batch.items():
        check_layout("batch", f'"{name}"', one, not has_rows(name))
    sizes = {one.shape[:1] for name, one in batch.items() if has_rows(name)}
    return batch if len(sizes) == 1 and sizes != {()} else fields_of(batch)


def with_tensors(batch: Any) -> Any:
    """Return a batch with tensors in place of the numpy arrays of a mapping."""
    if not isinstance(batch, Mapping) or not any(isinstance(one, np.ndarray) for one in batch.values()):
        return batch
    return {
        name: tensor_of(one, f'batch: field "{name}"') if isinstance(one, np.ndarray) else one
        for name, one in batch.items()
    }


class _Made:
    """What the leaves of a batch become."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.with_rows: dict[str, Tensor] = {}
        self.without: dict[str, Tensor] = {}
        self.constants: dict[str, Any] = {}
        self.objects: dict[int, Any] = {}
        self.tensors = 0

    def add(self, name: str, leaf: Any, rows: int, whole: bool, where: str) -> None:
        """Note what a leaf is."""
        if isinstance(leaf, np.ndarray):
            leaf = tensor_of(leaf, f'{where}: "{name}"')
        elif isinstance(leaf, np.generic):
            leaf = leaf.item()
        if isinstance(leaf, Tensor):
            self.tensors += 1
            self._tensor(name, leaf.detach(), rows, whole, where)
        elif isinstance(leaf, list | tuple):
            self.kinds[name] = "objects"
            self.with_rows[name] = numbers_of(leaf, self.objects)
            self.tensors += 1
        elif isinstance(leaf, CONSTANT):
            self.kinds[name], self.constants[name] = "constant", leaf
        elif isinstance(leaf, int | float):
            self.kinds[name] = type(leaf).__name__
            self.without[f"{WHOLE}{name}"] = torch.tensor(
                leaf, dtype=torch.int64 if isinstance(leaf, int) else torch.float64
            )
        else:
            self.kinds[name] = "object"
            self.without[f"{WHOLE}{name}"] = numbers_of([leaf], self.objects)[0]

    def _tensor(self, name: str, leaf: Tensor, rows: int, whole: bool, where: str) -> None:
        whole = whole or not leaf.dim()
        check_layout(where, f'"{name}"', leaf, whole)
        if whole:
            self.kinds[name], self.without[f"{WHOLE}{name}"] = "whole", leaf
            return
        if leaf.shape[0] != rows:
            others = ", ".join(f'"{one}" has {len(value)}' for one, value in self.with_rows.items())
            wrong = f'"{name}" has {leaf.shape[0]} rows, and {others or f"the batch has {rows}"}'
            legal = f'{rows} in each, or whole=("{name}",) for a tensor that is the same for all rows'
            raise ConfigError.on(where, wrong, legal)
        self.kinds[name], self.with_rows[name] = "rows", leaf


def numbers_of(found: Collection[Any], objects: dict[int, Any]) -> Tensor:
    """Return numbers of these objects, int64 of shape (number of them,), and note the objects by their numbers."""
    objects.update((id(one), one) for one in found)
    return torch.tensor([id(one) for one in found], dtype=torch.int64)


def tensor_of(value: Any, where: str) -> Tensor:
    """Return a number or a numpy array as a tensor."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"{where} is no tensor: {error}") from error


def kind_of(value: object) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _plain_list(part: Any) -> bool:
    return isinstance(part, list | tuple) and not hasattr(part, "_fields")


def _length(value: Tensor | np.ndarray) -> int:
    """Return the size of the first dim, also of a nested tensor, which has no shape."""
    return value.size(0) if isinstance(value, Tensor) else len(value)


def _rows_in(batch: Any, whole: Collection[str], where: str) -> int:
    """Return the number of rows of the first tensor that is not inside a list, or else the length of the first list."""
    if isinstance(batch, str | bytes):
        raise ConfigError.on(where, f"it is {kind_of(batch)}", ROWS)
    _, leaves = flatten(batch, lambda part, name: part is not batch and _plain_list(part))
    found = [one for name, one in leaves.items() if name not in whole]
    tensors = [_length(one) for one in found if isinstance(one, Tensor | np.ndarray) and one.ndim]
    lists = [len(one) for one in found if _plain_list(one)]
    if not tensors and not lists:
        kinds = ", ".join(f"{name}: {kind_of(one)}" for name, one in leaves.items()) or "nothing"
        raise ConfigError.on(where, f"it has no tensor with rows ({kinds})", ROWS)
    return int((tensors or lists)[0])


def _is_leaf(part: Any, name: str, rows: int, where: str) -> bool:
    """Whether a container is a leaf: a list of as many objects as there are rows, but for the parts of a batch."""
    if not _plain_list(part) or len(part) != rows or name == "batch":
        return False
    tensors = [one for one in part if isinstance(one, Tensor) and one.dim() and _length(one) == rows]
    nested = all(_plain_list(one) and len(one) == rows for one in part)
    if nested or len(tensors) == rows and len({(one.dtype, one.dim()) for one in tensors}) == 1:
        wrong = f'"{name}" is a list of {rows}, as many as there are rows, of which each part has {rows} too'
        legal = "a dict, for parts that each have the rows; one tensor, for rows of one shape"
        raise ConfigError.on(where, f"{wrong}: it may be one for each row, or not", legal)
    return len(tensors) < rows


def rows_of(fields: Mapping[str, Tensor], ranges: Collection[tuple[int, int]]) -> Fields:
    """Return these ranges of the rows of a whole batch; what has no rows stays whole."""
    found = {
        name: torch.cat([value[a:b] for a, b in ranges]) if has_rows(name) else value for name, value in fields.items()
    }
    return fields.like(found) if isinstance(fields, Fields) else Fields(found)
