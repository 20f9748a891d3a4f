"""A ``torch.autograd.Function`` with a backward of its own stays one op of a captured graph.

Export would trace its forward alone, and autograd would then differentiate that: a reversed gradient, a clipped one or
a straight-through estimator would be lost without a word.  What no op can stand for is :mod:`opened <capture.opened>`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten
from torch.utils.checkpoint import CheckpointFunction

from shardwise.capture.opened import Drawing, RefuseDraws, opened
from shardwise.graph.captured import Uncapturable
from shardwise.graph.torch_private import function_calls, version
from shardwise.ops.custom_function import OP, RECORDED, CustomFunction

PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The arguments of a Function that a graph can hold, beside tensors."""


def shown_by_ops(function: type) -> bool:
    """Whether the ops of a graph show the gradient of a Function: torch's own, and what it makes of registered ops."""
    return function.__module__.startswith("torch.")


class Recorder:
    """The Functions that a capture has met: those that are ops, and those that are ``opened``."""

    def __init__(self) -> None:
        self.functions: list[CustomFunction] = []
        self.opened: list[type[torch.autograd.Function]] = []
        self.inside = False

    def run(self, number: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Apply a Function to tensors without values; raise :class:`Uncapturable` if it writes to them."""
        before, function = [version(one) for one in tensors], self.functions[number]
        with RefuseDraws():  # type: ignore[no-untyped-call]
            found = function(*tensors)
        if [version(one) for one in tensors] != before:
            raise Uncapturable(f"the autograd.Function {function.function.__name__} writes to its arguments")
        return found

    def apply(self, original: Callable[..., Any], function: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
        """Record a call of a Function as an op."""
        if function is CheckpointFunction:  # what a backward computes again is the plan's choice
            run, _, *given = args
            return run(*given)
        if self.inside or shown_by_ops(function):
            return original(*args)
        leaves, spec = tree_flatten(tuple(args))
        if function not in self.opened and all(isinstance(one, (Tensor, *PLAIN)) for one in leaves):
            known = len(self.functions)
            try:
                return self.recorded(function, leaves, spec)
            except Drawing:
                del self.functions[known:]
        self.opened.append(function)
        return opened(function, args)

    def recorded(self, function: type[torch.autograd.Function], leaves: Sequence[Any], spec: TreeSpec) -> Any:
        """Record a call of a Function as an op; raise :class:`Drawing` where it draws random numbers."""
        kept = [Tensor if isinstance(one, Tensor) else one for one in leaves]
        number = next(
            (
                i
                for i, one in enumerate(self.functions)
                if isinstance(one, CustomFunction) and one.like(function, kept, spec)
            ),
            None,
        )
        if number is None:
            number = len(self.functions)
            self.functions.append(CustomFunction(function, kept, spec, number))
        self.inside = True
        try:
            found = OP([one for one in leaves if isinstance(one, Tensor)], number)
        finally:
            self.inside = False
        return self.functions[number].rebuilt(found)


def without_drawn(graph: fx.Graph) -> None:
    """Remove the nodes that were begun for Functions which then drew random numbers."""
    for node in graph.find_nodes(op="call_function", target=OP):
        if node.meta.get("val") is None and not node.users:
            graph.erase_node(node)


@contextlib.contextmanager
def functions_recorded() -> Iterator[Recorder]:
    """Record the Functions that this thread applies as ops, :data:`OP`, which give the index in ``functions`` of what
    is yielded."""
    recorder, thread = Recorder(), threading.get_ident()

    def call(original: Callable[..., Any], function: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
        if threading.get_ident() != thread:
            return original(*args)
        return recorder.apply(original, function, args)

    token = RECORDED.set(recorder.run)
    try:
        with function_calls(call):
            yield recorder
    finally:
        RECORDED.reset(token)
