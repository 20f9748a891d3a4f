"""Cross-entropy over the rows of all ranks, computed in pieces that stay in the cache; axes may shard the classes.

A row of scores z has the loss Σ a_c (log Σ exp z - z_c), where a_c = w_c ((1 - s) t_c + s / C) is the wanted amount of
class c, for C classes with weights w, target probabilities t (1 for the class that an integer target names) and label
smoothing s. Forward has all that the gradient Σ a · softmax(z) - a needs, so forward computes it, with one exponential
for each score in all, and saves it in place of the log-probabilities. If the scores are in lower precision than fp32,
nothing of their size is held in fp32. On a GPU with Triton the plain case, integer targets without weights and
smoothing whose classes are all here, is one launch (``triton_kernels.py``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.layout import shard_range
from shardwise.ops.env import Env
from shardwise.ops.own_op import own_op
from shardwise.ops.softmax import joined, largest

# The number of scores that are computed at once: it fits a core's cache; on a GPU it bounds the memory.
PIECE = {"cpu": 1 << 20, "gpu": 1 << 26}
REDUCTIONS = ("none", "mean", "sum")  # their indices are torch's numbers for them
NONE, MEAN, SUM = range(3)
Share = tuple[int, tuple[str, ...]]
"""(classes, axes): the axes shard this number of classes."""


@own_op(communicates=True)
def cross_entropy(
    env: Env, logits: Tensor, target: Tensor, weight: Tensor | None, *, ignore_index: int, smoothing: float,
    reduction: int, count: Tensor | int | None,
    log_probabilities: bool, summand: bool, share: Share | None,
) -> Tensor:  # fmt: skip
    """Return the cross-entropy of scores (n, classes, ...) and targets, integers (n, ...) or probabilities (n, classes,
    ...): a scalar, or (n, ...) without reduction. ``reduction`` is torch's number.

    A mean is over the rows of all ranks, as a partial sum: this rank's sum divided by ``count``, the number (or weight)
    of all ranks' targets; ``log_probabilities`` says that ``logits`` are log-probabilities (nll_loss); ``summand``
    that the model's loss is this one, or a sum with this one. If the classes are sharded (``share``), all ranks get the
    same result, but a partial sum of log-probabilities. bf16 and fp16 scores are computed in fp32.
    """
    wide = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else logits.dtype
    if count is not None:
        count = _divisor(count, logits).to(wide)
    if log_probabilities:
        found = _nll(
            env,
            logits.to(wide),
            target,
            weight,
            ignore_index,
            REDUCTIONS[SUM if reduction == MEAN else reduction],
            share,
        )
        return found if count is None else found / count
    plain = weight is None and not smoothing and not target.is_floating_point() and logits.dim() == 2
    if share is not None or (plain and logits.requires_grad and torch.is_grad_enabled()):
        scale = torch.ones((), dtype=wide, device=logits.device) if count is None else count.reciprocal()
        share = share or (logits.shape[1], ())
        kind = _Probabilities if target.is_floating_point() else _Named
        wanted = kind(env, target, weight, ignore_index, smoothing, wide, share)
        result: Tensor = _CrossEntropy.apply(
            env, logits, target, wanted, scale, reduction == NONE, env.alone and summand, share
        )  # type: ignore[no-untyped-call]
        return result
    assert count is not None
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": "sum"}
    return F.cross_entropy(logits.to(wide), target, weight, **options) / count


def _divisor(count: Tensor | int, logits: Tensor) -> Tensor:
    """Return what divides the sum, as a scalar."""
    if isinstance(count, Tensor):
        return count
    return logits.new_full((), count, dtype=Backend.of(logits.device).widest_float)


@own_op()
def valid_targets(env: Env, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the number of this rank's valid targets, an int64 scalar, or the sum of the weights of their classes in
    fp64 (fp32 on a device without it)."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return weight[target.where(valid, 0)].where(valid, 0).sum(dtype=Backend.of(target.device).widest_float)


def _own(env: Env, target: Tensor, ignore_index: int, share: Share) -> tuple[Tensor, Tensor]:
    """Return the targets counted from the rank's first class, and whether they are its own. A target that is no class
    at all counts as the rank's own, so that its lookup fails.
    """
    classes, axes = share
    if not axes:
        return target, target != ignore_index
    start, stop = shard_range(classes, *env.group(axes))
    another = ((target >= 0) & (target < start)) | ((target >= stop) & (target < classes))
    return target - start, (target != ignore_index) & ~another


def _mine(env: Env, weight: Tensor | None, share: Share) -> Tensor | None:
    """Return the weights of the rank's classes."""
    classes, axes = share
    return None if weight is None else weight[slice(*shard_range(classes, *env.group(axes)))]


