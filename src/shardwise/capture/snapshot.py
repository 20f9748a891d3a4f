"""What Python values are at a moment: a later look, compared with it, tells which of them have changed.

Lists, dicts and objects are looked into, and so are the globals and closures that a user's functions read. Each object
is looked into where it is first met.
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import json
import random
import sys
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.core.errors import of_user
from shardwise.graph.torch_private import has_storage, storage_key, version, without_modes

BASES = ("torch", "builtins", "abc", "typing")  # packages of classes that are not looked into
DEPTH = 8  # of lists in lists
LARGE = 10_000  # the most items of a list or dict that are looked at
SAMPLE = 1 << 16  # of the elements of an array that are looked at
LARGEST = 1 << 40  # an integer that means something to a forward
FEW = 1 << 12  # of the elements of a tensor, in each step
CLOSED = ("torch", "shardwise", "logging", "threading", "multiprocessing", "concurrent", "asyncio")
"""The packages whose objects (optimizers, loggers, locks) are not looked into."""
PLAIN = (
    int, float, complex, str, bytes, type(None), range, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format,
)  # fmt: skip


class Itself(NamedTuple):
    """A value that is compared by what it is and not by what it holds, but for its ``state``, where that is known."""

    value: Any
    state: Any = None


class Parts(NamedTuple):
    """A list, a dict or an object, by its items."""

    value: Any
    items: dict[Any, Any]


class Difference(NamedTuple):
    """Where two looks differ, as a suffix of the value's name (``.scale``, ``[3]``), and what was and is there."""

    suffix: str
    before: Any
    after: Any


class Look:
    """One look at many values; ``own`` has the ids of tensors that are looked at by others, ``functions`` the user's
    functions that were met, and ``kinds`` the classes."""

    def __init__(self, own: Container[int]) -> None:
        self._own, self._seen = own, set[int]()
        self.functions: list[FunctionType] = []
        self.kinds: dict[type, None] = {}

    def pass_by(self, values: Iterable[Any]) -> None:
        """Do not look into these, for others do."""
        self._seen.update(map(id, values))

    def __call__(self, value: Any, depth: int = DEPTH) -> Any:
        """Return a value as it is now, as plain values, :class:`Itself` and :class:`Parts`."""
        if isinstance(value, Tensor):
            if id(value) in self._own:  # it may be one that raises wherever it is used
                return "its own"
            place = storage_key(value) if has_storage(value) else 0  # ``.data = …`` gives a tensor another
            return Itself(value, (version(value), place, _values(value)))
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, weakref.ref):
            return "a weak reference"
        if isinstance(value, (set, frozenset)):
            return Itself(type(value), frozenset(value))
        state = _state(value)
        if state is not None or not depth or id(value) in self._seen:
            return Itself(value, state)
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            if of_user(value.__code__.co_filename):
                self.functions.append(value)
            return Itself(value)
        if of_user(_file(type(value))):
            self.kinds.update(dict.fromkeys(type(value).__mro__))
        items = _items(value)
        if items is None or len(items) > LARGE:
            return Itself(value, None if items is None else len(items))
        return Parts(value, {key: self(one, depth - 1) for key, one in items.items()})

    def of_functions(self) -> Iterator[tuple[tuple[str, str], Any]]:
        """Yield what the functions and classes that were met have or read beside arguments, by (where, name)."""
        count, known = Counter[str](), set[type]()
        while self.functions or self.kinds.keys() - known:
            for kind in [one for one in self.kinds if one not in known]:
                known.add(kind)
                if kind.__module__.partition(".")[0] not in BASES:
                    yield from ((("", f"{kind.__qualname__}.{name}"), self(one)) for name, one in _of_class(kind))
            if not self.functions:
                continue
            function = self.functions.pop()
            count[function.__qualname__] += 1  # a factory makes several of one name
            place = function.__qualname__
            place += f" ({count[place]})" if count[place] > 1 else ""
            kept = {"__defaults__": function.__defaults__, "__kwdefaults__": function.__kwdefaults__}
            for name, value in (kept | function.__dict__).items():
                yield (place, name), self(value)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                try:
                    yield (place, name), self(cell.cell_contents)
                except ValueError:  # the cell is empty
                    continue
            names = _names(function.__code__)
            for name in sorted(set(named_globals(function.__code__)) & function.__globals__.keys()):
                for at, one in _read(name, function.__globals__[name], names):
                    yield ("" if "." in at else str(function.__module__), at), self(one)


def named_globals(code: CodeType) -> Iterator[str]:
    """Yield the globals that a function reads or writes, and those of functions inside it."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"))
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from named_globals(one)


def _names(code: CodeType) -> set[str]:
    """Return the names that a function's code, and that of functions inside it, reads from elsewhere."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def _read(name: str, value: Any, names: Container[str], depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads of a global: of a user's class or file that is what its code names."""
    if not isinstance(value, type | ModuleType):
        yield name, _plain_function(value)
    elif depth and of_user(_file(value)):
        for key, one in list(vars(value).items()):
            if key in names:
                place = value.__qualname__ if isinstance(value, type) else name
                yield from _read(f"{place}.{key}", one, names, depth - 1)


def _file(value: type | ModuleType) -> str:
    """Return the file in which a class or a Python module stands."""
    home = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    return getattr(home, "__file__", None) or "<frozen"


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the values and functions that stand in a class."""
    for name, value in list(vars(kind).items()):
        if name == "__call__" or not name.startswith(("__", "_abc_")):
            yield name, _plain_function(value)


