"""Functions that run as written, and parts of them, by name: how a later start finds them again.

A name is that of a module and of a function in it, with a hash of its code, and for a part its place in the function
and the names that it takes; what else a part is follows from the code.
"""

from __future__ import annotations

import hashlib
import inspect
import keyword
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from shardwise.capture.parts import part_of, part_with


class NotNamed(Exception):
    """No name leads to a function."""


def name_of(function: FunctionType, model: nn.Module) -> dict[str, Any]:
    """Return the name of a function, as what JSON can write; raise :class:`NotNamed` where it leads nowhere."""
    part = part_of(function)
    whole = function if part is None else part.function
    name = {"module": whole.__globals__["__name__"], "name": whole.__code__.co_qualname, "code": _hash(whole.__code__)}
    if _whole(name, model) is not whole:
        raise NotNamed(whole.__qualname__)
    if part is not None:
        place = {"path": part.path, "first": part.first, "last": part.last, "taken": part.taken}
        name["part"] = {**place, "innermost": part.innermost, "tested": part.tested, "written": part.written}
    return name


def named(name: Mapping[str, Any], model: nn.Module) -> FunctionType:
    """Return the function of a name, in a model or anywhere; raise :class:`NotNamed` where there is none, or its code
    is another."""
    whole, part = _whole(name, model), name.get("part")
    if part is None:
        return whole
    taken = tuple(map(str, part["taken"]))
    if not all(word.isidentifier() and not keyword.iskeyword(word) for one in taken for word in one.split(".")):
        raise NotNamed(f"the names {taken}")
    path = tuple((str(block), int(at)) for block, at in part["path"])
    first, last, innermost, tested = part["first"], part["last"], bool(part["innermost"]), bool(part["tested"])
    written = tuple(map(str, part["written"]))
    if not all(one in taken and one.isidentifier() for one in written):
        raise NotNamed(f"the names {written}")
    return part_with(whole, path, int(first), int(last), taken, innermost, tested, written)


def _whole(name: Mapping[str, Any], model: nn.Module) -> FunctionType:
    *outer, last = name["name"].split(".")
    for place in _places(name["module"], outer, model):
        found = place.get(last)
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        while found is not None:
            if isinstance(found, FunctionType):
                code = found.__code__
                if (code.co_qualname, _hash(code)) == (name["name"], name["code"]):
                    return found
            found = getattr(found, "__wrapped__", None)
    raise NotNamed(name["name"])


def _places(module: str, outer: list[str], model: nn.Module) -> Iterator[Mapping[str, Any]]:
    """Yield where a function of a class, or of a module, may stand: a class of the model need have no name."""
    for kind in dict.fromkeys(kind for one in model.modules() for kind in type(one).__mro__):
        if kind.__module__ == module and kind.__qualname__ == ".".join(outer):
            yield vars(kind)
    home: Any = vars(sys.modules[module]) if module in sys.modules else {}
    for word in outer:
        home = getattr(home.get(word), "__dict__", {})
    yield home


def _hash(code: CodeType) -> str:
    """Return a hash of the source of a function's code; raise :class:`NotNamed` where that cannot be read."""
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()
    except (OSError, TypeError):
        raise NotNamed(code.co_qualname) from None


__all__ = ["NotNamed", "name_of", "named"]