def _nll(
    env: Env,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    share: Share | None,
) -> Tensor:
    """Return the loss of log-probabilities; with ``share``, only of rows whose targets are this rank's classes."""
    if share is not None:
        target, own = _own(env, target, ignore_index, share)
        target, weight, ignore_index = target.where(own, -100), _mine(env, weight, share), -100
    return F.nll_loss(log_probabilities, target, weight, reduction=reduction, ignore_index=ignore_index)


class _Named:
    """The wanted amounts a (n, classes, ...) of a rank's classes for integer targets; a piece slices the n rows."""

    def __init__(
        self, env: Env, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, wide: torch.dtype,
        share: Share
    ) -> None:  # fmt: skip
        index, own = (one.unsqueeze(1) for one in _own(env, target, ignore_index, share))
        self.index, self.own = index.where(own, 0), own
        self.valid = (target != ignore_index).unsqueeze(1) if share[1] else own
        self.named: Tensor | None = None  # the amount of the class that a target names; None means 1
        self.every: Tensor | None = None  # the amount that each class has in addition
        if weight is not None or smoothing:
            named = (
                torch.ones_like(target, dtype=wide)
                if weight is None
                else weight.to(wide)[target.where(self.valid.squeeze(1), 0)]
            )
            self.named = named.unsqueeze(1) * (1 - smoothing)
        if smoothing:
            even = torch.ones(share[0], dtype=wide, device=target.device) if weight is None else weight.to(wide)
            even = even * (smoothing / share[0])
            self.total = even.sum()
            self.every = _mine(env, even, share).view(-1, *[1] * (target.dim() - 1))

    def sums(self, piece: slice, scores: Tensor) -> tuple[Tensor, ...]:
        """Return Σ a z over the rank's classes."""
        found = scores.gather(1, self.index[piece]).where(self.own[piece], 0)
        found = found if self.named is None else found * self.named[piece]
        return (found if self.every is None else found + (scores * self.every).sum(1, keepdim=True),)

    def amount(self, piece: slice, *sums: Tensor) -> Tensor | None:
        """Return Σ a over all classes, given the ``sums`` over all ranks; None means 1 for each row."""
        if self.named is None:
            return None
        return self.named[piece] if self.every is None else self.named[piece] + self.total

    def take(self, piece: slice, exponentials: Tensor, scale: Tensor) -> None:
        """Subtract a times ``scale`` from ``exponentials``, in place."""
        taken = -scale if self.named is None else -scale * self.named[piece]
        exponentials.scatter_add_(1, self.index[piece], taken.where(self.own[piece], 0))
        if self.every is not None:
            exponentials.sub_((self.every * scale) * self.valid[piece])


class _Probabilities:
    """The wanted amounts for targets that are probabilities; a rank has the probabilities of its own classes."""

    def __init__(
        self, env: Env, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, wide: torch.dtype,
        share: Share
    ) -> None:  # fmt: skip
        self.target, self.wide, self.keep, self.each = target, wide, 1 - smoothing, smoothing / share[0]
        own = _mine(env, weight, share)
        self.weight = None if own is None else own.to(wide).view(-1, *[1] * (target.dim() - 2))
        self.valid = torch.ones_like(target[:, :1], dtype=torch.bool)

    def all(self, piece: slice) -> Tensor:
        found = self.target[piece].to(self.wide) * self.keep + self.each
        return found if self.weight is None else found * self.weight

    def sums(self, piece: slice, scores: Tensor) -> tuple[Tensor, ...]:
        """Return Σ a z and Σ a over the rank's classes."""
        wanted = self.all(piece)
        return (wanted * scores).sum(1, keepdim=True), wanted.sum(1, keepdim=True)

    def amount(self, piece: slice, *sums: Tensor) -> Tensor | None:
        return sums[1]

    def take(self, piece: slice, exponentials: Tensor, scale: Tensor) -> None:
        exponentials.sub_(self.all(piece).mul_(scale))

    def target_gradient(self, losses: Tensor) -> Tensor:
        """Return the gradient of the targets, given the losses of the classes."""
        return losses * self.keep if self.weight is None else losses * self.keep * self.weight


