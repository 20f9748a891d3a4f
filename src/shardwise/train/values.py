"""Tensors of a user's loop whose values are computed later: where they come from, and what they depend on."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.capture.running import at_line, users_line
from shardwise.core.errors import ShardwiseError
from shardwise.graph.layouts import check_layout, is_sparse
from shardwise.graph.torch_private import version

_numbers = count()  # in the order in which the loop computes


class Owner(ABC):
    """It runs the programs of one model: it knows how often its weights have changed, and computes values."""

    version: int
    device: torch.device

    @abstractmethod
    def backward(self, loss: Value) -> None:
        """Note that the next step of every model that ``loss`` depends on has its gradient."""

    @abstractmethod
    def compute(self, wanted: Value) -> None:
        """Make a value known, and what else the loop still holds of the same forwards."""

    @abstractmethod
    def note(self, value: Value) -> None:
        """Note that the loop holds a value which depends on this model."""


class Known(ABC):
    """The value of a tensor of the loop, which ranks may have in parts until it is looked at."""

    @abstractmethod
    def get(self) -> Tensor:
        """Return the whole tensor; all ranks call it together."""


class Plain(Known):
    """A tensor that every rank has."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def get(self) -> Tensor:
        return self.value


class Later(Known):
    """The value of a function of values that are known."""

    def __init__(self, value: Value) -> None:
        assert value.source is not None
        self.source, self.index = value.source, value.index
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        """Return the value, computed the first time."""
        if self.value is None:
            source = self.source
            leaves = [one.get() if isinstance(one, Value) else one for one in source.leaves]
            args, kwargs = tree_unflatten(leaves, source.spec)
            with torch.no_grad():
                self.value = tree_flatten(source.function(*args, **kwargs))[0][self.index]
        assert self.value is not None
        return self.value


class Source:
    """A call of a model or of a function of torch, with :class:`Value` in place of the tensors in its arguments.

    ``grad`` says whether autograd was on.  A call of a model has an ``owner``, at whose ``version`` it was made, is
    ``committed`` once what it writes to buffers is written, and is ``frozen`` if no parameter required a gradient."""

    def __init__(
        self, function: Any, arguments: Any, owner: Owner | None = None, training: bool = False, frozen: bool = False
    ) -> None:
        self.number, self.line, self.function, self.owner = next(_numbers), users_line(), function, owner
        self.leaves: list[Any]
        self.leaves, self.spec = tree_flatten(arguments)
        self.grad, self.training, self.committed = torch.is_grad_enabled(), training, False
        self.frozen = frozen
        self.version = 0 if owner is None else owner.version

    @property
    def inputs(self) -> list[Value]:
        """The tensors among the arguments."""
        return [one for one in self.leaves if isinstance(one, Value)]

    @property
    def stale(self) -> bool:
        """Whether the weights have changed since the model was called."""
        return self.owner is not None and self.owner.version != self.version


class Value:
    """A tensor of the loop: result ``index`` of a ``source``, or, without one, a tensor that the loop brought, which is
    copied since the loop may write to it later.

    ``calls`` are the calls of models that it depends on; ``meta`` has its shape and dtype."""

    def __init__(self, meta: Tensor, source: Source | None = None, index: int = 0, grad: bool = False) -> None:
        self.meta, self.source, self.index, self.grad = meta, source, index, grad
        self.known: Known | None = None
        self.brought: Tensor | None = None  # the loop's own tensor, kept so that no other has its id
        self.key: tuple[int, int] = (0, 0)
        self.lost = ""  # why the value was not kept
        self.held: weakref.ref[Tensor] | None = None
        self.shares = False  # whether it is a view, or has one
        calls: set[Source] = set()
        if source is not None:
            calls.update(*(one.calls for one in source.inputs if not one.settled))
            calls |= {source} if source.owner is not None else set()
        self.calls: frozenset[Source] = frozenset(calls)

    @staticmethod
    def of(tensor: Tensor, copied: bool) -> Value:
        """Return what the loop brought: its values now."""
        check_layout("the loop", "a tensor that it gives", tensor, whole=True)
        found = Value(like(tensor))
        found.brought, found.key = tensor, (id(tensor), version(tensor))
        found.known = Plain(tensor.detach().clone() if copied else tensor.detach())
        return found

    @property
    def alive(self) -> bool:
        """Whether the loop still holds it."""
        return self.held is not None and self.held() is not None

    @property
    def stale(self) -> bool:
        """Whether the weights of a model that it depends on have changed."""
        return any(call.stale for call in self.calls)

    @property
    def settled(self) -> bool:
        """Whether it is a constant from now on: it is known, and no gradient can pass it."""
        return self.known is not None and (not self.grad or self.stale)

    @property
    def owners(self) -> list[Owner]:
        """The models that it depends on."""
        found = {id(call.owner): call.owner for call in sorted(self.calls, key=lambda c: c.number)}
        return [one for one in found.values() if one is not None]

    def forget(self) -> None:
        """Let go of what it was computed from, if nothing can be computed from that any more."""
        if self.stale:
            self.source = None
            for call in self.calls:
                if call.stale:
                    call.leaves = []

    def _why(self) -> str:
        """Return why it is not known."""
        stack, seen = [self], set[Value]()
        while stack:
            if (one := stack.pop()).lost:
                return one.lost
            if one not in seen and one.source is not None:
                stack.extend(one.source.inputs)
            seen.add(one)
        return "the weights have changed since"

    def get(self) -> Tensor:
        """Return the value, computed now if it is not known."""
        if self.known is None and not self.stale and not self.lost:
            if self.calls:
                self.owners[0].compute(self)
            else:  # of what a step gives beside the results of models
                self.known = Later(self)
        if self.known is None:
            raise ShardwiseError(
                f"a value of the loop is looked at{at_line()} that was not computed: "
                f"{self._why()}; legal: a look before optimizer.step()"
            )
        return self.known.get()


def like(tensor: Tensor) -> Tensor:
    """Return a tensor without values that has the same shape, strides and dtype; a sparse one has no strides."""
    if is_sparse(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
