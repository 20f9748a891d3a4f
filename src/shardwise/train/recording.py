"""What a user's loop does with the outputs of a model is recorded, to be computed with the model in one program.

``model(x)`` returns tensors without values.  A function of torch on one of them is noted, its result is another such
tensor, whose shape comes from running the function on the meta device.  A value is computed when the loop looks at it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from shardwise.backend import MOVES
from shardwise.capture.running import at_line
from shardwise.capture.tensor_facts import FACTS
from shardwise.core.errors import ShardwiseError
from shardwise.graph.torch_private import storage_key, without_torch_functions
from shardwise.train.values import Source, Value, like

_READS = frozenset(getattr(Tensor, name) for name in (
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__format__", "__repr__",
    "__array__", "__contains__", "equal", "allclose", "is_nonzero",
)) | {torch.equal, torch.allclose, torch.is_nonzero}  # fmt: skip
"""These return no tensors: they need values."""

_MOVES = frozenset(getattr(Tensor, name) for name in MOVES if hasattr(Tensor, name))
_REFUSED = {
    torch.autograd.grad: "loss.backward(), and the gradients of model.parameters(); autograd inside of forward",
    Tensor.register_hook: "a hook on a parameter, or inside of forward",
    Tensor.register_post_accumulate_grad_hook: "a hook on a parameter",
    Tensor.retain_grad: "the gradients of model.parameters()",
}
"""They ask for gradients of what only the step computes, and what to do instead."""

_TAKES = frozenset({
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.detach.default, torch.ops.aten._to_copy.default,
})  # fmt: skip
"""What ``torch.tensor`` is made of."""

_DATA, _DEVICE, _GRAD = (getattr(Tensor, name).__get__ for name in ("data", "device", "grad"))
_NEEDS_GRAD, _IS_LEAF = (getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf"))


class Deferred(Tensor):
    """A tensor of the loop whose value is computed with the model; it is a tensor on the meta device for torch."""

    _value: Value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _interpret(func, tuple(args), dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Give ``torch.tensor(loss)`` and the like, which torch computes below its functions, the value."""
        if func not in _TAKES and any(one.grad for one in _values((args, kwargs))):
            what = f"{func} computes with a model's output{at_line()} where nothing records it"
            raise ShardwiseError(f"{what}, and no gradient would pass; legal: a forward that does it, or detach()")
        return _plainly(func, tuple(args), dict(kwargs or {}))


def deferred(value: Value) -> Deferred:
    """Return the tensor that the loop holds of a value."""
    with without_torch_functions():
        found = value.meta.as_subclass(Deferred)
    _stand_for(found, value)
    return found


def _stand_for(tensor: Deferred, value: Value) -> None:
    """Let a tensor of the loop stand for a value.

    It requires a gradient for torch, too, which then notes where a function that is not recorded computes with it."""
    tensor._value, value.held = value, weakref.ref(tensor)
    with without_torch_functions():
        tensor.requires_grad_(value.grad)
    for owner in value.owners:
        owner.note(value)


def value_of(tensor: Tensor) -> Value:
    """Return the value that an argument of the loop stands for."""
    if isinstance(tensor, Deferred):
        with without_torch_functions():
            function = tensor.grad_fn
        if function is not None:
            what = f"an autograd.Function ({function.name().removesuffix('Backward')}) is applied to a model's output"
            raise ShardwiseError(f"{what}{at_line()}: its backward would not run; legal: a forward that applies it")
        return tensor._value
    if torch.is_grad_enabled() and tensor.requires_grad:
        what = f"a {'parameter' if isinstance(tensor, nn.Parameter) else 'tensor'} that requires a gradient"
        legal = (
            "a distributed module whose forward computes with it (for penalties of parameters: weight_decay, or a "
            "forward that returns them), or detach() where it needs no gradient"
        )
        raise ShardwiseError(
            f"{what} is used with a distributed model or its output{at_line()}: it would get none; legal: {legal}"
        )
    return Value.of(tensor, copied=True)


def outputs(source: Source, results: Sequence[Any], spec: TreeSpec) -> Any:
    """Return what a source gives: ``results`` has a meta tensor and whether it has a gradient for each of its tensors,
    and other results as they are."""
    wrapped = [
        deferred(Value(one[0], source, i, one[1])) if isinstance(one, tuple) else one for i, one in enumerate(results)
    ]
    return tree_unflatten(wrapped, spec)


def _values(tree: Any) -> Iterator[Value]:
    return (one._value for one in tree_flatten(tree)[0] if isinstance(one, Deferred))


def _interpret(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a function of torch that the loop calls on tensors without values."""
    if func in FACTS:
        return _fact(func, *args, **kwargs)
    if func is Tensor.backward:
        return _backward(*args, **kwargs)
    if func is torch.autograd.backward:
        return _backwards(*args, **kwargs)
    if func in _REFUSED:
        raise ShardwiseError(f"{func.__name__} of a model's output{at_line()}; legal: {_REFUSED[func]}")
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


def _backwards(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    *rest: Any,
    **more: Any,
) -> None:
    for one in [tensors] if isinstance(tensors, Tensor) else tensors:
        if not isinstance(one, Deferred):
            what = f"torch.autograd.backward{at_line()} of model outputs and another tensor"
            raise ShardwiseError(f"{what}; legal: a call for each")
        _backward(one, grad_tensors or (*rest, None)[0], retain_graph, create_graph, **more)


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
        if torch.is_grad_enabled() and any(one.grad for one in _values((args, kwargs))):
            what = f"{name}{at_line()} writes a model's output into a tensor of the loop"
            legal = "the same out of place (total = total + loss, torch.stack, torch.cat), or detach()"
            raise ShardwiseError(f"{what}: no gradient would pass; legal: {legal}")
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
    _stand_for(target, value)
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
    made = outputs(source, [(one.detach(), one.requires_grad) if isinstance(one, Tensor) else one for one in flat], out)
    _note_views(values, list(_values(made)))
    return made


def _note_views(values: Sequence[Value], results: Sequence[Value]) -> None:
    for one in values:
        for other in results:
            if storage_key(one.meta) == storage_key(other.meta):
                one.shares = other.shares = True


def _shapes(func: Any, found: Sequence[Any], spec: TreeSpec) -> Any:
    """Run a function on the meta device, where autograd says what has a gradient."""
    args, kwargs = tree_unflatten([_example(one) if isinstance(one, Value) else one for one in found], spec)
    if func is Tensor.__getitem__ and len(args) == 2:  # a mask with values says how many it selects
        args = (args[0], _indices(found[1:])) if _masked(found[1:]) else args
    with without_torch_functions(), torch.device("meta"):
        return func(*args, **kwargs)


def _example(value: Value) -> Tensor:
    if not value.grad or not torch.is_grad_enabled():
        return value.meta
    with without_torch_functions():
        return value.meta.detach().requires_grad_()


def _masked(index: Sequence[Any]) -> bool:
    return any(isinstance(one, Value) and one.meta.dtype in (torch.bool, torch.uint8) for one in index)


def _indices(index: Sequence[Any]) -> Any:
    """Return an index with numbers in place of masks that have values; it raises where they have none."""
    made: list[Any] = []
    for one in index:
        if isinstance(one, Value) and one.meta.dtype is torch.bool:
            if one.known is None:
                raise ShardwiseError("a mask that is computed from it")
            made += [like(n) for n in one.known.get().nonzero(as_tuple=True)]
        else:
            made.append(one.meta if isinstance(one, Value) else one)
    return tuple(made)


__all__ = ["Deferred", "deferred", "outputs", "value_of"]
