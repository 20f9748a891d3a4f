"""Arguments of a user's model that are more than tensors in containers of torch's: dataclasses, mappings, objects that
hold tensors, and lists that have something for each row, of which each rank takes its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.capture.in_form import Unread
from shardwise.core.structure import Node, opened, parts_of, rebuilt
from shardwise.data.checksum import checksum_of_object
from shardwise.graph.layouts import is_nested


class Boxed(NamedTuple):
    """A container that stands for another: an object of the class ``kind`` with these parts by name, or, where that is
    :class:`Held`, a list whose objects have the numbers ``parts``."""

    kind: Any
    parts: Any


class _Object:
    """An object of a list, which lives as long as the call that has it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Held:
    """The objects of a list.  All are equal: what a step computes is captured once, whatever objects it gets."""

    def __init__(self, objects: list[_Object]) -> None:
        self.objects = objects

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "objects of rows"


class Boxes:
    """Puts arguments into boxes, and takes them out in front of the model; it finds objects by their numbers."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._objects: weakref.WeakValueDictionary[int, _Object] = weakref.WeakValueDictionary()
        self._numbers, self._first = count(1), Held([])

    def boxed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with boxes in place of what torch does not walk into, and of lists of text and other
        objects, one for each row: as many as the first tensor has rows."""
        leaves = tree_leaves(self._boxed(args, kwargs, None))
        tensors = [one for one in leaves if isinstance(one, Tensor) and not is_nested(one)]
        sizes = [one.shape[self.dim] for one in tensors if one.dim() > self.dim]
        return self._boxed(args, kwargs, sizes[0] if sizes else None)

    def _boxed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(self._box(one, rows) for one in args), {name: self._box(one, rows) for name, one in kwargs.items()}

    def _box(self, value: Any, rows: int | None, listed: bool = False) -> Any:
        parts = _parts(value)
        if parts is None and not listed:  # of a list, each row may have an object
            parts = _unknown(value)
            if parts is not None:
                return Boxed(type(value), {name: self._box(part, rows) for name, part in parts.items()})
        if parts is None:
            return value
        if rows and type(value) in (list, tuple) and len(value) == rows and not any(map(_is_number, value)):
            return Boxed(*self._numbered(value))
        names, node = _node(value, parts)
        listed = listed or type(value) in (list, tuple)
        found = {name: self._box(part, rows, listed) for name, part in zip(names, parts.values(), strict=True)}
        if hasattr(type(value), "__dataclass_fields__"):
            return Boxed(type(value), dict(zip(parts, found.values(), strict=True)))
        return rebuilt(node, found)

    def _numbered(self, value: Sequence[Any]) -> tuple[Held, Tensor]:
        """Return the objects and their numbers, in which a checksum tells ranks apart that have others."""
        held = Held([_Object(one) for one in value])
        numbers = [next(self._numbers) << 32 | checksum_of_object(one.value) for one in held.objects]
        self._objects.update(zip(numbers, held.objects, strict=True))
        self._first = self._first if self._first.objects else held
        return held, torch.tensor(numbers)

    def unboxed(self, value: Any) -> Any:
        """Return arguments as they were before they were boxed; of a list the objects whose numbers are there."""
        if isinstance(value, Boxed):
            if not isinstance(value.kind, Held):
                inner = {name: self.unboxed(part) for name, part in value.parts.items()}
                return rebuilt(Node(value.kind, tuple(inner), tuple(inner)), inner)
            if type(value.parts) is not Tensor:  # it is captured, or nothing is computed but shapes
                return Unread("a list", "objects")
            known = (self._objects.get(number, self._first.objects[0]) for number in value.parts.tolist())
            return [one.value for one in known]
        parts = _parts(value)
        if parts is None:
            return value
        names, node = _node(value, parts)
        return rebuilt(node, {n: self.unboxed(part) for n, part in zip(names, parts.values(), strict=True)})


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container that torch would walk into, or of a dataclass; None for others."""
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    dataclass = hasattr(type(value), "__dataclass_fields__") and not isinstance(value, Mapping)
    return parts_of(value) if named or dataclass or type(value) in (list, tuple, dict) else None


def _unknown(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a mapping or an object with tensors that torch would not walk into; None for others."""
    leaves = tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return None
    return dict(value) if isinstance(value, Mapping) else opened(value)


def _node(value: Any, parts: Mapping[Any, Any]) -> tuple[tuple[str, ...], Node]:
    names = tuple(map(str, range(len(parts))))
    return names, Node(type(value), tuple(parts), names)


def _is_number(value: Any) -> bool:
    """Whether a part of a list is, or has, a tensor or a number: then the list is a container as any other."""
    parts = None if isinstance(value, Tensor) else parts_of(value)
    inner = [value] if parts is None else list(parts.values())
    return any(isinstance(one, Tensor | int | float) if parts is None else _is_number(one) for one in inner)
