"""Groups of ATen ops that several passes go by, as :func:`~shardwise.graph.schema.op_name` names them, and of our own
functions' arguments.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


SPLITS = _named("split split_with_sizes chunk tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk")
"""Ops that cut a dim into pieces."""
MATRIX_PRODUCTS = _named("""
    linear matmul mm bmm addmm addbmm baddbmm einsum tensordot bilinear inner linalg_matmul linalg_multi_dot
    chain_matmul""")
GROUPED_PRODUCTS = _named("_grouped_mm transformers::grouped_mm_fallback")
CONVOLUTIONS = _named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution")
ATTENTION = "scaled_dot_product_attention"
CLASS_LOSSES = _named("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d")
"""Losses of scores, or log-probabilities, of classes."""
SHARING = _named("""
    view reshape flatten unflatten transpose permute t numpy_T mT unsqueeze squeeze expand expand_as contiguous alias
    detach select slice narrow split split_with_sizes chunk unbind unfold diagonal view_as movedim swapaxes to dropout
    feature_dropout""")
"""Ops whose result may share memory with their first operand."""


@functools.cache
def argument_at(function: Any, name: str) -> int | None:
    """The place of an argument of one of our own functions, by its name; None for ATen ops, and for functions without
    it.
    """
    names = list(inspect.signature(function).parameters) if inspect.isfunction(function) else []
    return names.index(name) if name in names else None
