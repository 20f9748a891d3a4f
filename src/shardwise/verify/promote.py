"""Make a double of whatever a model casts or creates in a narrower float, for a truth in fp64.

A model may insist on a dtype (Llama's norm computes in fp32, a mask is filled in half precision), which would limit a
comparison in fp64 to 1e-7.  Below autograd every cast is an ATen call with a dtype argument, so one dispatch mode finds
them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.dtypes import WIDE, narrow
from shardwise.graph.torch_private import TorchDispatchMode, schema


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to the leaves of its lists and tuples."""
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    return change(value)


def _any(value: Any, holds: Callable[[Any], bool]) -> bool:
    if isinstance(value, list | tuple):
        return any(_any(item, holds) for item in value)
    return holds(value)


class Promote64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, in this thread, make doubles of all narrower floats that ops read and make.

    Casts and factories with a float dtype get float64; factories and integer arithmetic that would give the default
    dtype (fp32) give float64; a narrower tensor from outside is widened where an op reads it.  Integer and boolean
    casts, views of another dtype, and writes into existing tensors are left alone.  ``promotions`` counts the calls
    that were changed.  Enter it around the backward pass as well: a backward written in Python may cast too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.promotions = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if schema(func).is_mutable or func is torch.ops.aten.view.dtype:
            return func(*args, **kwargs)
        changed = False

        def widen(value: Any) -> Any:
            nonlocal changed
            if isinstance(value, torch.dtype) and value in WIDE:
                changed = True
                return WIDE[value]
            if narrow(value):
                changed = True
                return value.to(WIDE[value.dtype])
            return value

        args = [_map(a, widen) for a in args]
        kwargs = {k: _map(v, widen) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        if _any(result, narrow):  # nothing narrow went in: the default dtype came out
            changed = True
            result = self._again(func, args, kwargs)
        self.promotions += changed
        return result

    @staticmethod
    def _again(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` so that it gives doubles: by its dtype argument, or from doubles in place of integers."""
        if any(a.name == "dtype" for a in schema(func).arguments) and kwargs.get("dtype") is None:
            return func(*args, **{**kwargs, "dtype": torch.float64})

        def double(value: Any) -> Any:
            return value.double() if isinstance(value, Tensor) and not value.is_complex() else value

        return func(*(_map(a, double) for a in args), **kwargs)
