"""Know which kernel a device runs for an op, where that decides what autograd keeps: this is the table behind ``cost``.

Costs come from a run on the meta device, where autograd itself says what each derivative formula keeps.  A formula
belongs to an op, not to a device, so only two things have to be known here.  Ops that are *composed* of others may be
composed differently on each device: those in ``COMPOSED`` are, those that the table of facts says to be ``ALIKE`` are
not, any other is unknown and gets reported.  And some kernels return another dtype or size than on meta: these are in
``RESULTS``.

These are the sources in torch's ATen/native: transformers/attention.cpp, transformers/sdp_utils_cpp.cpp,
transformers/cuda/sdp_utils.cpp, layer_norm.cpp, group_norm.cpp, Dropout.cpp, Normalization.cpp, BinaryOps.cpp and
Loss.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.torch_private import OpOverload, is_composite

aten = torch.ops.aten

DEVICES = ("cpu", "gpu")


def is_known(target: Callable[..., Any]) -> bool:
    """Return whether what ``target`` keeps is known: our functions, ops with a derivative, composites in tables."""
    if not isinstance(target, OpOverload):
        return True
    composite = is_composite(target)
    return not composite or target in COMPOSED or has(target, Fact.ALIKE)


# ---- composed ops ----------------------------------------------------------------------------------------------------


def attention(
    device: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention by the kernel that ``device`` would choose (CUDA: of compute capability 8.0 or later).

    Shapes are as in torch's function: (batch, heads, sequence, size)."""
    q, k, v, rest = query, key, value, (dropout_p, is_causal)
    mask = _float_mask(attn_mask, q.dtype)
    results: tuple[Tensor, ...]
    if device == "cpu" and _flash_cpu(q, k, v, mask, dropout_p, enable_gqa):
        results = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *rest, attn_mask=mask, scale=scale)
    elif device == "gpu" and _flash_gpu(q, k, v, mask, enable_gqa):
        padded = [x if x.shape[-1] % 8 == 0 else F.pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v)]
        results = aten._scaled_dot_product_flash_attention(*padded, *rest, False, scale=scale)
        return results[0][..., : q.shape[-1]]
    elif device == "gpu" and _efficient_gpu(q, k, v):
        bias = None if mask is None else _aligned_mask(mask).expand(*q.shape[:-1], k.shape[-2])
        results = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, *rest, scale=scale)
    elif device == "gpu" and dropout_p:
        raise NotImplementedError("what the mask of unfused attention takes on CUDA")
    else:
        results = aten._scaled_dot_product_attention_math(
            q, k, v, mask, *rest, None, scale=scale, enable_gqa=enable_gqa
        )
    return results[0]


def _dense(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> bool:
    """Return whether tensors are as all fused kernels ask: batch × heads × sequence × size, with sizes and heads that
    fit, innermost dims contiguous."""
    if not all(x.dim() == 4 and x.stride(-1) == 1 and x.shape[-2] for x in (q, k, v)):
        return False
    heads = [x.shape[1] for x in (q, k, v)]
    fit = heads[0] % heads[1] == 0 and heads[1] == heads[2] if gqa else len(set(heads)) == 1
    return fit and len({x.shape[0] for x in (q, k, v)}) == 1


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, gqa: bool) -> bool:
    if mask is not None:
        full = (*q.shape[:-1], k.shape[-2])
        fits = mask.dim() in (2, 4) and all(m in (1, s) for m, s in zip(mask.shape[::-1], full[::-1], strict=False))
        if mask.requires_grad or not fits:
            return False
    return _dense(q, k, v, gqa) and not dropout and len({x.shape[-1] for x in (q, k, v)}) == 1


def _flash_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return (
        half
        and mask is None
        and _dense(q, k, v, gqa)
        and len({x.shape[-1] for x in (q, k, v)}) == 1
        and q.shape[-1] <= 256
    )


def _efficient_gpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    aligned = {torch.float32: 4, torch.float16: 8, torch.bfloat16: 8}.get(q.dtype)
    return aligned is not None and _dense(q, k, v, False) and all(x.shape[-1] % aligned == 0 for x in (q, v))


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as 0 and -inf."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _aligned_mask(mask: Tensor) -> Tensor:
    """Return the mask with rows that begin at multiples of 8 elements, as the memory-efficient kernel wants them."""
    if mask.stride(-1) == 1 and all(s % 8 == 0 for s in mask.stride()[:-1]):
        return mask
    size = mask.shape[-1]
    return F.pad(mask, (0, 8 - size % 8))[..., :size]


def dropout(device: str, x: Tensor, p: float, train: bool) -> Tensor:
    """Compute native dropout: CUDA keeps a boolean mask, the CPU one of x's dtype."""
    if device == "gpu" and train and 0 < p < 1 and x.numel():
        out: Tensor = aten.native_dropout(x, p, True)[0]
        return out
    return F.dropout(x, p, train)


class _FusedNorm(torch.autograd.Function):
    """Stand for CUDA's fused RMSNorm as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        inverse = x.new_empty((*x.shape[: x.dim() - dims], *[1] * dims), dtype=wide)
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x, 1.0 if weight is None else weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.mul(grads[0], x), None if weight is None else torch.empty_like(weight), None


def rms_norm(
    device: str, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Compute RMSNorm: one kernel on CUDA where the dtypes agree, else composed."""
    if device == "gpu" and (weight is None or weight.dtype == x.dtype):
        fused: Tensor = _FusedNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]
        return fused
    return F.rms_norm(x, list(shape), weight, eps)


COMPOSED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: attention,
    aten.dropout.default: dropout,
    aten.rms_norm.default: rms_norm,
}
"""The composition of these composite ops depends on the device; they are functions of (device, *arguments)."""


# ---- results ---------------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _parameter_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    return x.dtype if weight is None else weight.dtype


def _layer_norm(device: str, args: Sequence[Any], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = _parameter_dtype(args[0], args[2]) if device == "cpu" else _wide(args[0])
    return results[0], *(torch.empty_like(r, dtype=dtype) for r in results[1:])


def _group_norm(device: str, args: Sequence[Any], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = _parameter_dtype(args[0], args[1])
    return results[0], *(torch.empty_like(r, dtype=dtype) for r in results[1:])


def _batch_norm(device: str, args: Sequence[Any], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, weight, running, training = args[0], args[1], args[3], args[5]
    if not training:
        return results[0], *(x.new_empty((0,)) for _ in results[1:])
    given = weight if weight is not None else running
    dtype = _parameter_dtype(x, given) if device == "cpu" else _wide(x)
    return results[0], *(torch.empty_like(r, dtype=dtype) for r in results[1:])


def _log_sigmoid(device: str, args: Sequence[Any], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if device == "cpu" else (results[0], results[1].new_empty((0,)))


def _reduced(device: str, args: Sequence[Any], result: Tensor) -> Tensor:
    """Return a loss of each element, shrunk to its sum or mean: the scalar keeps the storage of them all."""
    if result.dim() or args[0].dim() == 0:
        return result
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return result.new_empty(shape).as_strided((), ())


RESULTS: Mapping[str, Callable[[str, Sequence[Any], Any], Any]] = {
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "native_batch_norm": _batch_norm,
    "log_sigmoid_forward": _log_sigmoid,
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"), _reduced),
}
"""By kernel, these turn (device, arguments, results on meta) into results as ``device`` makes them."""
