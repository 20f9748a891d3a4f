"""Norms whose statistics span several ranks: over the rows of a batch, or over a sharded dim of a row or a weight."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.ops.collectives import all_sum, gathered
from shardwise.ops.env import ROWS, Env, Groups
from shardwise.ops.own_op import own_op


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute BatchNorm in training over dim 1 of ``x`` (n, channels, ...); return (y, new running mean, new running
    variance), or (y,) without running statistics.
    """
    if mean is None or var is None:
        return (F.batch_norm(x, None, None, weight, bias, True, momentum, eps),)
    mean, var = mean.clone(), var.clone()
    if not len(mean):  # torch's kernel needs a channel, and a rank may have none of a sharded dim
        return x.clone(), mean, var
    return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps), mean, var


def group_norm(x: Tensor, each: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute GroupNorm of ``x`` (n, channels, ...) with ``each`` channels in a group; there may be none."""
    groups = x.shape[1] // each
    return F.group_norm(x, groups, weight, bias, eps) if groups else x.clone()


def fixed_batch_norm(x: Tensor, *args: Any) -> Tensor:
    """Compute ``aten.batch_norm`` of ``x`` (n, channels, ...) with fixed statistics; there may be no channels."""
    return torch.ops.aten.batch_norm.default(x, *args) if x.shape[1] else x.clone()


@own_op(communicates=True)
def sync_batch_norm(
    env: Env, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None,
    momentum: float,
    eps: float, axes: Groups = (ROWS,), stand_in: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute BatchNorm with statistics over the rows of all ranks of ``axes``, in any split: ``x`` is V on dim 0, the
    statistics I, weight and bias R. ``stand_in`` says that ``x`` stands for no rows and is left out of the statistics.
    """
    if env.group(axes)[0] == 1:
        return batch_norm(x, weight, bias, mean, var, momentum, eps)
    result: tuple[Tensor, ...] = _SyncBatchNorm.apply(env, x, weight, bias, mean, var, momentum, eps, axes, stand_in)  # type: ignore[no-untyped-call]
    return result


class _SyncBatchNorm(torch.autograd.Function):
    """It takes an all-gather of (means, variances, number of elements) in forward and one stacked all-reduce in
    backward; statistics are combined as in Chan et al. (1979).
    """

    @staticmethod
    def forward(
        ctx: Any,
        env: Env,
        x: Tensor,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        momentum: float,
        eps: float,
        axes: Groups,
        stand_in: bool,
    ) -> Any:
        dims = [0, *range(2, x.dim())]
        wide = x.to(torch.promote_types(x.dtype, torch.float32) if running_mean is None else running_mean.dtype)
        channels, elements = x.shape[1], 0 if stand_in else x.shape[0] * math.prod(x.shape[2:])
        local = torch.zeros(2 * channels + 1, dtype=wide.dtype, device=x.device)
        if elements:
            v, m = torch.var_mean(wide, dims, correction=0)
            local[:channels], local[channels:-1] = m, v
            local[-1].fill_(elements)  # to assign a number would copy it to the device and make the host wait
        every = gathered(env, local, axes, "BatchNorm statistics")
        means, variances, counts = every[:, :channels], every[:, channels:-1], every[:, -1:]
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        var = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), total)
        ctx.env, ctx.axes, ctx.stand_in, ctx.has_bias = env, axes, stand_in, bias is not None
        if running_mean is None:
            return (y,)
        unbiased = var * (total / (total - 1).clamp(min=1))
        new_mean = torch.lerp(running_mean, mean, momentum)
        new_var = torch.lerp(running_var, unbiased, momentum)
        ctx.mark_non_differentiable(new_mean, new_var)
        return y, new_mean, new_var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, mean, inverse, elements = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        dims = [0, *range(2, x.dim())]
        dy = grads[0].to(mean.dtype)
        xhat = (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        sums = torch.stack([dy.sum(dims), (dy * xhat).sum(dims)])
        total = all_sum(ctx.env, sums, ctx.axes, "BatchNorm gradient") / elements
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        dx = (dy - total[0].view(shape) - xhat * total[1].view(shape)) * scale.view(shape)
        if ctx.stand_in:
            dx = torch.zeros_like(dx)
        dw = None if weight is None else sums[1].to(weight.dtype)
        db = sums[0].to(grads[0].dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return None, dx.to(x.dtype), dw, db, None, None, None, None, None, None


# ---- BatchNorm in three ops, so that microbatches can exchange their statistics --------------------------------------


@own_op()
def batch_statistics(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return mean, variance and number of elements of each channel (dim 1) of ``x``, in ``dtype``: (1, 3, channels)."""
    wide, dims = x.to(dtype), [0, *range(2, x.dim())]
    elements = x.shape[0] * math.prod(x.shape[2:])
    if not elements:
        return wide.sum(dims).expand(1, 3, -1)  # zeros, to which a gradient leads
    var, mean = torch.var_mean(wide, dims, correction=0)
    return torch.stack([mean, var, torch.full_like(mean, elements)])[None]


@own_op(communicates=True)
def combined_statistics(env: Env, each: Tensor, axes: Groups) -> Tensor:
    """Return the statistics of all rows, (3, channels), given those of pieces on each rank, (pieces, 3, channels).

    The result is R over ``axes``."""
    own = _combined(each)
    if env.group(axes)[0] == 1:
        return own
    together: Tensor = _Together.apply(env, own, axes)  # type: ignore[no-untyped-call]
    return _combined(together)


def _combined(each: Tensor) -> Tensor:
    """Return the statistics of several pieces together, as Chan et al. (1979) combine them."""
    means, variances, counts = each.unbind(1)
    total = counts.sum(0)
    divisor = total.clamp(min=1)  # a rank may have no rows
    mean = (means * counts).sum(0) / divisor
    var = ((variances + (means - mean) ** 2) * counts).sum(0) / divisor
    return torch.stack([mean, var, total])


class _Together(torch.autograd.Function):
    """V → R: stack what each rank has along a new first dim."""

    @staticmethod
    def forward(ctx: Any, env: Env, x: Tensor, axes: Groups) -> Tensor:
        ctx.env, ctx.axes = env, axes
        return gathered(env, x, axes, "BatchNorm statistics")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        total = all_sum(ctx.env, grads[0], ctx.axes, "BatchNorm gradient")
        return None, total[ctx.env.group(ctx.axes)[1]], None


@own_op()
def batch_norm_by(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, momentum: float,
    eps: float, statistics: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what :func:`batch_norm` returns, given the ``statistics`` of all rows, (3, channels)."""
    y: Tensor = _NormBy.apply(x, weight, bias, statistics, eps)  # type: ignore[no-untyped-call]
    if mean is None or var is None:
        return (y,)
    own, spread, total = statistics.detach().to(mean.dtype)
    unbiased = spread * (total / (total - 1).clamp(min=1))
    return y, torch.lerp(mean, own, momentum), torch.lerp(var, unbiased, momentum)


class _NormBy(torch.autograd.Function):
    """Normalises each channel by given statistics, which have a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, statistics: Tensor, eps: float) -> Tensor:
        ctx.eps, ctx.has_bias = eps, bias is not None
        ctx.save_for_backward(x, weight, statistics)
        return F.batch_norm(x, statistics[0], statistics[1], weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, statistics = ctx.saved_tensors
        mean, inverse = statistics[0], torch.rsqrt(statistics[1] + ctx.eps)
        shape, dims = [1, -1] + [1] * (x.dim() - 2), [0, *range(2, x.dim())]
        dy = grads[0].to(mean.dtype)
        total = dy.sum(dims)
        along = (dy * (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)).sum(dims)
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        of_statistics = torch.stack([-scale * total, -0.5 * scale * inverse * along, torch.zeros_like(total)])
        dw = None if weight is None else along.to(weight.dtype)
        db = total.to(grads[0].dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return (dy * scale.view(shape)).to(x.dtype), dw, db, of_statistics, None


@own_op(communicates=True)
def norm_of_width(
    env: Env,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    width: int,
    axes: Groups,
    centred: bool,
) -> Tensor:
    """Compute LayerNorm (``centred``) or RMSNorm over a last dim of ``width`` elements, which ``axes`` shard, as they
    shard weight and bias.
    """
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    result: Tensor = _NormOfWidth.apply(env, x, eps, width, axes, centred)  # type: ignore[no-untyped-call]
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias


class _NormOfWidth(torch.autograd.Function):
    """Normalises ``x``; forward takes an all-reduce for each statistic, and backward a stacked one."""

    @staticmethod
    def forward(ctx: Any, env: Env, x: Tensor, eps: float, width: int, axes: Groups, centred: bool) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        ctx.mean_of = lambda t: all_sum(env, t, axes, "statistics of a norm") / width
        mean = ctx.mean_of(wide.sum(-1, keepdim=True)) if centred else None
        if mean is not None:
            wide = wide - mean
        inverse = torch.rsqrt(ctx.mean_of(wide.square().sum(-1, keepdim=True)) + eps)
        normal = wide * inverse
        ctx.save_for_backward(normal, inverse)
        ctx.centred = centred
        return normal.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normal, inverse = ctx.saved_tensors
        dy = grads[0].to(normal.dtype)
        sums = [(dy * normal).sum(-1, keepdim=True), *([dy.sum(-1, keepdim=True)] if ctx.centred else [])]
        along, *mean = ctx.mean_of(torch.cat(sums, -1)).split(1, -1)
        dx = dy - normal * along
        return None, ((dx - mean[0] if mean else dx) * inverse).to(grads[0].dtype), None, None, None, None


@own_op(communicates=True)
def weight_norm(env: Env, v: Tensor, g: Tensor, dim: int, axes: Groups) -> Tensor:
    """Compute ``g`` · v / ‖v‖ (Salimans and Kingma, arXiv 1602.07868), with a norm for each slice of ``v`` along
    ``dim``; ``axes`` shard another dim of ``v``, and ``g``, of one element along all dims but ``dim``, is R."""
    direction: Tensor = _Direction.apply(env, v, dim, axes)  # type: ignore[no-untyped-call]
    return direction * g


class _Direction(torch.autograd.Function):
    """Divides ``v`` by the norm of its slices; forward and backward take an all-reduce each."""

    @staticmethod
    def forward(ctx: Any, env: Env, v: Tensor, dim: int, axes: Groups) -> Tensor:
        wide = v.to(torch.promote_types(v.dtype, torch.float32))
        rest = [d for d in range(v.dim()) if d != dim]
        ctx.summed = lambda t: all_sum(env, t.sum(rest, keepdim=True), axes, "norm of a weight")
        norm: Tensor = ctx.summed(wide.square()).sqrt()
        direction = wide / norm
        ctx.save_for_backward(direction, norm)
        return direction.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        direction, norm = ctx.saved_tensors
        dy = grads[0].to(direction.dtype)
        return None, ((dy - direction * ctx.summed(dy * direction)) / norm).to(grads[0].dtype), None, None
