"""Copies of what a user's function keeps: in its closure, its defaults, the object that it is a method of, and the
globals that it names. A trial calls the copy, so that the user's own objects never see its numbers.
"""

from __future__ import annotations

import copy
import dis
import types
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.state import kept_tensors
from shardwise.core.errors import of_user

PLAIN = (int, float, complex, str, bytes, bool, type(None))
SEQUENCES = (list, tuple, set, frozenset, deque)
DEPTH = 8  # of objects inside objects that are looked at for state


class OwnCopy:
    """Makes copies that share among each other what the originals share.

    The objects ``kept``, by id, are not copied. Raises whatever ``copy.deepcopy`` raises for objects without copies."""

    def __init__(self, kept: Mapping[int, Any]) -> None:
        self._memo: dict[int, Any] = dict(kept)

    def of(self, value: Any) -> Any:
        """Return the copy of a function, or of anything that one keeps."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        found = self._made(value)
        self._memo[id(value)] = found
        return found

    def _made(self, value: Any) -> Any:
        if isinstance(value, (types.ModuleType, type)):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value) if of_user(value.__code__.co_filename) else value
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if type(value) is partial:
            return partial(self.of(value.func), *map(self.of, value.args), **self._dict(value.keywords, {}))
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, Tensor) and not value.is_leaf:
            return value.detach().clone()
        if isinstance(value, nn.Module):
            self._memo |= kept_tensors(value)
        if type(value) is list:
            items = self._memo[id(value)] = list[Any]()
            items.extend(map(self.of, value))
            return items
        if type(value) is dict:
            return self._dict(value, {})
        if type(value) is tuple:
            return tuple(map(self.of, value))
        return copy.deepcopy(value, self._memo)

    def _dict(self, value: dict[Any, Any], found: dict[Any, Any]) -> dict[Any, Any]:
        self._memo[id(value)] = found
        found.update((key, self.of(one)) for key, one in value.items())
        return found

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        names = function.__globals__
        own = self._memo.setdefault(id(names), dict(names))
        cells = tuple(map(self._cell, function.__closure__ or ()))
        made = types.FunctionType(function.__code__, own, function.__name__, None, cells)
        self._memo[id(function)] = made
        for name in named_globals(function.__code__):
            if name in names:
                own[name] = self.of(names[name])
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if _filled(old) and not _filled(cell):
                cell.cell_contents = self.of(old.cell_contents)
        made.__defaults__, made.__kwdefaults__ = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        made.__dict__.update(self.of(function.__dict__))
        return made

    def _cell(self, old: types.CellType) -> types.CellType:
        """Return the copy of a variable of a closure, which other functions may share; its value is set later."""
        made: types.CellType = self._memo.setdefault(id(old), types.CellType())
        return made


def named_globals(code: types.CodeType) -> Iterator[str]:
    """Yield the globals that a function reads or writes, and those of functions inside it."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"))
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from named_globals(one)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def state_of(value: Any, kept: Mapping[int, Any]) -> list[Any]:
    """Return what a function keeps now, as values that :func:`same_state` compares later: numbers, texts and tensors,
    in the objects that it reaches, but for those of ``kept``."""
    found: list[Any] = []
    _collect(value, found, dict(kept), DEPTH)
    return found


def same_state(one: list[Any], other: list[Any]) -> bool:
    """Whether two states are the same."""
    return len(one) == len(other) and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
    return bool(one == other) or one != one


def _collect(value: Any, found: list[Any], seen: dict[int, Any], depth: int) -> None:
    if isinstance(value, PLAIN):
        found.append(value)
        return
    if id(value) in seen or not depth or isinstance(value, (types.ModuleType, type)):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        found.append(value.detach().clone())
    elif hasattr(value, "tobytes"):  # an array or a number of numpy
        found.append(value.tobytes())
    else:
        parts = list(_parts(value))
        found.append(len(parts))
        for one in parts:
            _collect(one, found, seen, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects that an object is made of."""
    if isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _filled(cell))
        yield from (value.__defaults__, value.__kwdefaults__, value.__dict__)
        yield from (value.__globals__.get(name) for name in named_globals(value.__code__))
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, SEQUENCES):
        yield from value
    elif hasattr(value, "__dict__"):
        yield from vars(value).values()
