"""Softmax along a sharded dim: for each row the ranks exchange the largest value and the sum of exponentials, never the
row itself.

It does not matter which rank has which elements of a row, but each rank must have at least one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.ops import collectives
from shardwise.ops.env import Env, Groups
from shardwise.ops.own_op import own_op


def largest(x: Tensor, dim: int) -> Tensor:
    """Return the maximum of ``x`` along ``dim``, which becomes 1. The maximum of -inf alone is the least finite number,
    so that the exponentials are 0 and not NaN.
    """
    return x.amax(dim, keepdim=True).clamp(min=torch.finfo(x.dtype).min)


def joined(env: Env, axes: Groups, top: Tensor, total: Tensor, *sums: Tensor) -> tuple[Tensor, ...]:
    """Combine over the ranks of ``axes`` the maximum ``top``, the ``total`` of exponentials relative to it, and the
    plain ``sums``; all have the same shape, before and after.
    """
    if env.group(axes)[0] == 1:
        return top, total, *sums
    every = collectives.gathered(env, torch.stack([top, total, *sums]), axes, "softmax over shards of classes")
    tops, totals, *others = every.unbind(1)
    top = tops.amax(0)
    return top, (totals * (tops - top).exp_()).sum(0), *(one.sum(0) for one in others)


@own_op(communicates=True)
def softmax(env: Env, x: Tensor, dim: int, axes: Groups, dtype: torch.dtype | None, log: bool) -> Tensor:
    """Return the softmax of ``x``, or its logarithm, over ``dim``, which ``axes`` shard, after a cast to ``dtype``."""
    result: Tensor = _Softmax.apply(env, x if dtype is None else x.to(dtype), dim, axes, log)  # type: ignore[no-untyped-call]
    return result


@own_op(communicates=True)
def logsumexp(env: Env, x: Tensor, dim: int, axes: Groups, keepdim: bool) -> Tensor:
    """Return the logarithm of the sum of exp(x) over a ``dim`` that ``axes`` shard; every rank has the result."""
    result: Tensor = _LogSumExp.apply(env, x, dim, axes)  # type: ignore[no-untyped-call]
    return result if keepdim else result.squeeze(dim)


def _logarithm(env: Env, x: Tensor, dim: int, axes: Groups) -> Tensor:
    """Return the logarithm of the sum of exp(x) over all ranks; ``dim`` becomes 1."""
    top = largest(x, dim)
    top, total = joined(env, axes, top, (x - top).exp_().sum(dim, keepdim=True))
    return total.log() + top


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Softmax(torch.autograd.Function):
    """It takes an all-gather of two numbers for each row in forward, and an all-reduce of one in backward."""

    @staticmethod
    def forward(ctx: Any, env: Env, x: Tensor, dim: int, axes: Groups, log: bool) -> Tensor:
        wide = _wide(x)
        y = wide - _logarithm(env, wide, dim, axes)
        y = (y if log else y.exp_()).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.sum_of = lambda t: collectives.all_sum(
            env, t.sum(dim, keepdim=True), axes, "gradient of a softmax over shards"
        )
        ctx.log = log
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, dy = _wide(ctx.saved_tensors[0]), _wide(grads[0])
        dx = dy - y.exp() * ctx.sum_of(dy) if ctx.log else y * (dy - ctx.sum_of(dy * y))
        return None, dx.to(grads[0].dtype), None, None, None


class _LogSumExp(torch.autograd.Function):
    """It takes the same all-gather in forward; backward communicates nothing."""

    @staticmethod
    def forward(ctx: Any, env: Env, x: Tensor, dim: int, axes: Groups) -> Tensor:
        result = _logarithm(env, _wide(x), dim, axes)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, result = ctx.saved_tensors
        dy = grads[0] if grads[0].dim() == x.dim() else grads[0].unsqueeze(ctx.dim)
        return None, ((_wide(x) - result).exp_() * dy).to(x.dtype), None, None, None