def _plain_function(value: Any) -> Any:
    """Return the function in a property, or in a static or class method; any other value as it is."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _reached(method: MethodType) -> set[str]:
    """Return the names that a method reads, and other methods of its object that it may call."""
    names, due = set[str](), [method.__func__]
    while due:
        code = getattr(due.pop(), "__code__", None)
        new = _names(code) - names if isinstance(code, CodeType) else set[str]()
        names |= new
        kinds = [vars(kind) for kind in type(method.__self__).__mro__]
        due += [_plain_function(kind[name]) for name in new for kind in kinds if name in kind]
    return names


def _state(value: Any) -> Any:
    """Return the state of what numbers are drawn from, and the content of arrays of numpy; None for all else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        some = value.flat[:: max(value.size // SAMPLE, 1)]
        return value.shape, str(value.dtype), hashlib.sha256(some.tobytes()).digest()
    if isinstance(value, numpy.generic):
        return value.dtype.str, value.tobytes()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr([one.tobytes() if hasattr(one, "tobytes") else one for one in value.get_state()])
    return None


def _values(tensor: Tensor) -> int:
    """Return a checksum of some values of a tensor, for a write through ``.data`` tells nobody; 0 where they are not on
    the host, which would have to wait for them."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type != "cpu" or not has_storage(tensor):
        return 0
    with without_modes(), torch.no_grad():
        some = tensor.detach().resolve_conj().resolve_neg().flatten()
        some = some[:: max(some.numel() // FEW, 1)].contiguous()
        return zlib.crc32((torch.view_as_real(some) if some.is_complex() else some).view(torch.uint8).numpy())


def _items(value: Any) -> Mapping[Any, Any] | None:
    """Return what a list, dict or object holds, by name; None for what cannot be looked into."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    closed = type(value).__module__.partition(".")[0] in CLOSED and not isinstance(value, nn.Module)
    if closed or isinstance(value, (type, ModuleType)):
        return None
    if isinstance(value, MethodType):
        reached, items = _reached(value), _items(value.__self__) or {}
        return {".__func__": value.__func__} | {k: v for k, v in items.items() if str(k).lstrip(".") in reached}
    if isinstance(value, partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    names = getattr(value, "__dict__", None)
    if names is None and not slots:
        return None
    found = {f".{name}": one for name, one in dict(names or {}).items()}
    return found | {f".{name}": getattr(value, name) for name in slots if not name.startswith("__")}


def difference(before: Any, after: Any) -> Difference | None:
    """Return the first place in which two looks at a value differ."""
    if isinstance(before, Parts) and isinstance(after, Parts) and type(before.value) is type(after.value):
        if before.items.keys() != after.items.keys():
            return Difference("", shown(before), shown(after))
        for key, one in before.items.items():
            found = difference(one, after.items[key])
            if found is not None:
                place = key if isinstance(key, str) and key.startswith(".") else f"[{key!r}]"
                return found._replace(suffix=place + found.suffix)
        return None
    if isinstance(before, Itself) and isinstance(after, Itself):
        # Values with a state are compared by it: a copy that holds the same is as good.
        alike = before.state == after.state
        known = before.state is not None and not isinstance(before.value, Tensor)
        if alike and (before.value is after.value or known and type(before.value) is type(after.value)):
            return None
    elif type(before) is type(after) and (before == after or before != before):  # a NaN stays what it is
        return None
    return Difference("", shown(before), shown(after))


def plain(look: Any) -> Any:
    """Return a look without what a copy of all that was looked at would not share: an object that was not looked into
    is told by its class, a function by its code."""
    if isinstance(look, Parts):
        keys = (key if isinstance(key, PLAIN) else type(key) for key in look.items)
        return type(look.value), list(zip(keys, map(plain, look.items.values()), strict=True))
    if not isinstance(look, Itself):
        return look
    value, state = look
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.requires_grad, state[-1]
    if isinstance(state, frozenset):
        return value, frozenset(one if isinstance(one, PLAIN) else type(one) for one in state)
    if isinstance(value, type | ModuleType):
        return value
    return value.__code__ if isinstance(value, FunctionType) else (type(value), state)


def told(one: Any) -> Any:
    """Return a value of :func:`plain` as what JSON can write, which is the same in another process: hashes and
    addresses, which are not, are told by their size."""
    if isinstance(one, PLAIN):
        return "large" if isinstance(one, int) and abs(one) > LARGEST else repr(one)
    if isinstance(one, (list, tuple)):
        return [told(item) for item in one]
    if isinstance(one, dict):
        return [[told(key), told(value)] for key, value in one.items()]
    if isinstance(one, frozenset):
        return sorted(json.dumps(told(item)) for item in one)
    if isinstance(one, CodeType):
        return [one.co_filename, one.co_firstlineno, one.co_qualname, file_digest(one.co_filename)]
    if isinstance(one, type):
        return [one.__module__, one.__qualname__]
    return one.__name__ if isinstance(one, ModuleType) else told(type(one))


@cache
def file_digest(path: str) -> str:
    """Return a hash of what is in a file; "nowhere" where it cannot be read."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return "nowhere"


def shown(look: Any) -> Any:
    """Return what a message shows of a look."""
    if isinstance(look, Parts):
        if isinstance(look.value, (list, tuple, deque)):
            return [shown(one) for one in look.items.values()]
        if isinstance(look.value, dict):
            return {key: shown(one) for key, one in look.items.items()}
        return look.value
    return look.value if isinstance(look, Itself) else look
