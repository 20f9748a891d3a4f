"""What a forward keeps in Python: a captured graph knows nothing of it, so it is looked for and told.

Buffers that forward assigns, instead of writing to them, are state all the same. Tensors that are plain attributes,
numbers, lists, and the generators of ``random`` and ``numpy.random`` are compared before and after a forward; where
they changed, a second capture shows whether the graph depends on them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from shardwise.graph.sizes import concrete

INTERNAL = ("_parameters", "_buffers", "_modules", "training")
"""Attributes of every module that are no state of its forward, beside the dicts of hooks."""

SHOWN = 60  # the most characters of a value that a message shows


class Change(NamedTuple):
    """An attribute of a module, by path, that a forward has changed from ``before`` to ``after``."""

    module: str
    attribute: str
    before: Any
    after: Any

    @property
    def name(self) -> str:
        """The attribute as a user writes it."""
        return f"{self.module}.{self.attribute}" if self.module else self.attribute

    @property
    def of_tensors(self) -> bool:
        """Whether it is a tensor, or holds some."""
        found: list[Tensor] = []
        fx.node.map_aggregate((self.before, self.after), lambda a: found.append(a) if isinstance(a, Tensor) else None)
        return bool(found)

    def __str__(self) -> str:
        if self.of_tensors:
            kind = "a tensor that is no buffer" if isinstance(self.after, Tensor) else "tensors that are no buffers"
            return f"{self.name} ({kind})"
        return f"{self.name} (from {_short(self.before)} to {_short(self.after)})"


class PythonState:
    """The state of a module in Python, and of the generators of random numbers that are not torch's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = self._values()
        self.generators = _generators()

    def changes(self) -> list[Change]:
        """Return the attributes that have changed since."""
        after = self._values()
        changed = [key for key, value in after.items() if not _equal(self.values.get(key), value)]
        return [Change(*key, self.values.get(key), after[key]) for key in changed]

    def _values(self) -> dict[tuple[str, str], Any]:
        own = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        return {(path, name): _kept(value, own) for path, name, value in _attributes(self.module)}

    def drawn(self) -> list[str]:
        """Return the names of the generators that have drawn since."""
        return [name for name, state in _generators().items() if not _equal(self.generators.get(name), state)]


def impose(module: nn.Module, changes: Sequence[Change]) -> None:
    """Give changed attributes the values that they have after a forward, for a capture puts back those before it.

    Tensors, whose values after a capture nobody knows, get values that they did not have."""
    for one in changes:
        setattr(module.get_submodule(one.module), one.attribute, _another(one.after))


def _another(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _another(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_another(v) for v in value]
    if not isinstance(value, Tensor):
        return value
    like = torch.zeros([concrete(size) for size in value.shape], dtype=value.dtype)  # int() would fix a symbolic size
    return like.logical_not() if value.dtype is torch.bool else like + 7


def assigned_buffers(
    module: nn.Module, before: Mapping[str, Tensor], write: Callable[[str, Tensor, Tensor], None]
) -> None:
    """Call ``write(name, old, new)`` for each buffer that is no longer the tensor of ``before``, which is put back."""
    for name, old in before.items():
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        new = getattr(owner, attribute)
        if new is not old:
            write(name, old, new)
            setattr(owner, attribute, old)


def kept_tensors(module: nn.Module) -> dict[int, Any]:
    """Return copies of the tensors with a history that a module keeps (features, ``weight_norm``'s weights), by id.

    ``copy.deepcopy`` takes them as its memo; by itself it refuses such tensors."""
    found: dict[int, Any] = {}

    def look(value: Any, depth: int = 4) -> None:
        if isinstance(value, Tensor):
            if not value.is_leaf:
                found[id(value)] = value.detach().clone()
        elif depth and isinstance(value, (list, tuple)):
            for one in value:
                look(one, depth - 1)
        elif depth and isinstance(value, dict):
            look(list(value.values()), depth - 1)

    for _, _, value in _attributes(module):
        look(value)
    return found


def _attributes(module: nn.Module) -> list[tuple[str, str, Any]]:
    return [
        (path, name, value)
        for path, one in module.named_modules()
        for name, value in vars(one).items()
        if name not in INTERNAL and not name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        and not name.startswith("_non_persistent") and not isinstance(value, nn.Module)
    ]  # fmt: skip


def _kept(value: Any, own: Container[int], depth: int = 4) -> Any:
    """Return a value that can be compared later: numbers and texts, and lists and dicts of them, as they are now.

    A tensor is itself; the module's ``own`` parameters and buffers, by id, and any other object are left out."""
    if isinstance(value, Tensor):
        return "its own" if id(value) in own else value
    if isinstance(value, (int, float, complex, str, bytes, bool, type(None))):
        return value
    if depth and isinstance(value, dict):
        return {k: _kept(v, own, depth - 1) for k, v in value.items() if isinstance(k, (int, str))}
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return [_kept(v, own, depth - 1) for v in value]
    return type(value).__name__


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if type(one) is not type(other):
        return False
    return bool(one == other) or one != one  # a NaN stays what it is


def _generators() -> dict[str, Any]:
    found: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (name, keys.tobytes(), *rest)
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
