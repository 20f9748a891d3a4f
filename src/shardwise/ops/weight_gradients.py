"""The arithmetic of products: ops whose backward leaves out the weight's gradient, and the weight gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise.nn.grouped  # noqa: F401 - it registers the product
from shardwise.backend import Backend, Kind
from shardwise.ops.own_op import own_op
from shardwise.wide import WideProduct

aten = torch.ops.aten

TABLE = "table"
"""This is the kind of a lookup whose gradient is sparse: ``nn.Embedding(sparse=True)``."""


class GradientFactors(NamedTuple):
    """The factors of the gradient of the parameter ``weight``.

    ``kind`` is a key of ``MULTIPLY``; ``rest`` are the arguments of that function after dY and X. ``dims`` is the
    permutation of the parameter's dims in the product, or None.
    """

    weight: str
    dy: Tensor
    kind: str
    x: Tensor
    dims: tuple[int, ...] | None
    rest: tuple[Any, ...]


class Kernels(NamedTuple):
    """What computes weight gradients: the kind of device and, if there is one, the kernel that multiplies matrices of
    the compute dtype into a gradient of a wider dtype.
    """

    kind: Kind
    wide: WideProduct | None = None

    @staticmethod
    def of(backend: Backend, dtype: torch.dtype | None) -> Kernels:
        """Return the kernels of a backend for the compute dtype ``dtype``."""
        return Kernels(backend.kind, backend.wide_product(dtype))


@own_op(kept=True)
def grouped(input: Tensor, weight: Tensor, bias: None, offs: Tensor) -> Tensor:
    """Compute the product of groups of rows (n, in) with a matrix for each group (groups, in, out).

    ``offs`` are the ends of the groups. The backward gives the gradient of the rows alone.
    """
    y: Tensor = _Grouped.apply(input, weight, offs)  # type: ignore[no-untyped-call]
    return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Any:
        ctx.save_for_backward(weight, offsets)
        return torch.ops.shardwise.grouped_mm(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, offsets = ctx.saved_tensors
        return torch.ops.shardwise.grouped_mm(grads[0], weight.mT, offsets), None, None


@own_op(kept=True)
def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Compute a convolution with the arguments ``rest`` of ``aten.convolution``; X may be one sample without a batch
    dim.

    The backward gives the gradients of X and bias alone. It sums the bias's gradient itself, for oneDNN would compute
    it together with the weight's.
    """
    single = x.dim() == weight.dim() - 1
    y: Tensor = _Convolution.apply(x[None] if single else x, weight, bias, *rest)  # type: ignore[no-untyped-call]
    return y[0] if single else y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.rest = rest
        return aten.convolution(x, weight, bias, *rest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = (
            aten.convolution_backward(grads[0], x, weight, None, *ctx.rest, [True, False, False])[0]
            if ctx.needs_input_grad[0]
            else None
        )
        db = grads[0].sum([0, *range(2, grads[0].dim())]) if ctx.needs_input_grad[2] else None
        return dx, None, db, *(None for _ in ctx.rest)


def accumulate(goal: Tensor, factors: GradientFactors, add: bool, kernels: Kernels) -> None:
    """Write a product's weight gradient to ``goal``, which has the parameter's shape, or ``add`` it.

    If the factors have a lower precision than ``goal``, the gradient is rounded to that first, except for products of
    matrices that ``kernels`` can multiply into a wider dtype.
    """
    _, dy, kind, x, dims, rest = factors
    MULTIPLY[kind](goal if dims is None else goal.permute(dims), dy, x, add, kernels, *rest)


def _put(goal: Tensor, value: Tensor, add: bool) -> None:
    goal.add_(value) if add else goal.copy_(value)


def _multiply(goal: Tensor, left: Tensor, right: Tensor, add: bool, kernels: Kernels) -> None:
    """Write ``left @ right``, which are matrices or batches of matrices, to ``goal``, or add it."""
    if goal.stride(-1) != 1:
        goal, left, right = goal.mT, right.mT, left.mT
    if goal.dtype != left.dtype:
        if kernels.wide is None or goal.dtype != torch.float32 or not goal.is_contiguous():
            _put(goal, left @ right, add)
        elif not goal.is_meta:  # on meta only memory counts, and this kernel allocates none
            kernels.wide(goal, left, right, add)
    elif goal.dim() == 2:
        goal.addmm_(left, right) if add else torch.mm(left, right, out=goal)
    else:
        goal.baddbmm_(left, right) if add else torch.bmm(left, right, out=goal)


def _as_rows(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix with the same last dim, which may be 0 on a rank."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _of_left(goal: Tensor, dy: Tensor, x: Tensor, add: bool, kernels: Kernels) -> None:
    """Compute the gradient of W in Y = X Wᵀ."""
    _multiply(goal, _as_rows(dy).t(), _as_rows(x), add, kernels)


def _of_right(goal: Tensor, dy: Tensor, x: Tensor, add: bool, kernels: Kernels) -> None:
    """Compute the gradient of W in Y = X W."""
    _multiply(goal, _as_rows(x).t(), _as_rows(dy), add, kernels)


def _of_batched(goal: Tensor, dy: Tensor, x: Tensor, add: bool, kernels: Kernels) -> None:
    """Compute the gradient of W in Y = X W, where all are batches of matrices."""
    _multiply(goal, x.mT, dy, add, kernels)


def _of_groups(goal: Tensor, dy: Tensor, x: Tensor, add: bool, kernels: Kernels, offsets: Tensor) -> None:
    """Compute the gradient of W in Y = X W[g] for the rows of each group g, which ends before row ``offsets[g]``."""
    if goal.stride(-1) != 1:
        goal, x, dy = goal.mT, dy, x
    _put(goal, F.grouped_mm(x.t(), dy, offs=offsets), add)


def _in_turn(goal: Tensor, dy: Tensor, x: Tensor, add: bool, kernels: Kernels, offsets: Tensor) -> None:
    """Do the same without a kernel for groups: multiply each group into the goal; on meta the first has all rows."""
    start = 0
    for group, stop in enumerate([len(x)] * len(goal) if offsets.is_meta else offsets.tolist()):
        _multiply(goal[group], x[start:stop].t(), dy[start:stop], add, kernels)
        start = stop


def _of_filters(goal: Tensor, dy: Tensor, x: Tensor, add: bool, kernels: Kernels, *rest: Any) -> None:
    if x.dim() == goal.dim() - 1:  # one sample
        x, dy = x[None], dy[None]
    weight = dy.new_empty(()).expand(goal.shape)  # only its shape matters
    _put(goal, aten.convolution_backward(dy, x, weight, None, *rest, [False, True, False])[1], add)


def _of_rows(goal: Tensor, dy: Tensor, x: Tensor, add: bool, kernels: Kernels, padding: int) -> None:
    """Compute the gradient of W in Y = W[X], straight into the rows that are used. On a GPU, which adds to rows in no
    fixed order, and if the goal is less precise than dY, the whole gradient is computed apart."""
    if kernels.kind == "gpu" or goal.dtype.itemsize < dy.dtype.itemsize:
        _put(goal, aten.embedding_dense_backward(dy, x, goal.shape[0], padding, False), add)
        return
    rows, index = _as_rows(dy).to(goal.dtype), x.reshape(-1)
    if padding >= 0:
        rows = rows.masked_fill((index == padding)[:, None], 0)
    (goal if add else goal.zero_()).index_add_(0, index, rows)


MULTIPLY: Mapping[str, Callable[..., None]] = {
    "linear": _of_left, "right": _of_right, "batched": _of_batched, "grouped": _of_groups, "in turn": _in_turn,
    "convolution": _of_filters, "embedding": _of_rows, TABLE: _of_rows,
}  # fmt: skip
"""For each kind of product the function that writes or adds the weight gradient: (goal, dY, X, add, kernels, *rest)."""
