"""This module reads the samples of a dataset, checks them one by one and stacks them into rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, did_you_mean

Fields = dict[str, Tensor]


class Samples:
    """This wraps a map-style dataset (``len`` and integer indexing) of dicts of tensors of equal shapes and dtypes.

    Sample 0 sets the fields, their shapes and dtypes; any other sample that differs raises ConfigError naming the
    sample, the field, what was found and what was expected. Numbers and numpy arrays become tensors.

    A dataset with a method ``read_rows(indices)`` gives many samples at once, as fields of shape (rows, *shape), which
    are not checked. A string ``digest`` of a dataset identifies its data; without one its size and sample 0 do.
    """

    def __init__(self, dataset: Any) -> None:
        for method, use in (("__len__", "len(dataset)"), ("__getitem__", "dataset[index]")):
            if not hasattr(dataset, method):
                wrong = f"a dataset must support {use}; {type(dataset).__name__} does not"
                raise ConfigError.on("data", wrong, "a map-style dataset of dicts of tensors")
        self.dataset = dataset
        self.size = len(dataset)
        if self.size < 1:
            raise ConfigError(f"data: the dataset ({type(dataset).__name__}) is empty; legal: one sample or more")
        self.reference = self._fields(0)

    @property
    def digest(self) -> str:
        """Return a hash that identifies the data, in hex."""
        whole = hashlib.sha256(str(self.size).encode())
        given = getattr(self.dataset, "digest", None)
        if isinstance(given, str):
            whole.update(given.encode())
            return whole.hexdigest()
        for name, value in sorted(self.reference.items()):
            whole.update(f"{name} {tuple(value.shape)} {value.dtype} {value.cpu().tolist()}".encode())
        return whole.hexdigest()

    def read(self, indices: Iterable[int]) -> Fields:
        """Return the samples at ``indices`` as fields of shape (rows, *shape), also for no rows at all."""
        if hasattr(self.dataset, "read_rows"):
            found: Fields = self.dataset.read_rows(np.fromiter(indices, np.int64))
            return found
        rows = [self._checked(int(index)) for index in indices]
        if not rows:
            return {name: value.new_empty((0, *value.shape)) for name, value in self.reference.items()}
        return {name: torch.stack([row[name] for row in rows]) for name in self.reference}

    def _checked(self, index: int) -> Fields:
        found = self._fields(index)
        for name in sorted(found.keys() ^ self.reference.keys()):
            extra = name in found
            what = f'a field "{name}", which sample 0 has not' if extra else f'no field "{name}", which sample 0 has'
            hint = did_you_mean(name, self.reference) if extra else ""
            legal = f"the same fields in every sample ({', '.join(self.reference)})."
            raise ConfigError.on("data", f"sample {index} has {what}", legal, hint)
        for name, expected in self.reference.items():
            value = found[name]
            for what in ("shape", "dtype"):
                here, there = getattr(value, what), getattr(expected, what)
                if here != there:
                    here, there = (tuple(x) if what == "shape" else x for x in (here, there))
                    where = f'data: sample {index}, field "{name}"'
                    raise ConfigError(f"{where}: {what} {here}, expected {there} as in sample 0")
        return found

    def _fields(self, index: int) -> Fields:
        try:
            item = self.dataset[index]
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"while reading sample {index} of the dataset ({type(self.dataset).__name__})")
            raise
        if not isinstance(item, Mapping) or not item:
            what = "an empty dict" if isinstance(item, Mapping) else _kind(item)
            raise ConfigError(f"data: sample {index} is {what}; legal: a dict of tensors")
        return {self._name(index, name): self._tensor(index, name, value) for name, value in item.items()}

    @staticmethod
    def _name(index: int, name: object) -> str:
        if not isinstance(name, str):
            raise ConfigError(
                f"data: sample {index} has the field {name!r}, {_kind(name)}; legal: names of fields as text"
            )
        return name

    @staticmethod
    def _tensor(index: int, name: object, value: object) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach()
        if isinstance(value, bool | int | float | np.ndarray | np.generic):
            try:
                return torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ConfigError(f'data: sample {index}, field "{name}" is no tensor: {error}') from error
        raise ConfigError(
            f'data: sample {index}, field "{name}" is {_kind(value)}; legal: a tensor, a number or a numpy array'
        )


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
