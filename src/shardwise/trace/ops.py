"""What local graphs call: differentiable collectives, keyed random ops, and ops that mix the rows of a batch.

On an axis a value is V (sharded), P (partial sum), I (replicated, its gradient too) or, as what an operand is required to be, R
(replicated, its gradient partial).  The duals are I↔I, V↔V, R↔P, so each function names the move of the value and
``dual`` says whether a replicated result is I or R.  The sharded factor of a dim is always the rows of the batch: of ``pre`` × rows × rest.
Every function takes an :class:`Env` first: the graph is shared by ranks, microbatches and steps, the Env is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.layout import shard_range
from shardwise.trace import random as keyed

ALPHA = 1.7580993408473766  # minus SELU's limit at minus infinity


@dataclass
class Env:
    """Where and when a unit runs: this rank's place on the batch axes and one microbatch of one step."""

    comm: Any = None  # a Communicator; None means one rank
    axes: tuple[str, ...] = ()
    parts: int = 1  # ranks over `axes`
    index: int = 0  # this rank among them
    rows: int = 0  # rows of the microbatch, of all ranks together
    offset: int = 0  # the microbatch's first row in the batch of the step
    seed: int = 0
    step: int = 0
    ordinal: int = 0  # of the first random op of the unit that runs
    targets: Tensor | None = None  # valid targets of the microbatch, of all ranks together
    tape: Any = None  # what selective recomputation keeps of the unit that runs: a Tape of `trace/recall.py`
    kind: str = ""  # type of device that tensors on meta stand for, where their memory is of interest
    alone: bool = False  # whether the microbatch is known to be the whole step: on meta, where its weight has no value

    def range(self, index: int | None = None) -> tuple[int, int]:
        """(start, stop) in the microbatch of the rows of a rank, by default this one."""
        return shard_range(self.rows, self.parts, self.index if index is None else index)

    @property
    def most(self) -> int:
        """The largest number of rows that a rank has: uneven shards are padded to it."""
        return -(-self.rows // self.parts)


def rows(env: Env) -> int:
    """Rows of the microbatch over all ranks: the batch dim of the captured graph."""
    return env.rows


def local_rows(env: Env) -> int:
    """Rows of the microbatch on this rank."""
    start, stop = env.range()
    return stop - start


def row_start(env: Env) -> int:
    """The first row of this rank in the microbatch."""
    return env.range()[0]


# ---- collectives ---------------------------------------------------------------------------------------------------


def all_sum(env: Env, x: Tensor, what: str) -> Tensor:
    """The sum over ranks, as a new tensor; no gradient flows through it."""
    if env.parts == 1:
        return x
    out = x.contiguous().clone()
    env.comm.all_reduce(out, env.axes, lane="compute", what=what).wait()
    return out


def _gather_rows(env: Env, x: Tensor, dim: int, pre: int, post: int) -> Tensor:
    """All ranks' rows of a dim of pre × rows × post, in order; uneven shards travel padded."""
    if env.parts == 1:
        return x
    mine = local_rows(env)
    shape = list(x.shape)
    shape[dim] = pre * env.rows * post
    outer, inner = math.prod(x.shape[:dim]) * pre, math.prod(x.shape[dim + 1 :]) * post
    padded = x.new_zeros((env.most, outer, inner))
    padded[:mine] = x.reshape(outer, mine, inner).transpose(0, 1)
    out = x.new_empty((env.parts, env.most, outer, inner))
    env.comm.all_gather(out.view(-1), padded.view(-1), env.axes, lane="compute", what="all_gather of rows").wait()
    pieces = [out[i, : (b - a)] for i in range(env.parts) for a, b in [env.range(i)]]
    return torch.cat(pieces).transpose(0, 1).reshape(shape)


def _own_rows(env: Env, x: Tensor, dim: int, pre: int, post: int) -> Tensor:
    """This rank's rows of a dim of pre × rows × post."""
    if env.parts == 1:
        return x
    start, stop = env.range()
    if pre == 1:
        return x.narrow(dim, start * post, (stop - start) * post)
    shape = list(x.shape)
    split = x.reshape(*shape[:dim], pre, env.rows, post, *shape[dim + 1 :])
    shape[dim] = pre * (stop - start) * post
    return split.narrow(dim + 1, start, stop - start).reshape(shape)


def _scatter_rows(env: Env, x: Tensor, dim: int, pre: int, post: int) -> Tensor:
    """This rank's rows of the sum over ranks; uneven shards travel padded."""
    if env.parts == 1:
        return x
    shape = list(x.shape)
    outer, inner = math.prod(x.shape[:dim]) * pre, math.prod(x.shape[dim + 1 :]) * post
    folded = x.reshape(outer, env.rows, inner).transpose(0, 1)
    padded = x.new_zeros((env.parts, env.most, outer, inner))
    for i in range(env.parts):
        start, stop = env.range(i)
        padded[i, : stop - start] = folded[start:stop]
    out = x.new_empty((env.most, outer, inner))
    env.comm.reduce_scatter(out.view(-1), padded.view(-1), env.axes, lane="compute", what="reduce_scatter of rows").wait()
    mine = local_rows(env)
    shape[dim] = pre * mine * post
    return out[:mine].transpose(0, 1).reshape(shape)


class _Move(torch.autograd.Function):
    """A move of a value and the move of its gradient, each a function of (env, tensor)."""

    @staticmethod
    def forward(ctx: Any, env: Env, x: Tensor, there: Any, back: Any) -> Tensor:
        ctx.env, ctx.back = env, back
        out = there(env, x)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.back(ctx.env, grads[0]), None, None


def _move(env: Env, x: Tensor, there: Any, back: Any) -> Tensor:
    if env.parts == 1:
        return x
    result: Tensor = _Move.apply(env, x, there, back)  # type: ignore[no-untyped-call]
    return result


def _same(env: Env, x: Tensor) -> Tensor:
    return x


def _first_only(env: Env, x: Tensor) -> Tensor:
    return x if env.index == 0 else torch.zeros_like(x)


def _reduce(env: Env, x: Tensor) -> Tensor:
    return all_sum(env, x, "all_reduce")


def all_reduce(env: Env, x: Tensor, dual: str = "I") -> Tensor:
    """P → I or R: the sum over ranks."""
    return _move(env, x, _reduce, _same if dual == "I" else _reduce)


def replicate(env: Env, x: Tensor) -> Tensor:
    """I → R: unchanged; its gradient is summed over ranks."""
    return _move(env, x, _same, _reduce)


def own(env: Env, x: Tensor) -> Tensor:
    """R → I, for a parameter (whose gradients are summed later) used where all ranks compute the same: one of them contributes."""
    return _move(env, x, _same, _first_only)


def is_first(env: Env) -> bool:
    """Whether this rank is the one that contributes where all compute the same."""
    return env.parts == 1 or env.index == 0


def partial(env: Env, x: Tensor) -> Tensor:
    """I → P: kept on the first rank, zero on the others."""
    return _move(env, x, _first_only, _same)


def gather(env: Env, x: Tensor, dim: int, pre: int, post: int, dual: str = "I") -> Tensor:
    """V → I or R: every rank's rows."""

    def there(env: Env, x: Tensor) -> Tensor:
        return _gather_rows(env, x, dim, pre, post)

    def back(env: Env, g: Tensor) -> Tensor:
        return (_own_rows if dual == "I" else _scatter_rows)(env, g, dim, pre, post)

    return _move(env, x, there, back)


def shard(env: Env, x: Tensor, dim: int, pre: int, post: int) -> Tensor:
    """I → V: this rank's rows."""

    def there(env: Env, x: Tensor) -> Tensor:
        return _own_rows(env, x, dim, pre, post)

    def back(env: Env, g: Tensor) -> Tensor:
        return _gather_rows(env, g, dim, pre, post)

    return _move(env, x, there, back)


def shard_leaf(env: Env, x: Tensor, dim: int, pre: int, post: int) -> Tensor:
    """R → V, for a parameter with a batch-sized dim: this rank's rows, zeros elsewhere in the gradient."""
    return _own_rows(env, x, dim, pre, post)


def scatter(env: Env, x: Tensor, dim: int, pre: int, post: int) -> Tensor:
    """P → V: this rank's rows of the sum."""

    def there(env: Env, x: Tensor) -> Tensor:
        return _scatter_rows(env, x, dim, pre, post)

    def back(env: Env, g: Tensor) -> Tensor:
        return _gather_rows(env, g, dim, pre, post)

    return _move(env, x, there, back)


# ---- kernels ------------------------------------------------------------------------------------------------------------


def never_empty(op: Callable[..., Tensor], dim: int, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """``op(x, …)``, which keeps ``dim``, where the op's kernel wants at least one row in it."""
    if x.shape[dim]:
        return op(x, *args, **options)
    shape = list(x.shape)
    shape[dim] = 1
    return op(torch.cat([x, x.new_zeros(shape)], dim), *args, **options).narrow(dim, 0, 0)


# ---- ops that mix rows -----------------------------------------------------------------------------------------------


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """BatchNorm in training, functional: (y, new running mean, new running variance), or (y,) without running statistics."""
    if mean is None or var is None:
        return (F.batch_norm(x, None, None, weight, bias, True, momentum, eps),)
    mean, var = mean.clone(), var.clone()
    return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps), mean, var


def sync_batch_norm(
    env: Env, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, momentum: float,
    eps: float, per_row: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """BatchNorm over the rows of all ranks: ``x`` is V on dim 0, ``per_row`` elements of it a row, the statistics I, weight and bias R."""
    if env.parts == 1:
        return batch_norm(x, weight, bias, mean, var, momentum, eps)
    result: tuple[Tensor, ...] = _SyncBatchNorm.apply(env, x, weight, bias, mean, var, momentum, eps, per_row)  # type: ignore[no-untyped-call]
    return result


class _SyncBatchNorm(torch.autograd.Function):
    """One gather of (mean, variance) in forward, one stacked all-reduce in backward; statistics combined as by Chan et al. (1979)."""

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
        per_row: int,
    ) -> Any:
        dims = [0, *range(2, x.dim())]
        each = math.prod(x.shape[2:]) * per_row
        wide = x.to(torch.promote_types(x.dtype, torch.float32) if running_mean is None else running_mean.dtype)
        local = torch.zeros((2, x.shape[1]), dtype=wide.dtype, device=x.device)
        if x.shape[0]:
            v, m = torch.var_mean(wide, dims, correction=0)
            local[0], local[1] = m, v
        every = torch.empty((env.parts, *local.shape), dtype=local.dtype, device=x.device)
        env.comm.all_gather(every.view(-1), local.view(-1), env.axes, lane="compute", what="BatchNorm statistics").wait()
        counts = torch.tensor([(b - a) * each for a, b in map(env.range, range(env.parts))], dtype=local.dtype)
        counts = counts.to(x.device)[:, None]
        total = env.rows * each
        mean = (every[:, 0] * counts).sum(0) / total
        var = ((every[:, 1] + (every[:, 0] - mean) ** 2) * counts).sum(0) / total
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.env, ctx.total, ctx.has_bias = env, total, bias is not None
        if running_mean is None:
            return (y,)
        unbiased = var * (total / max(total - 1, 1))
        new_mean = torch.lerp(running_mean, mean, momentum)
        new_var = torch.lerp(running_var, unbiased, momentum)
        ctx.mark_non_differentiable(new_mean, new_var)
        return y, new_mean, new_var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        dims = [0, *range(2, x.dim())]
        dy = grads[0].to(mean.dtype)
        xhat = (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        sums = torch.stack([dy.sum(dims), (dy * xhat).sum(dims)])
        total = all_sum(ctx.env, sums, "BatchNorm gradient") / ctx.total
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        dx = (dy - total[0].view(shape) - xhat * total[1].view(shape)) * scale.view(shape)
        if not local_rows(ctx.env):
            dx = torch.zeros_like(dx)  # a stand-in for no rows at all has had no part in the statistics
        dw = None if weight is None else sums[1].to(weight.dtype)
        db = sums[0].to(grads[0].dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return None, dx.to(x.dtype), dw, db, None, None, None, None, None


# ---- random ops --------------------------------------------------------------------------------------------------------


def _row_start(env: Env, whole: bool) -> int:
    return env.offset if whole else env.offset + env.range()[0]


def dropout(
    env: Env, x: Tensor, p: float, ordinal: int, batch: tuple[int, int] | None, whole: bool, shape: Sequence[int] | None = None
) -> Tensor:
    """Dropout with a keyed mask; ``whole`` says that ``x`` holds the rows of all ranks; ``shape`` is the mask's, if not x's."""
    return keyed.keyed_dropout(
        x, p, True, env.seed, env.step, env.ordinal + ordinal, batch, _row_start(env, whole), shape, env.kind
    )


def feature_dropout(env: Env, x: Tensor, p: float, ordinal: int, batch: tuple[int, int] | None, whole: bool) -> Tensor:
    """Dropout of whole channels (dim 1)."""
    return dropout(env, x, p, ordinal, batch, whole, (*x.shape[:2], *[1] * (x.dim() - 2)))


def alpha_dropout(
    env: Env, x: Tensor, p: float, ordinal: int, batch: tuple[int, int] | None, whole: bool, shape: Sequence[int] | None = None
) -> Tensor:
    """Dropout to SELU's limit, then the affine map that keeps mean and variance (Klambauer et al. 2017)."""
    if p in (0, 1):
        return dropout(env, x, p, ordinal, batch, whole, shape)
    row = _row_start(env, whole)
    keep = keyed.keyed_mask(
        p, env.seed, env.step, env.ordinal + ordinal, x.shape if shape is None else shape, batch, row, x.device, env.kind
    )
    scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    kept = keep.to(x.dtype)
    return x * (kept * scale) + ((kept - 1) * (ALPHA * scale) + ALPHA * scale * p)


def feature_alpha_dropout(env: Env, x: Tensor, p: float, ordinal: int, batch: tuple[int, int] | None, whole: bool) -> Tensor:
    """Alpha dropout of whole channels (dim 1)."""
    return alpha_dropout(env, x, p, ordinal, batch, whole, (*x.shape[:2], *[1] * (x.dim() - 2)))


def attention(
    env: Env, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, ordinal: int,
    batch: tuple[int, int] | None, whole: bool, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with dropout on its probabilities, spelled out so that the mask is keyed."""
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    dead = torch.isneginf(scores).all(-1, keepdim=True)  # a query that may look at nothing gives zeros, as in the fused kernels
    chances = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return dropout(env, chances, p, ordinal, batch, whole) @ v


def random_like(
    env: Env, kind: str, ordinal: int, batch: tuple[int, int] | None, whole: bool, x: Tensor, a: float, b: float
) -> Tensor:
    """Uniform in [a, b), or normal with mean a and deviation b, of x's shape and dtype."""
    return random_of(env, kind, ordinal, batch, whole, x.shape, x.dtype, x.device, a, b)


def random_of(
    env: Env, kind: str, ordinal: int, batch: tuple[int, int] | None, whole: bool, shape: Sequence[int],
    dtype: torch.dtype | None, device: Any, a: float, b: float,
) -> Tensor:  # fmt: skip
    """As :func:`random_like`, of a shape; ``kind`` is uniform, normal or randint."""
    key = (env.seed, env.step, env.ordinal + ordinal, tuple(shape), batch, _row_start(env, whole), device or "cpu", env.kind)
    if kind == "randint":
        return keyed.keyed_randint(int(a), int(b), *key, dtype=dtype or torch.int64)
    dtype = dtype or torch.get_default_dtype()
    if kind == "normal":
        return keyed.keyed_normal(*key, dtype=dtype).mul_(b).add_(a)
    return keyed.keyed_uniform(*key, dtype=dtype).mul_(b - a).add_(a)


def bernoulli(env: Env, p: Tensor, ordinal: int, batch: tuple[int, int] | None, whole: bool) -> Tensor:
    """1 with probability p, else 0."""
    return keyed.keyed_bernoulli(p, env.seed, env.step, env.ordinal + ordinal, batch, _row_start(env, whole), env.kind)
