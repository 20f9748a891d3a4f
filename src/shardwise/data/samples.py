"""This module reads the samples of a dataset, checks them one by one and stacks them into rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError, did_you_mean
from shardwise.core.structure import Fields, Structure, flatten, same
from shardwise.graph.layouts import check_layout

from .forming import kind_of, numbers_of, tensor_of

NUMBERS = (bool, int, float, np.ndarray, np.generic)


class Samples:
    """This wraps a map-style dataset (``len`` and integer indexing) of samples of one structure: dicts, tuples, named
    tuples, dataclasses and lists of each other, of tensors of equal shapes and dtypes, and of other things.

    Sample 0 sets the structure, the shapes and the dtypes; any other sample that differs raises ConfigError naming the
    sample, the field, what was found and what was expected. Numbers and numpy arrays become tensors. Tensors of samples
    are stacked; of text and other objects a batch has a list, with one for each row.

    A dataset with a method ``read_rows(indices)`` gives many samples at once, as fields of shape (rows, *shape), which
    are not checked. A string ``digest`` of a dataset identifies its data; without one its size and sample 0 do.
    """

    def __init__(self, dataset: Any, where: str = "data") -> None:
        self.where = where
        for method, use in (("__len__", "len(dataset)"), ("__getitem__", "dataset[index]")):
            if not hasattr(dataset, method):
                wrong = f"a dataset must support {use}; {type(dataset).__name__} does not"
                raise ConfigError.on("data", wrong, "a map-style dataset, an IterableDataset or a DataLoader")
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
            if self._form.kinds[name] == "objects":
                one = self.reference.objects[int(value)]
                whole.update(f"{name} {one if isinstance(one, str) else type(one).__name__}".encode())
                continue
            whole.update(f"{name} {tuple(value.shape)} {value.dtype} {value.cpu().tolist()}".encode())
        return whole.hexdigest()

    @property
    def _form(self) -> Structure:
        assert self.reference.form is not None
        return self.reference.form

    def read(self, indices: Iterable[int]) -> Fields:
        """Return the samples at ``indices`` as fields of shape (rows, *shape), also for no rows at all."""
        if hasattr(self.dataset, "read_rows"):
            return self.reference.like(self.dataset.read_rows(np.fromiter(indices, np.int64)))
        rows = [self._checked(int(index)) for index in indices]
        if not rows:
            return self.reference.like({n: value.new_empty((0, *value.shape)) for n, value in self.reference.items()})
        objects = {number: one for row in rows for number, one in row.objects.items()}
        return Fields({name: torch.stack([row[name] for row in rows]) for name in self.reference}, self._form, objects)

    def _checked(self, index: int) -> Fields:
        found = self._fields(index)
        _check_containers(f"{self.where}: sample {index}", found, self.reference)
        for name in sorted(found.keys() ^ self.reference.keys()):
            extra = name in found
            what = f'a field "{name}", which sample 0 has not' if extra else f'no field "{name}", which sample 0 has'
            hint = did_you_mean(name, self.reference) if extra else ""
            legal = f"the same fields in every sample ({', '.join(self.reference)})."
            raise ConfigError.on(self.where, f"sample {index} has {what}", legal, hint)
        assert found.form is not None
        for name, expected in self.reference.items():
            value, where = found[name], f'{self.where}: sample {index}, field "{name}"'
            kinds = found.form.kinds[name], self._form.kinds[name]
            if kinds[0] != kinds[1]:
                words = ["an object" if kind == "objects" else "a tensor" for kind in kinds]
                raise ConfigError(f"{where}: {words[0]}, expected {words[1]} as in sample 0")
            for what in ("shape", "dtype"):
                here, there = getattr(value, what), getattr(expected, what)
                if here != there:
                    here, there = (tuple(x) if what == "shape" else x for x in (here, there))
                    hint = "; legal: one shape, or a collate_fn that makes batches of several" * (what == "shape")
                    raise ConfigError(f"{where}: {what} {here}, expected {there} as in sample 0{hint}")
        if not same(found.form.tree, self._form.tree):
            wrong = f"sample {index} has containers of other types than sample 0"
            raise ConfigError.on(self.where, wrong, "one structure for all samples")
        return found

    def _fields(self, index: int) -> Fields:
        try:
            item = self.dataset[index]
        except ConfigError:
            raise
        except Exception as error:
            error.add_note(f"while reading sample {index} of the dataset ({type(self.dataset).__name__})")
            raise
        tree, leaves = flatten(item, lambda part, name: False)
        objects: dict[int, Any] = {}
        where = f"{self.where}: sample {index}"
        found = {name: _tensor(value, f'{where}, field "{name}"', objects) for name, value in leaves.items()}
        kinds = {name: "rows" if isinstance(leaves[name], (Tensor, *NUMBERS)) else "objects" for name in leaves}
        if "rows" not in kinds.values():
            what = kind_of(item) if isinstance(tree, str) else "without any tensor" if leaves else "an empty dict"
            raise ConfigError(f"{where} is {what}; legal: a dict, a tuple or a dataclass with tensors")
        return Fields(found, Structure(tree, kinds), objects)


def _tensor(value: object, where: str, objects: dict[int, Any]) -> Tensor:
    """Return what stands for a part of a sample: itself, or the number of an object, a tensor without dims."""
    if isinstance(value, Tensor):
        check_layout(where, "it", value)
        return value.detach()
    return tensor_of(value, where) if isinstance(value, NUMBERS) else numbers_of([value], objects)[0]


def _check_containers(where: str, found: Fields, reference: Fields) -> None:
    """Raise :class:`ConfigError` where a part is a container that was none in sample 0, or is none any more."""
    ways = ((found, reference, "a container", "a single value"), (reference, found, "a single value", "a container"))
    for inner, outer, is_now, was in ways:
        for name in inner:
            if above := next((one for one in outer if name.startswith(f"{one}.")), None):
                raise ConfigError.on(f'{where}, field "{above}"', is_now, f"{was}, as in sample 0")
