"""Layouts of tensors in which a batch or a model cannot be divided, and what takes their place."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.graph.torch_private import without_torch_functions

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor has its indices and values alone, whichever order these are in."""
    with without_torch_functions():  # of tensors that compute something, or note it, when they are looked at
        return not tensor.is_nested and tensor.layout in SPARSE


def is_nested(tensor: Tensor) -> bool:
    """Whether a tensor has rows of several shapes, and may have no shape of its own."""
    with without_torch_functions():
        return tensor.is_nested


def refused_layout(tensor: Tensor) -> tuple[str, str] | None:
    """Return what a tensor is, and what may be there in its place; None for an ordinary one.

    It asks for no shape, which nested tensors may not have."""
    with without_torch_functions():
        return _refused(tensor)


def _refused(tensor: Tensor) -> tuple[str, str] | None:
    if tensor.is_nested:
        legal = "torch.nested.to_padded_tensor(..., 0.0) and a mask, or a list of a tensor for each row"
        return f"a nested tensor ({tensor.layout})", legal
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})", "its dequantize(), or its int_repr() and its scale"
    if tensor.layout in SPARSE:
        legal = "its to_dense(), or its indices and values, of which forward makes the sparse one"
        return f"a sparse tensor ({tensor.layout})", legal
    if tensor.layout is not torch.strided:
        return f"a tensor of the layout {tensor.layout}", "its to_dense()"
    return None


def check_layout(where: str, what: str, tensor: Tensor, whole: bool = False) -> None:
    """Raise :class:`ConfigError` for a tensor of which no rows can be taken; one that is the same for all rows
    (``whole``) may be sparse."""
    found = refused_layout(tensor)
    if found is not None and not (whole and is_sparse(tensor)):
        raise ConfigError.on(where, f"{what} is {found[0]}", found[1])


def parts_of_sparse(tensor: Tensor) -> list[Tensor]:
    """Return the ordinary tensors that a sparse one consists of."""
    if tensor.layout is torch.sparse_coo:
        one = tensor.coalesce()
        return [one.indices(), one.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
