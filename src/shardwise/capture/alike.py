"""Ops that run without values, each once for operands that are alike.

What shapes an op of torch makes follows from the shapes, dtypes and devices of its operands, and from numbers.  Layers
of one model are alike, and so are several runs of it, while torch goes a long way to find the shapes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.graph.torch_private import fake_device, fresh, is_composite, schema, storage_key

OTHERS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""The tags of ops whose shapes follow from values, or which change those of an operand."""
PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Shape(NamedTuple):
    """What is known of a tensor without values."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(one: Tensor, device: torch.device) -> Shape | None:
        """Return the shape of a tensor on a device; None where a size is a symbol, or where there is more to know."""
        if one.layout is not torch.strided or one.is_complex() or one.is_neg() or one.is_quantized:
            return None
        found = Shape(one.dtype, device, tuple(one.shape), one.stride(), one.storage_offset())
        return found if all(type(n) is int for n in (*found.sizes, *found.strides, found.offset)) else None


class _Other(Exception):
    """An argument may decide on more than these can tell."""


NEW, WRITTEN = "new tensors", "its first operand, written"
"""What an op returns whose results follow from shapes."""


class Alike:
    """Runs ops in a ``mode`` in which tensors have no values."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._made: dict[Any, Sequence[Shape] | None] = {}
        self._kinds: dict[Any, str | None] = {}

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Return what an op makes of arguments with these ``tensors``."""
        if func not in self._kinds:
            self._kinds[func] = _kind(func)
        kind = self._kinds[func]
        key = None if kind is None else _key(func, args, kwargs, tensors)
        if key is None:
            return func(*args, **kwargs)
        if key not in self._made:
            found = func(*args, **kwargs)
            self._made[key] = _shapes(found, tensors) if kind == NEW else _written(found, args[0])
            return found
        shapes = self._made[key]
        if shapes is None:
            return func(*args, **kwargs)
        if kind == WRITTEN:
            return args[0]
        made = [fresh(self._mode, one.sizes, one.strides, one.dtype, one.device) for one in shapes]
        return tuple(made) if isinstance(shapes, tuple) else made[0]


def _kind(func: Any) -> str | None:
    """Return what an op makes; None where its shapes follow from values or from settings of torch, or where it gives
    views."""
    described = schema(func)
    if described is None or getattr(func, "namespace", None) != "aten" or any(tag in func.tags for tag in OTHERS):
        return None
    if is_composite(func):
        return None
    known = [one.alias_info for one in (*described.arguments, *described.returns)]
    if all(one is None for one in known):
        return NEW
    first, *rest = known
    inner, last = rest[:-1], rest[-1:]
    single = len(described.returns) == 1 and first is not None and first.is_write and all(one is None for one in inner)
    return WRITTEN if single and last[0] is not None and last[0].before_set == first.before_set else None


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Return what decides on the shapes that an op makes; None where that is more than its arguments' shapes."""
    if all(fake_device(one) is None for one in tensors):
        return None  # torch may compute with values where all are known
    try:
        return func, _form(args), _form(kwargs), torch.get_default_dtype(), torch.is_inference_mode_enabled()
    except _Other:
        return None


def _form(argument: Any) -> Any:
    """Return an argument with shapes in place of tensors, as a key."""
    if isinstance(argument, Tensor):
        device = fake_device(argument)
        if device is None and type(argument) not in (Tensor, nn.Parameter):
            raise _Other
        found = Shape.of(argument, argument.device if device is None else device)
        if found is None:
            raise _Other
        return device is None, found
    if isinstance(argument, Mapping):
        return tuple((key, _form(one)) for key, one in argument.items())
    if isinstance(argument, tuple | list):
        return tuple(map(_form, argument))
    if type(argument) not in PLAIN:
        raise _Other
    return type(argument), argument


def _shapes(found: Any, tensors: Sequence[Tensor]) -> Sequence[Shape] | None:
    """Return the shapes of what an op made, a tuple where it made one; None where that is not new tensors alone, each
    in memory of its own."""
    several = isinstance(found, tuple | list)
    shapes, memory = list[Shape](), {storage_key(one) for one in tensors}
    for one in found if several else [found]:
        device = fake_device(one) if isinstance(one, Tensor) else None
        shape = None if device is None else Shape.of(one, device)
        if shape is None or shape.offset or storage_key(one) in memory:
            return None
        memory.add(storage_key(one))
        shapes.append(shape)
    return tuple(shapes) if several else shapes


def _written(found: Any, first: Any) -> Sequence[Shape] | None:
    """Return the shape of the first operand of an op that has written to it; None where it returned another."""
    shape = None if found is not first or (device := fake_device(first)) is None else Shape.of(first, device)
    return None if shape is None else [shape]


__all__ = ["Alike"]
