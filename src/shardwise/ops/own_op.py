"""What passes have to know of our own functions that local graphs call: stated where the function is.

A function without :func:`own_op` is a plain one: it communicates nothing, and its backward may read what it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class OwnOp:
    """Facts of one function.

    ``communicates``: it may hand something to the communicator, in forward or in backward; what, is found by running it
    (``ops/exchanges.py``).  ``ways``, of a move alone: by dual of its result, what it does with the value and with its
    gradient.  ``shares``: its result may share memory with its first operand.  ``blind``: its backward needs no value
    of what it is given, only shapes.  ``kept``: selective recomputation keeps its result.
    """

    communicates: bool = False
    ways: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    shares: bool = False
    blind: bool = False
    kept: bool = False


_PLAIN = OwnOp()


def own_op(**facts: Any) -> Callable[[Function], Function]:
    """State the facts of a function, which stays what it is."""

    def state(function: Function) -> Function:
        function.own_op = OwnOp(**facts)  # type: ignore[attr-defined]
        return function

    return state


def facts_of(target: Any) -> OwnOp:
    """Return the facts of what a node calls; of an ATen op there are none here."""
    found: OwnOp = getattr(target, "own_op", _PLAIN)
    return found


def named(modules: Iterable[ModuleType], wanted: Callable[[OwnOp], bool]) -> dict[str, Callable[..., Tensor]]:
    """Return the functions of some modules whose facts are as ``wanted``, by name."""
    functions = (f for module in modules for f in vars(module).values() if inspect.isfunction(f))
    return {f.__name__: f for f in functions if wanted(facts_of(f))}


def argument_at(target: Any, name: str) -> int | None:
    """Return the place of an argument of one of our own functions, by its name; None for ATen ops, and for functions
    without it.
    """
    names = list(inspect.signature(target).parameters) if inspect.isfunction(target) else []
    return names.index(name) if name in names else None
