"""What a forward keeps in Python: a captured graph knows nothing of it, so it is looked for and told.

Buffers that forward assigns, instead of writing to them, are state all the same. Tensors that are plain attributes,
numbers, lists, objects, globals, and the generators of ``random`` and ``numpy.random`` are compared before and after a
forward; where they changed, a trial (``capture/trial.py``) shows whether what forward computes depends on them.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from shardwise.capture.snapshot import Look, difference, plain, told

INTERNAL = ("_parameters", "_buffers", "_modules", "training")
"""Attributes of every module that are no state of its forward, beside the dicts of hooks."""

SHOWN = 60  # the most characters of a value that a message shows


class Change(NamedTuple):
    """What a forward has changed from ``before`` to ``after``: an attribute of a module, by path, or what a function
    reads beside its arguments."""

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

    @property
    def plain(self) -> bool:
        """Whether it was and is a number, a word or nothing."""
        return all(isinstance(one, int | float | str | None) for one in (self.before, self.after))

    def __str__(self) -> str:
        if self.of_tensors:
            kind = "a tensor that is no buffer" if isinstance(self.after, Tensor) else "tensors that are no buffers"
            return f"{self.name} ({kind})"
        before, after = _short(self.before), _short(self.after)
        return f"{self.name} (from {before} to {after})" if before != after else self.name


class PythonState:
    """What a forward may keep or read in Python: the attributes of a ``module`` and of the classes of its parts, the
    globals and closures of the user's ``functions`` and methods, and the generators of random numbers that are not
    torch's."""

    def __init__(self, module: nn.Module, *functions: Any) -> None:
        self.module, self.functions = module, functions
        self.values = self._values()
        self.generators = generators()

    def changes(self, later: PythonState | None = None) -> list[Change]:
        """Return what has changed since, until now or until a later state."""
        found, after = list[Change](), self._values() if later is None else later.values
        for key in {**self.values, **after}:
            one = difference(self.values.get(key), after.get(key))
            if one is not None:
                found.append(Change(key[0], key[1] + one.suffix, one.before, one.after))
        return found

    def _values(self) -> dict[tuple[str, str], Any]:
        look = Look({id(t) for t in (*self.module.parameters(), *self.module.buffers())})
        parts = list(self.module.modules())
        look.pass_by(parts)
        found = {(path, name): look(value) for path, name, value in _attributes(self.module)}
        look.kinds.update(dict.fromkeys(base for one in parts for base in type(one).__mro__))
        for function in self.functions:
            found["", getattr(function, "__name__", type(function).__name__)] = look(function)
        return found | dict(look.of_functions())

    def plain(self) -> Any:
        """Return all that forward could read, in a form that is equal for a copy of the module."""
        modules = dict(self.module.named_modules())
        parts = [(path, type(one), one.training) for path, one in modules.items()]
        learn = [(name, one.requires_grad) for name, one in self.module.named_parameters()]
        hooks = [
            getattr(hook, "__code__", type(hook))
            for one in modules.values() for name, value in vars(one).items()
            if name.endswith("_hooks") and isinstance(value, dict) for hook in value.values()
        ]  # fmt: skip
        return parts, learn, hooks, {key: plain(one) for key, one in self.values.items()}

    def digest(self) -> str:
        """Return a hash of all that forward could read, which is the same in another process."""
        return hashlib.sha256(json.dumps(told(self.plain())).encode()).hexdigest()[:16]

    def drawn(self) -> list[str]:
        """Return the names of the generators that have drawn since."""
        return [name for name, state in generators().items() if self.generators.get(name) != state]


def assigned_buffers(
    module: nn.Module, before: Mapping[str, Tensor], write: Callable[[str, Tensor, Tensor], None]
) -> None:
    """Call ``write(name, old, new)`` for each buffer that is no longer the tensor of ``before``, which is put back."""
    modules = dict(module.named_modules())  # get_submodule refuses scripted modules
    for name, old in before.items():
        path, _, attribute = name.rpartition(".")
        owner = modules[path]
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


def generators() -> dict[str, Any]:
    """Return the states of the generators of random numbers that are not torch's, by name."""
    found: dict[str, Any] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy.random"] = (name, keys.tobytes(), *rest)
    return found


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the generators of Python and numpy back to where they were."""
    numpy, before = sys.modules.get("numpy"), random.getstate()
    theirs = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(theirs)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
