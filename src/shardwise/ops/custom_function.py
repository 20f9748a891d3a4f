"""A ``torch.autograd.Function`` as one op of a graph, which keeps its own backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class CustomFunction:
    """A Function with its arguments that are no tensors: called with those that are, it applies the Function.

    ``__name__`` tells it apart from all others of a capture, for code is shared between units by its text."""

    def __init__(self, function: type[torch.autograd.Function], leaves: Sequence[Any], spec: TreeSpec, number: int):
        self.function, self.leaves, self.spec = function, tuple(leaves), spec
        self.results: TreeSpec | None = None  # the structure of what it returns
        self.others: tuple[Any, ...] = ()  # what it returns, with None in place of tensors
        self.__name__ = self.__qualname__ = f"{function.__name__}_{number}"
        self.__module__ = function.__module__

    def __str__(self) -> str:
        return f"autograd.Function {self.function.__name__}"

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        feed = iter(tensors)
        args = tree_unflatten([next(feed) if one is Tensor else one for one in self.leaves], self.spec)
        found, self.results = tree_flatten(self.function.apply(*args))  # type: ignore[no-untyped-call]
        self.others = tuple(None if isinstance(one, Tensor) else one for one in found)
        return tuple(one for one in found if isinstance(one, Tensor))

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the Function returns, with these tensors."""
        assert self.results is not None
        feed = iter(tensors)
        tensor = [one is None for one in self.others]
        leaves = [next(feed, None) if t else one for t, one in zip(tensor, self.others, strict=True)]
        return tree_unflatten(leaves, self.results)

    def like(self, function: type, leaves: Sequence[Any], spec: TreeSpec) -> bool:
        """Whether this is that Function with these arguments."""
        same = self.function is function and self.spec == spec and len(leaves) == len(self.leaves)
        return same and all(type(a) is type(b) and a == b for a, b in zip(self.leaves, leaves, strict=True))


class WholeCall:
    """A call that may do anything with the tensors that it is given, so that it takes all of each.

    ``skips`` says that it may leave out parameters in one step that have a gradient by it in another, ``by_test`` that
    its first operand, a truth value, is all that it reads.  ``title`` names it for people."""

    skips = by_test = False
    title = ""


RECORDED: ContextVar[Callable[[int, Sequence[Tensor]], Sequence[Tensor]]] = ContextVar("RECORDED")
"""This applies a Function of the running capture, by number, to tensors without values."""


@torch.library.custom_op("shardwise::custom_function", mutates_args=())
def _op(tensors: list[Tensor], number: int) -> list[Tensor]:
    raise NotImplementedError("this op stands in a captured graph alone")


@_op.register_fake
def _(tensors: list[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(one) for one in RECORDED.get()(number, tensors)]


OP = torch.ops.shardwise.custom_function.default
