"""The product of groups of rows with a matrix each, for every dtype and size: that of a layer of experts.

PyTorch's own grouped product is for bf16, in rows of whole 16 bytes.  For all else there is the op
``shardwise::grouped_mm``, which multiplies one group after the other.  It is one op, so that a capture sees one node,
whatever the numbers of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 8  # the elements of bf16 in 16 bytes


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the product (n, out) of the rows of each group with its matrix.

    ``x`` (n, in) has the rows of the groups one group after the other, ``weight`` is (groups, in, out), and the rows of
    group g end before row ``ends[g]``, int32 (groups).  What the rows after the last group give is not defined.
    """
    if x.dtype == weight.dtype == torch.bfloat16 and not (weight.shape[1] % ALIGNED or weight.shape[2] % ALIGNED):
        return F.grouped_mm(x, weight, offs=ends)
    found: Tensor = torch.ops.shardwise.grouped_mm(x, weight, ends)
    return found


@torch.library.custom_op("shardwise::grouped_mm", mutates_args=())
def _product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    found = input.new_zeros(len(input), weight.shape[2])
    start = 0
    for group, stop in enumerate(offs.tolist()):
        torch.mm(input[start:stop], weight[group], out=found[start:stop])
        start = stop
    return found


@_product.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


@torch.library.custom_op("shardwise::grouped_mm_backward", mutates_args=())
def _gradients(input: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    of_input, of_weight = torch.zeros_like(input), torch.zeros_like(weight)
    start = 0
    for group, stop in enumerate(offs.tolist()):
        torch.mm(grad[start:stop], weight[group].T, out=of_input[start:stop])
        torch.mm(input[start:stop].T, grad[start:stop], out=of_weight[group])
        start = stop
    return of_input, of_weight


@_gradients.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    of_input, of_weight = torch.ops.shardwise.grouped_mm_backward(*ctx.saved_tensors, grad)
    return of_input, of_weight, None


_product.register_autograd(_backward, setup_context=_keep)

__all__ = ["grouped_mm"]
