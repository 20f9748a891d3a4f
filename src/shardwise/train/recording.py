"""What a user's loop does with the outputs of a model is recorded, to be computed with the model in one program.

``model(x)`` returns tensors without values.  A function of torch on one of them is noted, its result is another such
tensor, whose shape comes from running the function on the meta device.  A value is computed when the loop looks at it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from shardwise.backend import MOVES
from shardwise.capture.running import at_line, users_line
from shardwise.capture.tensor_facts import FACTS
from shardwise.core.errors import ShardwiseError
from shardwise.graph.torch_private import storage_key, version, without_torch_functions

_READS = frozenset(getattr(Tensor, name) for name in (
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__format__", "__repr__",
    "__array__", "__contains__", "equal", "allclose", "is_nonzero",
)) | {torch.equal, torch.allclose, torch.is_nonzero}  # fmt: skip
"""These return no tensors: they need values."""

_MOVES = frozenset(getattr(Tensor, name) for name in MOVES if hasattr(Tensor, name))
_DATA, _DEVICE, _GRAD = (getattr(Tensor, name).__get__ for name in ("data", "device", "grad"))
_NEEDS_GRAD, _IS_LEAF = (getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf"))
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

    ``grad`` says whether autograd was on.  A call of a model has an ``owner``, at whose ``version`` it was made, and is
    ``committed`` once what it writes to buffers is written."""

    def __init__(self, function: Any, arguments: Any, owner: Owner | None = None, training: bool = False) -> None:
        self.number, self.line, self.function, self.owner = next(_numbers), users_line(), function, owner
        self.leaves: list[Any]
        self.leaves, self.spec = tree_flatten(arguments)
        self.grad, self.training, self.committed = torch.is_grad_enabled(), training, False
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
        self.held: weakref.ref[Deferred] | None = None
        self.shares = False  # whether it is a view, or has one
        calls: set[Source] = set()
        if source is not None:
            calls.update(*(one.calls for one in source.inputs if not one.settled))
            calls |= {source} if source.owner is not None else set()
        self.calls: frozenset[Source] = frozenset(calls)

    @staticmethod
    def of(tensor: Tensor, copied: bool) -> Value:
        """Return what the loop brought: its values now."""
        found = Value(_meta(tensor))
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
                f"{self.lost or 'the weights have changed since'}; legal: a look before optimizer.step()"
            )
        return self.known.get()


class Deferred(Tensor):
    """A tensor of the loop whose value is computed with the model; it is a tensor on the meta device for torch."""

    _value: Value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _interpret(func, tuple(args), dict(kwargs or {}))


def deferred(value: Value) -> Deferred:
    """Return the tensor that the loop holds of a value."""
    with without_torch_functions():
        found = value.meta.as_subclass(Deferred)
    found._value = value
    value.held = weakref.ref(found)
    for owner in value.owners:
        owner.note(value)
    return found


def value_of(tensor: Tensor) -> Value:
    """Return the value that an argument of the loop stands for."""
    if isinstance(tensor, Deferred):
        return tensor._value
    if tensor.requires_grad and torch.is_grad_enabled() and isinstance(tensor, nn.Parameter):
        what = "a parameter that no distributed model has is used with a model's output"
        legal = "a module that has both, or requires_grad_(False) for it"
        raise ShardwiseError(f"{what}{at_line()}: it would get no gradient; legal: {legal}")
    return Value.of(tensor, copied=not isinstance(tensor, nn.Parameter))


def outputs(source: Source, results: Sequence[Any], spec: TreeSpec) -> Any:
    """Return what a source gives: ``results`` has a meta tensor and whether it has a gradient for each of its tensors,
    and other results as they are."""
    wrapped = [
        deferred(Value(one[0], source, i, one[1])) if isinstance(one, tuple) else one for i, one in enumerate(results)
    ]
    return tree_unflatten(wrapped, spec)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _values(tree: Any) -> Iterator[Value]:
    return (one._value for one in tree_flatten(tree)[0] if isinstance(one, Deferred))


