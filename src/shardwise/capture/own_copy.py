"""Copies of what a user's function keeps: in its closure, its defaults, the object that it is a method of, and the
globals that it names. A trial calls the copy, so that the user's own objects never see its numbers.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.snapshot import named_globals
from shardwise.capture.state import kept_tensors
from shardwise.core.errors import of_user


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


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
