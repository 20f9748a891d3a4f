"""Decide which dtype computes what under each precision.

``fp32`` changes nothing of a model in fp32.  ``fp64`` turns every cast to a narrower float into one to double.
``bf16`` and ``fp16`` cast parameters (not buffers, not BatchNorm's parameters), let matmul-like functions cast their
operands, and compute losses in fp32; the fused norm and softmax kernels keep their statistics in fp32 by themselves.
``fp16`` also computes in fp32 what leaves its range easily: powers, exponentials, reciprocals and sums (as
torch.autocast does for both).

A model that comes in low precision trains as if it had come in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.capture.intercept import Proceed
from shardwise.core.numeric_options import LOW_PRECISIONS
from shardwise.graph.aten_ops import Fact, named
from shardwise.graph.dtypes import LOW, NARROW, cast_floats
from shardwise.graph.schema import tensors_in
from shardwise.graph.torch_private import BatchNormBase
from shardwise.nn.grouped import grouped_mm

COMPUTE_DTYPE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def _functions(fact: Fact) -> frozenset[Callable[..., Any]]:
    """Return the functions and methods by which models call the ops with a fact, operators included."""
    owners = (torch, Tensor, F, torch.linalg)
    names = {n for op in named(fact) for n in (op, op.removeprefix("linalg_"), op.removesuffix("_loss"))}
    names |= {f"__{r}{n}__" for n in names for r in ("", "r")}
    return frozenset(getattr(owner, name) for owner in owners for name in names if hasattr(owner, name))


_LOW, _WIDE = _functions(Fact.LOW), _functions(Fact.WIDE)
_OVERFLOWING = _functions(Fact.OVERFLOWS) | {Tensor.__rtruediv__}  # which takes a reciprocal
_WIDE_CASTS: dict[Callable[..., Any], torch.dtype] = {
    Tensor.float: torch.float64,
    Tensor.bfloat16: torch.float64,
    Tensor.half: torch.float64,
}

_FLOAT_FACTORIES = frozenset(
    (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.eye, torch.linspace, torch.logspace)
)
_FACTORIES = frozenset(
    (torch.tensor, torch.full, torch.arange, torch.scalar_tensor)
)  # their dtype follows from their values


def shadow_dtype(module: nn.Module, name: str, parameter: Tensor, precision: str) -> torch.dtype:
    """Return the dtype in which a parameter takes part in computing."""
    if not parameter.is_floating_point():
        return parameter.dtype
    if precision in LOW_PRECISIONS and _owner_is_batch_norm(module, name):
        return torch.float32
    return COMPUTE_DTYPE[precision]


def _owner_is_batch_norm(module: nn.Module, name: str) -> bool:
    owner = module.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, BatchNormBase)


def cast_field(value: Tensor, precision: str) -> Tensor:
    """Return a batch field as the graph takes it: under ``fp64`` and ``fp32`` as a buffer, otherwise unchanged, but for
    doubles, which become fp32 as the parameters' do."""
    if precision in LOW_PRECISIONS:
        return value.float() if value.dtype is torch.float64 else value
    return cast_buffer(value, precision)


def cast_buffer(value: Tensor, precision: str) -> Tensor:
    """Return a buffer as the graph takes it: floats as doubles under ``fp64``, otherwise of at least fp32."""
    if not value.is_floating_point():
        return value
    return value.double() if precision == "fp64" else value.to(torch.promote_types(value.dtype, torch.float32))


KERNEL_ADVICE = 'precision = "bf16" or "fp32", or a GPU'


def lacks_kernel(error: Exception) -> bool:
    """Return whether torch refuses the dtype fp16, and not what was computed in it."""
    return isinstance(error, NotImplementedError) or re.search(r"\bHalf\b|dtype", str(error)) is not None


class Promote:
    """This layer makes casts and factories of narrower floats give doubles, whatever torch's default dtype.

    The default is not changed, because it belongs to the whole process."""

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func in _WIDE_CASTS:
            return args[0].to(torch.float64, copy=True)  # what is written to a narrower copy does not reach the double
        if any(a in NARROW for a in args if isinstance(a, torch.dtype)):
            args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in NARROW else a for a in args)
            kwargs |= {"copy": True} if func is Tensor.to else {}
        if kwargs.get("dtype") in NARROW or (func in _FLOAT_FACTORIES and "dtype" not in kwargs):
            kwargs["dtype"] = torch.float64
        result = proceed(func, args, kwargs)
        if not isinstance(result, Tensor) or result.dtype not in NARROW or "dtype" in kwargs:
            return result
        if func in _FACTORIES:
            return proceed(func, args, {**kwargs, "dtype": torch.float64})
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not operands or any(a.is_floating_point() or a.is_complex() for a in operands):
            return result
        return proceed(func, [_double(a, i) if func is not torch.where or i else a for i, a in enumerate(args)], kwargs)


def _double(value: Any, position: int) -> Any:
    """Return an integer tensor or the number of a ``where`` as a double; it would become the default dtype."""
    if isinstance(value, Tensor):
        return value.double()
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) and position else value


class CastOperands:
    """This layer lets matmul-like functions take their operands in ``dtype`` when these differ; losses, and what leaves
    the range of fp16, take at least fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide = _WIDE | _OVERFLOWING if dtype is torch.float16 else _WIDE

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func in _LOW:
            operands = [a for a in tensors_in((args, kwargs)) if a.is_floating_point()]
            if len({a.dtype for a in operands}) > 1:
                args, kwargs = cast_floats(args, kwargs, NARROW, self.dtype)
        elif func in self.wide:
            args, kwargs = cast_floats(args, kwargs, LOW, torch.float32)
        return proceed(func, args, kwargs)


class WideGroups:
    """This layer multiplies groups of rows of doubles by our own op, since torch's takes no doubles.

    Other kinds of grouped products are none of layers of experts, and are left to torch."""

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
            floats = [a for a in tensors_in((args, kwargs)) if a.is_floating_point()]
            if any(a.dtype is torch.float64 for a in floats) and [a.dim() for a in floats] == [2, 3]:
                rows, matrices = floats
                return grouped_mm(rows.double(), matrices.double(), offsets)
        return proceed(func, args, kwargs)


def precision_layers(precision: str) -> list[Any]:
    """Return the layers of an :class:`Intercept` under which a forward pass computes in ``precision``."""
    if precision in LOW_PRECISIONS:
        return [CastOperands(COMPUTE_DTYPE[precision])]
    return [WideGroups(), Promote()] if precision == "fp64" else []
