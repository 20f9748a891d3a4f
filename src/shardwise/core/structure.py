"""The structure of a batch: a tree of the containers that users write, whose leaves have names by their path."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.fields import WHOLE

ONLY = "batch"
"""The name of the only leaf of a batch that is no container."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A container of type ``kind``: it has ``parts``, containers or names of leaves, at ``keys``."""

    kind: Any
    keys: tuple[Any, ...]
    parts: tuple[Node | str, ...]


Tree = Node | str
"""A container, or the name of a leaf."""


def parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a mapping, list, tuple, named tuple or dataclass by key, index or name; None for others."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return None


def opened(value: Any) -> dict[Any, Any] | None:
    """Return the parts of an object of a user's class that holds arrays: what its ``to_dict`` gives, if the class has
    ``from_dict`` too, and else its attributes; None for any other object."""
    if isinstance(value, type) or _is_array(value):
        return None
    if hasattr(type(value), "to_dict") and hasattr(type(value), "from_dict"):
        parts = value.to_dict()
    else:  # what can be called is no batch, but a module or a function
        parts = {} if callable(value) else getattr(value, "__dict__", {})
    return dict(parts) if isinstance(parts, Mapping) and _has_array(parts) else None


def _has_array(parts: Mapping[Any, Any]) -> bool:
    return any(_is_array(one) or isinstance(one, dict) and _has_array(one) for one in parts.values())


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array, by the protocol that all libraries of arrays share."""
    return hasattr(type(value), "__dlpack__")


def flatten(value: Any, is_leaf: Callable[[Any, str], bool]) -> tuple[Tree, dict[str, Any]]:
    """Return the tree of ``value`` and its leaves by name, such as ``target.boxes`` or ``1``.

    ``is_leaf(part, name)`` may say of a container that it is a leaf.  An object (:func:`opened`) is a container where
    it is the whole batch.  ConfigError where two leaves have one name."""
    leaves: dict[str, Any] = {}

    def walk(part: Any, name: str) -> Tree:
        inner = None if is_leaf(part, name or ONLY) else parts_of(part)
        if inner is None and part is value:
            inner = opened(part)
        if inner is not None:
            below = [walk(one, f"{name}.{key}" if name else str(key)) for key, one in inner.items()]
            return Node(type(part), tuple(inner), tuple(below))
        name = name or ONLY
        if name in leaves:
            raise ConfigError(f'batch: two parts have the name "{name}"; legal: keys without dots')
        leaves[name] = part
        return name

    return walk(value, ""), leaves


def same(one: Tree, other: Tree, any_mapping: bool = False) -> bool:
    """Whether two trees are the same, but for the order of the keys of mappings; lists are as good as tuples, for
    torch's collator makes one of the other, and with ``any_mapping`` mappings of one class as good as of another."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    here, there = (dict(zip(node.keys, node.parts, strict=True)) for node in (one, other))
    mappings = issubclass(one.kind, Mapping) and issubclass(other.kind, Mapping)
    ordered = mappings or one.keys == other.keys
    alike = (mappings and any_mapping) or one.kind is other.kind or {one.kind, other.kind} == {list, tuple}
    return alike and ordered and here.keys() == there.keys() and all(
        same(part, there[key], any_mapping) for key, part in here.items()
    )  # fmt: skip


