"""Count the FLOPs and memory traffic of every kernel that runs, on tensors of any device, the meta device included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shardwise.graph.aten_ops import FACTORS, Fact, has
from shardwise.graph.schema import op_name, tensors_in
from shardwise.graph.torch_private import TorchDispatchMode, schema, storage_key
from shardwise.kernels.device_kernels import RESULTS


class DeviceForms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Give the results of kernels the form that they have on ``device``, while it is on."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = op_name(func)
        return RESULTS[name](self.device, args, results) if name in RESULTS else results


class Meter(DeviceForms):  # type: ignore[no-untyped-call]
    """Count also what kernels do."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.flops = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = super().__torch_dispatch__(func, types, args, kwargs)
        name = op_name(func)
        self.flops += FLOPS[name](args, results) if name in FLOPS else 0
        self.bytes += _moved(func, (args, kwargs), results)
        return results


# ---- memory traffic --------------------------------------------------------------------------------------------------


def _moved(func: Any, arguments: Any, results: Any) -> int:
    """Return the bytes of a kernel's operands and results; none for views; of a table, the rows that were looked up."""
    inputs, outputs = tensors_in(arguments), tensors_in(results)
    view = not schema(func).is_mutable and {storage_key(o) for o in outputs} <= {storage_key(i) for i in inputs}
    if view or has(func, Fact.UNWRITTEN):
        return 0
    written = sum(map(_size, outputs))
    if has(func, Fact.LOOKUP):
        return written + min(_size(inputs[0]), written) + sum(map(_size, inputs[1:]))
    return written + sum(map(_size, inputs))


def _size(tensor: Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor: an expanded dim counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor) -> int:
    return 2 * a.numel() * b.shape[-1]


def _of_factors(places: tuple[int, int], args: Sequence[Any], results: Any) -> int:
    return _product(*(args[at] for at in places))


def _grouped(args: Sequence[Any], results: Any) -> int:
    a, b = args[0], args[1]
    return _product(a, b) // (a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1)


def _convolution(x: Tensor, weight: Tensor, result: Tensor, transposed: bool) -> int:
    """Return the FLOPs: every element of the result (of the input, if transposed) meets one filter."""
    return 2 * (x if transposed else result).numel() * weight.shape[1:].numel()


def _convolution_backward(args: Sequence[Any], results: Any) -> int:
    """Return the FLOPs: the gradients of input and weight are as much work as forward, each."""
    grad, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return _convolution(x, weight, grad, transposed) * sum(map(bool, wanted[:2]))


def _attention(args: Sequence[Tensor], keys: int, values: int) -> int:
    """Return the FLOPs of ``keys`` products by the size of keys, and ``values`` by that of values, for all pairs."""
    q, k, v = args
    pairs = q.numel() // q.shape[-1] * k.shape[-2]
    return 2 * pairs * (keys * q.shape[-1] + values * v.shape[-1])


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")

FLOPS: Mapping[str, Callable[[Sequence[Any], Any], int]] = {
    **{n: partial(_of_factors, FACTORS[n]) for n in ("mm", "bmm", "addmm", "baddbmm", "addbmm")},
    "mv": lambda args, _: 2 * args[0].numel(),
    "addmv": lambda args, _: 2 * args[1].numel(),
    **dict.fromkeys(("dot", "vdot"), lambda args, _: 2 * args[0].numel()),
    "_grouped_mm": _grouped,
    **dict.fromkeys(("transformers::grouped_mm_fallback", "shardwise::grouped_mm"), _grouped),
    **dict.fromkeys(
        ("transformers::grouped_mm_fallback_backward", "shardwise::grouped_mm_backward"),
        lambda args, _: 2 * _product(args[0], args[1]),
    ),
    "convolution": lambda args, result: _convolution(args[0], args[1], result, args[6]),
    "convolution_backward": _convolution_backward,
    **{f"_scaled_dot_product_{n}": lambda args, _: _attention(args[:3], 1, 1) for n in _KERNELS},
    # Backward computes the scores once more, then the gradients of queries, keys, values and probabilities.
    **{f"_scaled_dot_product_{n}_backward": lambda args, _: _attention(args[1:4], 3, 2) for n in _KERNELS},
}
"""By kernel, these turn (arguments, results) into FLOPs, 2 per multiply-add."""