def _interpret(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a function of torch that the loop calls on tensors without values."""
    if func in FACTS:
        return _fact(func, *args, **kwargs)
    if func is Tensor.backward:
        return _backward(*args, **kwargs)
    if func == _GRAD:
        return None
    if func in _MOVES or func is Tensor.to:
        args, kwargs = _without_device(args, kwargs)
        if func in _MOVES or len(args) == 1 and not kwargs:
            return args[0]
    if func == _DATA:
        func = Tensor.detach
    every = list(_values((args, kwargs)))
    plain = all(one.settled or (one.known is not None and not torch.is_grad_enabled()) for one in every)
    if plain or func in _READS:
        return _plainly(func, args, kwargs)
    return _in_place(func, args, kwargs) if _writes(func, kwargs) else _record(func, args, kwargs)


def _fact(func: Any, tensor: Deferred, *rest: Any, **more: Any) -> Any:
    value = tensor._value
    if func == _DEVICE:
        return value.owners[0].device if value.owners else torch.device("cpu")
    if func == _NEEDS_GRAD:
        return value.grad
    if func == _IS_LEAF:
        return not value.grad
    made = getattr(func, "__name__", "").startswith("new_")
    device = value.owners[0].device if made and value.owners else "cpu"
    with without_torch_functions():
        return func(torch.empty((), dtype=value.meta.dtype, device=device) if made else value.meta, *rest, **more)


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with values."""

    def value(one: Any) -> Any:
        return one._value.get() if isinstance(one, Deferred) else one

    return func(*tree_map(value, args), **tree_map(value, kwargs))


def _backward(
    tensor: Deferred, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    for name, given in (("gradient", gradient is not None), ("create_graph", create_graph), ("inputs", bool(inputs))):
        if given:
            raise ShardwiseError(f"loss.backward(...) with {name}{at_line()}; legal: loss.backward()")
    value = tensor._value
    if not value.grad:
        raise ShardwiseError(
            f"loss.backward(){at_line()}: it has no gradient: it was detached, or the model was in evaluation "
            "mode; legal: model.train() before"
        )
    if value.meta.numel() != 1:
        raise ShardwiseError(f"loss.backward(){at_line()} of a tensor of {tuple(value.meta.shape)}; legal: a scalar")
    value.owners[0].backward(value)


def _without_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out what only says where a tensor is to be."""
    args = (args[0], *(a for a in args[1:] if not isinstance(a, str | torch.device | bool | int)))
    return args, {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "copy", "memory_format")}


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    inside = name.endswith("_") and not name.endswith("__")
    return inside or name in ("__setitem__", "__set__") or name.startswith("__i") and name not in (
        "__invert__", "__index__", "__int__", "__iter__",
    ) or kwargs.get("out") is not None  # fmt: skip


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a tensor of the loop stand for the result from now on; one with views, or that is one, is refused."""
    target, name = args[0], getattr(func, "__name__", str(func))
    if not isinstance(target, Deferred):  # a tensor of the loop's own takes a value
        return _plainly(func, args, kwargs)
    functional = getattr(Tensor, f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_"), None)
    if not callable(functional) or target._value.shares or kwargs.get("out") is not None:
        what = "of a model's output, which is a view or has one," if target._value.shares else "of a model's output"
        legal = "the same out of place"
        raise ShardwiseError(
            f"{name} {what} in place{at_line()}: a program cannot tell what else changes; legal: {legal}"
        )
    made = _record(functional, args, kwargs)
    value = made._value
    if value.meta.shape != target._value.meta.shape or value.meta.dtype != target._value.meta.dtype:
        raise ShardwiseError(f"{name}{at_line()} would change shape or dtype in place; legal: the same out of place")
    target._value, value.held = value, weakref.ref(target)
    for owner in value.owners:
        owner.note(value)
    return target


def _record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note a function and return its results, without values."""
    leaves, spec = tree_flatten((args, kwargs))
    found = [value_of(one) if isinstance(one, Tensor) else one for one in leaves]
    values = [one for one in found if isinstance(one, Value)]
    try:
        results = _shapes(func, found, spec)
    except Exception as error:  # it depends on values, or is wrong on one device, too
        if any(one.grad for one in values) and torch.is_grad_enabled():
            name = getattr(func, "__name__", str(func))
            what = f"{name} of a model's output{at_line()} depends on values, or is not possible"
            raise ShardwiseError(f"{what}: {' '.join(str(error).split())[:300]}") from error
        return _plainly(func, args, kwargs)
    flat, out = tree_flatten(results)
    if not any(isinstance(one, Tensor) for one in flat):
        return _plainly(func, args, kwargs)
    source = Source(func, tree_unflatten(found, spec))
    grad = source.grad and any(one.grad for one in values) and func is not Tensor.detach
    made = outputs(source, [
        (one, grad and (one.is_floating_point() or one.is_complex())) if isinstance(one, Tensor) else one
        for one in flat
    ], out)  # fmt: skip
    _note_views(values, list(_values(made)))
    return made


def _note_views(values: Sequence[Value], results: Sequence[Value]) -> None:
    for one in values:
        for other in results:
            if storage_key(one.meta) == storage_key(other.meta):
                one.shares = other.shares = True


def _shapes(func: Any, found: Sequence[Any], spec: TreeSpec) -> Any:
    """Run a function on the meta device."""
    args, kwargs = tree_unflatten([one.meta if isinstance(one, Value) else one for one in found], spec)
    if func is Tensor.__getitem__ and len(args) == 2:  # a mask with values says how many it selects
        args = (args[0], _indices(found[1:])) if _masked(found[1:]) else args
    with torch.no_grad(), without_torch_functions(), torch.device("meta"):
        return func(*args, **kwargs)


def _masked(index: Sequence[Any]) -> bool:
    return any(isinstance(one, Value) and one.meta.dtype in (torch.bool, torch.uint8) for one in index)


def _indices(index: Sequence[Any]) -> Any:
    """Return an index with numbers in place of masks that have values; it raises where they have none."""
    made: list[Any] = []
    for one in index:
        if isinstance(one, Value) and one.meta.dtype is torch.bool:
            if one.known is None:
                raise ShardwiseError("a mask that is computed from it")
            made += [_meta(n) for n in one.known.get().nonzero(as_tuple=True)]
        else:
            made.append(one.meta if isinstance(one, Value) else one)
    return tuple(made)


__all__ = ["Deferred", "Known", "Owner", "Plain", "Source", "Value", "deferred", "outputs", "value_of"]
