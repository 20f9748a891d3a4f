"""Compute in low precision on one device, the ordinary way: `verify` measures a plan in low precision against this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.capture.intercept import Proceed
from shardwise.graph.dtypes import LOW, cast_floats
from shardwise.graph.schema import tensors_in
from shardwise.graph.torch_private import BatchNormBase

_MATMULS = frozenset(
    (
        "linear", "bilinear", "matmul", "linalg_matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot",
        "inner", "addmm", "addmv", "addbmm", "baddbmm",
        "einsum", "tensordot", "linalg_multi_dot", "linalg_vecdot", "prelu",
        "grouped_mm", "_grouped_mm", "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "layer_norm", "group_norm", "rms_norm",
    )
)  # fmt: skip
_LOSSES = frozenset(
    (
        "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss",
        "hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss",
        "multi_margin_loss", "multilabel_margin_loss",
    )
)  # fmt: skip
_OVERFLOWING = frozenset(
    (
        "pow", "__pow__", "__rpow__", "square", "exp", "exp2", "expm1", "sinh", "cosh", "reciprocal", "__rtruediv__",
        "rsqrt",
        "sum", "nansum", "cumsum", "prod", "cumprod", "var", "norm", "linalg_norm", "linalg_vector_norm",
        "linalg_matrix_norm",
        "logsumexp", "cdist", "dist",
    )
)  # fmt: skip


class LowPrecision:
    """This layer casts the operands of matmul-like functions to ``dtype`` where they differ, and those of losses to
    fp32; under fp16 it does the latter for functions, too, whose results easily leave its range.

    Operands differ where a buffer or an input, which stay as they are, meets a parameter in low precision.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide = _LOSSES | _OVERFLOWING if dtype is torch.float16 else _LOSSES

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        name = getattr(func, "__name__", "")
        if name in _MATMULS:
            floats = {a.dtype for a in tensors_in((args, kwargs)) if a.is_floating_point()}
            if len(floats) > 1:
                return proceed(func, *cast_floats(args, kwargs, floats, self.dtype))
        elif name in self.wide:
            return proceed(func, *cast_floats(args, kwargs, LOW, torch.float32))
        return proceed(func, args, kwargs)


class WideGroupedMatmul:
    """This layer multiplies groups of rows of doubles, one group after the other: torch's kernel takes no doubles."""

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if getattr(func, "__name__", "") not in ("grouped_mm", "_grouped_mm"):
            return proceed(func, args, kwargs)
        rows, matrices = args[0].double(), args[1].double()
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        if rows.dim() != 2 or matrices.dim() != 3 or offsets is None or kwargs.get("bias") is not None or len(args) > 3:
            return proceed(func, args, kwargs)
        stops = offsets.tolist()
        groups = [rows[a:b] @ matrix for a, b, matrix in zip((0, *stops), stops, matrices, strict=False)]
        rest = rows.new_zeros(rows.shape[0] - stops[-1], matrices.shape[2])
        return torch.cat([*groups, rest])


def batch_norm_parameters(module: nn.Module) -> set[int]:
    """Return the ids of the parameters of BatchNorm layers (of SyncBatchNorm and InstanceNorm too): they stay fp32."""
    kind = BatchNormBase
    return {id(p) for m in module.modules() if isinstance(m, kind) for p in m.parameters(recurse=False)}