def _in_one_launch(logits: Tensor, wanted: _Named, scale: Tensor, kind: str, gradient: Tensor, losses: Tensor) -> bool:
    """Compute ``gradient`` and ``losses`` by Triton, if that can be; return whether it could."""
    plain = wanted.named is None and wanted.every is None and logits.dim() == 2 and logits.stride(1) == 1
    if not plain or not Backend.stood_for(logits.device, kind).triton:
        return False
    (named,) = wanted.sums(slice(None), logits)  # it also fails on a target that is no class
    if logits.is_meta:
        every = torch.empty_like(losses)
    else:
        from shardwise.ops.triton_kernels import softmax_loss

        index, valid = wanted.index.squeeze(1), wanted.valid.squeeze(1)
        every = softmax_loss(logits, index, valid, scale, gradient).unsqueeze(1)
    torch.sub(every, named, out=losses)
    return True


class _CrossEntropy(torch.autograd.Function):
    """Computes the cross-entropies of the rows of ``logits`` (n, classes, ...) in the dtype of ``scale``: their sum
    times ``scale``, or, with ``by_row``, all of them (n, ...).

    ``is_loss`` says on meta that the incoming gradient is 1. ``logits`` are those of this rank's part of ``share``; for
    each row the ranks exchange three numbers, or four if targets are probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any, env: Env, logits: Tensor, target: Tensor, wanted: _Named | _Probabilities, scale: Tensor,
        by_row: bool, is_loss: bool, share: Share
    ) -> Tensor:  # fmt: skip
        where, wide = env.kind or logits.device.type, scale.dtype
        rows, (classes, axes) = len(logits), share
        gradient = torch.empty_like(logits)
        target_gradient = torch.empty_like(target) if ctx.needs_input_grad[2] else None
        losses = torch.empty_like(wanted.valid, dtype=wide)
        whole = (
            not axes
            and isinstance(wanted, _Named)
            and _in_one_launch(logits, wanted, scale, env.kind, gradient, losses)
        )
        # The most scores of a row on any rank, so that all ranks have the same number of pieces.
        most = -(-classes // env.group(axes)[0]) * math.prod(logits.shape[2:])
        step = max(1, PIECE.get(where, PIECE["gpu"]) // max(most, 1))
        starts = range(0, 0 if whole else rows, step)
        # If only memory is measured, two pieces are enough.
        for start in starts[:2] if logits.is_meta and where != "meta" else starts:
            piece = slice(start, start + step)
            scores = logits[piece].to(wide)
            own = largest(scores, 1)
            sums = wanted.sums(piece, scores)
            reused = scores if wide != logits.dtype and target_gradient is None else None
            exponentials = torch.sub(scores, own, out=reused).exp_()
            top, total, *sums = joined(env, axes, own, exponentials.sum(1, keepdim=True), *sums)
            amount, every = wanted.amount(piece, *sums), total.log() + top
            losses[piece] = (every if amount is None else amount * every) - sums[0]
            if target_gradient is not None:
                target_gradient[piece] = wanted.target_gradient(every - scores) * scale
            factor = (scale if amount is None else scale * amount) / total
            factor = factor * (own - top).exp_() if axes else factor
            exponentials.mul_(factor.where(wanted.valid[piece], 0))
            wanted.take(piece, exponentials, scale)
            gradient[piece] = exponentials
        ctx.save_for_backward(gradient, target_gradient, wanted.valid.any())
        ctx.where, ctx.is_loss, ctx.by_row = where, is_loss, by_row
        losses = losses.where(wanted.valid, 0)
        return losses.squeeze(1) if by_row else losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, target_gradient, any_valid = ctx.saved_tensors
        seed = grads[0].where(any_valid, 0)  # without any target the loss is 0/0, but its gradient is 0
        if ctx.by_row:
            seed = seed.unsqueeze(1)
        elif ctx.where == "cpu":  # where reading the value costs nothing, and it is mostly 1
            is_one = seed == 1
            if ctx.is_loss if seed.is_meta else bool(is_one):
                return None, gradient, target_gradient, *[None] * 5
        learned = None if target_gradient is None else target_gradient * seed.to(target_gradient.dtype)
        return None, gradient * seed.to(gradient.dtype), learned, *[None] * 5
