"""Functions of Python whose calls go elsewhere for a while, whoever has a reference to them.

Nothing that refers to a function is changed: its code is replaced by one that passes its arguments on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

from shardwise.capture.parts import with_parts
from shardwise.graph.torch_private import process_lock

Call = Callable[[FunctionType, Callable[..., Any], Sequence[Any], dict[str, Any]], Any]
"""It is given the function, one that does what the function did, and the arguments; what it returns, the call does."""


def function_of(frame: FrameType) -> FunctionType | None:
    """Return the function that a frame runs, where a name leads to it: of its module, or of its first argument's
    class; None where none does, as to a function inside another."""
    code = frame.f_code
    places: list[dict[str, Any]] = []
    if code.co_argcount:
        places += [vars(kind) for kind in type(frame.f_locals.get(code.co_varnames[0])).__mro__]
    *outer, name = code.co_qualname.split(".")
    home: Any = frame.f_globals
    for word in outer:
        home = getattr(home.get(word), "__dict__", {})
    places.append(home)
    for place in places:
        found = place.get(name)
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        while found is not None and not _is_of(getattr(found, "__code__", None), code):
            found = getattr(found, "__wrapped__", None)
        if isinstance(found, FunctionType):
            return found
    return None


def _is_of(own: CodeType | None, code: CodeType) -> bool:
    """Whether code is a function's own, or that which calls parts of it."""
    place = (code.co_filename, code.co_firstlineno, code.co_qualname)
    return own is code or (own is not None and (own.co_filename, own.co_firstlineno, own.co_qualname) == place)


def _template(*args: Any, **kwargs: Any) -> Any:
    call: Any = "call"  # in place of this constant stands what is called
    return call(args, kwargs)


@contextmanager
def redirected(functions: Sequence[FunctionType], call: Call) -> Iterator[None]:
    """Pass this thread's calls of ``functions`` through ``call``; functions of which some are parts call these."""
    thread, before = threading.get_ident(), dict[FunctionType, CodeType]()

    def passing(function: FunctionType) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
        whole = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        whole.__kwdefaults__ = function.__kwdefaults__

        def passed(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if threading.get_ident() != thread:
                return whole(*args, **kwargs)
            return call(function, whole, args, kwargs)

        return passed

    with process_lock:
        try:
            for one, code in with_parts(functions).items():
                before.setdefault(one, one.__code__)
                one.__code__ = code
            for one in functions:
                code, door = one.__code__, passing(one)
                constants = tuple(door if value == "call" else value for value in _template.__code__.co_consts)
                before.setdefault(one, code)  # one of which there are parts is no longer as it was
                one.__code__ = _template.__code__.replace(
                    co_consts=constants, co_name=code.co_name, co_qualname=code.co_qualname,
                    co_freevars=code.co_freevars,
                )  # fmt: skip
            yield
        finally:
            for one, code in before.items():
                one.__code__ = code


__all__ = ["Call", "function_of", "redirected"]