def rebuilt(tree: Tree, leaves: Mapping[str, Any]) -> Any:
    """Return a batch of this structure with these leaves."""
    if isinstance(tree, str):
        return leaves[tree]
    parts = [rebuilt(one, leaves) for one in tree.parts]
    if issubclass(tree.kind, Mapping):
        return _mapping(tree.kind, dict(zip(tree.keys, parts, strict=True)))
    if issubclass(tree.kind, tuple) and hasattr(tree.kind, "_fields"):
        return tree.kind(*parts)
    if issubclass(tree.kind, list | tuple):
        return tree.kind(parts)
    if not dataclasses.is_dataclass(tree.kind) and hasattr(tree.kind, "from_dict"):
        return tree.kind.from_dict(dict(zip(tree.keys, parts, strict=True)))
    made = tree.kind.__new__(tree.kind)  # without __init__ and __post_init__: this is what they have made
    for name, part in zip(tree.keys, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def _mapping(kind: Any, named: dict[Any, Any]) -> Any:
    """Return a mapping of a class."""
    if kind in (dict, defaultdict):
        return named
    try:
        return kind(named)
    except TypeError as error:
        raise ConfigError.on("batch", f"no {kind.__name__} is made of a dict ({error})", "dict(...) of it") from error


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is the same in all batches of a kind: their tree, what each leaf is, and the values of the constants.

    ``kinds`` are by name of a leaf: ``rows`` (a tensor that has the rows in its first dim), ``whole`` (a tensor without
    them), ``int`` or ``float`` (a number: a tensor without dims), ``objects`` (a list of an object for each row, of
    which the field has numbers), ``object`` (one object for all rows) and ``constant``.
    """

    tree: Tree
    kinds: Mapping[str, str]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether a batch is a dict of tensors with rows, by text, which needs no rebuilding."""
        tree = self.tree
        flat = isinstance(tree, Node) and tree.kind is dict and tree.parts == tree.keys
        return flat and set(self.kinds.values()) == {"rows"}

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what tells forms of one structure apart: their constants, which may be equal and of other types."""
        return tuple((name, type(one), one) for name, one in self.constants.items())


def changed_constant(form: Structure, before: Structure) -> str:
    """Return the name of a constant that has another value, or type, than before."""
    old = {name: (kind, value) for name, kind, value in before.key}
    return next(str(name) for name, kind, value in form.key if old[name] != (kind, value))


class Fields(dict[str, Any]):
    """The tensors of a batch by name, with the form that the batch had, and its objects by their numbers."""

    def __init__(
        self, fields: Mapping[str, Any], form: Structure | None = None, objects: Mapping[int, Any] | None = None
    ) -> None:
        super().__init__(fields)
        self.form, self.objects = form, objects or {}

    def like(self, fields: Mapping[str, Any]) -> Fields:
        """Return other tensors of the same form, such as some of the rows."""
        return Fields(fields, self.form, self.objects)


def like(fields: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``fields`` with the form of another batch, if that has one."""
    return other.like(fields) if isinstance(other, Fields) else fields


def structure_of(fields: Mapping[str, Any]) -> Structure | None:
    """Return the form that a batch had; None where it was a dict of tensors."""
    return fields.form if isinstance(fields, Fields) else None


def objects_of(fields: Mapping[str, Any]) -> Mapping[int, Any]:
    """Return the objects of a batch by the numbers that fields have of them."""
    return fields.objects if isinstance(fields, Fields) else {}


def check_alike(fields: Mapping[str, Any], first: Mapping[str, Any], where: str, example: bool = False) -> None:
    """Raise :class:`ConfigError` unless a batch has the form of the first one, and fields of the same dtypes and
    numbers of dims: it names the part, what it is and what it was.  If the first is the ``example``, any mapping may
    stand for one of its: forward gets those of the example."""
    what = "the example" if example else "the first batch"
    here, there = structure_of(fields), structure_of(first)
    if here is None or there is None:
        return
    for name in [*there.kinds, *here.kinds]:
        now, before = _described(name, fields, here), _described(name, first, there)
        if now != before:
            raise ConfigError.on(where, f'"{name}" is {now}', f"{before}, as in {what}")
    if not same(here.tree, there.tree, any_mapping=example):
        raise ConfigError.on(where, "its containers are of other types", f"those of {what}")


def _described(name: str, fields: Mapping[str, Any], form: Structure) -> str:
    """Return what a part of a batch is, in words."""
    kind = form.kinds.get(name)
    if kind is None:
        return "not there"
    if kind == "constant":
        return f"of type {type(form.constants[name]).__name__}"
    if kind in ("rows", "whole"):
        value = fields[name if kind == "rows" else f"{WHOLE}{name}"]
        dtype, rows = str(value.dtype).removeprefix("torch."), "with" if kind == "rows" else "without"
        return f"a tensor of {dtype} with {value.ndim} dims, {rows} rows"
    words = {"objects": "a list of an object for each row", "object": "an object"}
    return words.get(kind, f"of type {kind}")
