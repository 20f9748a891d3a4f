"""Facts about shardwise's own functions in local graphs, which passes look up; each function declares its own.

A function without :func:`own_op` is a plain one: it communicates nothing, and its backward may read its arguments.
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
    """The facts about one function.

    ``communicates`` says that it may use the communicator, in forward or in backward; ``ops/exchanges.py`` finds out
    how by running it. ``ways`` is for moves alone: for each dual of the result, how the value and how its gradient is
    moved. ``shares`` says that its result may share memory with its first operand, ``blind`` that its backward needs
    only the shapes of its arguments, not their values, and ``kept`` that selective recomputation keeps its result.
    ``moves`` says that all it does is to move its first operand, so that other things can run meanwhile.
    """

    communicates: bool = False
    moves: bool = False
    ways: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    shares: bool = False
    blind: bool = False
    kept: bool = False


_PLAIN = OwnOp()


def own_op(**facts: Any) -> Callable[[Function], Function]:
    """Declare the facts about the decorated function, which is not changed."""

    def state(function: Function) -> Function:
        function.own_op = OwnOp(**facts)  # type: ignore[attr-defined]
        return function

    return state


def facts_of(target: Any) -> OwnOp:
    """Return the facts about the target of a node; for an ATen op they are those of a plain function."""
    found: OwnOp = getattr(target, "own_op", _PLAIN)
    return found


def named(modules: Iterable[ModuleType], wanted: Callable[[OwnOp], bool]) -> dict[str, Callable[..., Tensor]]:
    """Return the functions of some modules whose facts pass the test ``wanted``, by name."""
    functions = (f for module in modules for f in vars(module).values() if inspect.isfunction(f))
    return {f.__name__: f for f in functions if wanted(facts_of(f))}


def argument_at(target: Any, name: str) -> int | None:
    """Return the position of the argument ``name`` of an own function; None for ATen ops and functions without it."""
    names = list(inspect.signature(target).parameters) if inspect.isfunction(target) else []
    return names.index(name) if name in names else None
