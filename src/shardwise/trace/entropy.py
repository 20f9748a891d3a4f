"""Cross-entropy over the rows of all ranks, in pieces that stay in the cache.

The gradient of a row of scores z with target t is softmax(z) - onehot(t): it needs nothing that forward does not have, so forward makes
it, with one exponential for each score in all, and keeps it in place of the log-probabilities.  Nothing of the size of the scores is
held in fp32 where they are in lower precision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.core.layout import shard_range
from shardwise.trace import ops
from shardwise.trace.ops import Env

PIECE = {
    "cpu": 1 << 20,
    "cuda": 1 << 26,
}  # scores that are worked on at once: what fits a core's cache; on a GPU, a bound on memory


def cross_entropy(
    env: Env, logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, counted: bool,
    log_probabilities: bool = False, summand: bool = False, share: tuple[int, tuple[str, ...]] | None = None, spread: tuple[str, ...] = (ops.ROWS,),
) -> Tensor:  # fmt: skip
    """Mean cross-entropy over the rows of all ranks, as a partial sum: own sum over everybody's count (or weight) of targets.

    ``counted`` says that the count is the one in ``env.targets``, reduced once for the whole step; ``log_probabilities`` that
    ``logits`` are such already (nll_loss); ``summand`` that this is the loss, or one of those whose sum it is.  ``share`` is (classes, axes) where each
    rank over ``axes`` has the scores of some classes; those over ``spread`` each have some rows.  bf16 and fp16 scores count as cast to fp32 before.
    """
    wide = torch.float32 if logits.dtype in (torch.bfloat16, torch.float16) else logits.dtype
    plain = weight is None and not smoothing and not log_probabilities and not target.is_floating_point() and logits.dim() == 2
    count = _count(env, logits, target, weight, ignore_index, counted, spread).to(wide)
    if share is not None or (plain and logits.requires_grad and torch.is_grad_enabled()):
        result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            env, logits, target, ignore_index, count.reciprocal(), wide, env.alone and summand, share
        )
        return result
    if log_probabilities:
        return F.nll_loss(logits.to(wide), target, weight, reduction="sum", ignore_index=ignore_index) / count
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": "sum"}
    return F.cross_entropy(logits.to(wide), target, weight, **options) / count


def _count(
    env: Env, logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, counted: bool, spread: tuple[str, ...]
) -> Tensor:
    """The targets of all ranks together, or the sum of their weights."""
    if counted and env.targets is not None:
        return env.targets.clamp(min=1)
    if target.is_floating_point():
        count = logits.new_full((), logits.numel() // logits.shape[1], dtype=torch.float64)
    elif weight is None:
        count = (target != ignore_index).sum().double()
    else:
        valid = target != ignore_index
        count = (weight[target.where(valid, 0)] * valid).sum()
    return ops.all_sum(env, count, spread, "targets of the cross-entropy")


class _CrossEntropy(torch.autograd.Function):
    """``scale`` times the sum of the cross-entropies of the rows of ``logits`` (n, classes), computed in dtype ``wide``.

    ``is_loss`` says that the gradient that comes in is known to be 1, where a tensor on meta cannot say.  With ``share``, (classes, axes), these
    are the logits of this rank's part of the classes: for each piece the ranks exchange three numbers a row.
    """

    @staticmethod
    def forward(
        ctx: Any, env: Env, logits: Tensor, target: Tensor, ignore_index: int, scale: Tensor, wide: torch.dtype, is_loss: bool,
        share: tuple[int, tuple[str, ...]] | None,
    ) -> Tensor:  # fmt: skip
        where = env.kind or logits.device.type
        rows, classes = logits.shape
        gradient = torch.empty_like(logits)
        valid = (target != ignore_index)[:, None]
        index = target[:, None].where(valid, 0)
        here = valid
        if share is not None:
            start, stop = shard_range(share[0], *env.group(share[1]))
            here = valid & (index >= start) & (index < stop)
            index = (index - start).where(here, 0)
            classes = -(-share[0] // env.group(share[1])[0])  # the most that any rank has: all have as many pieces
        losses = torch.empty((rows, 1), dtype=wide, device=logits.device)
        step = max(1, PIECE.get(where, PIECE["cuda"]) // max(classes, 1))
        starts = range(0, rows, step)
        for start in starts[:2] if logits.is_meta and where != "meta" else starts:  # for their memory, two stand for all
            piece = slice(start, start + step)
            scores = logits[piece].to(wide)
            largest = scores.amax(1, keepdim=True)
            chosen = scores.gather(1, index[piece])
            powers = torch.sub(scores, largest, out=scores if wide != logits.dtype else None).exp_()
            total = powers.sum(1, keepdim=True)
            factor = scale / total
            if share is not None:
                own = largest
                largest, total, chosen = _joined(env, share[1], largest, total, chosen.where(here[piece], 0))
                factor = scale / total * (own - largest).exp_()
            losses[piece] = total.log() + largest - chosen
            powers.mul_(factor.where(valid[piece], 0))
            powers.scatter_add_(1, index[piece], (-scale).where(here[piece], 0))
            gradient[piece] = powers
        ctx.save_for_backward(gradient, valid.any())
        ctx.where, ctx.is_loss = where, is_loss
        return losses.where(valid, 0).sum() * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, any_valid = ctx.saved_tensors
        seed = grads[0].where(any_valid, 0)  # no targets at all: the loss is 0/0, its gradient nothing
        if ctx.where == "cpu":  # there a look costs nothing, and mostly it is 1
            is_one = seed == 1
            if ctx.is_loss if seed.is_meta else bool(is_one):
                return None, gradient, *[None] * 6
        return None, gradient * seed.to(gradient.dtype), *[None] * 6


def _joined(env: Env, axes: tuple[str, ...], largest: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest score, the sum of the powers relative to it, and the target's score, of all classes."""
    parts = env.group(axes)[0]
    if parts == 1:
        return largest, total, chosen
    own = torch.stack([largest, total, chosen])
    every = own.new_empty((parts, *own.shape))
    env.comm.all_gather(
        every.view(-1), own.view(-1), env.real(axes), lane="compute", what="softmax over shards of classes"
    ).wait()
    maxima, totals, targets = every.unbind(1)
    top = maxima.amax(0)
    return top, (totals * (maxima - top).exp_()).sum(0), targets.sum(0)


def valid_targets(env: Env, target: Tensor, ignore_index: int, axes: tuple[str, ...] = ()) -> Tensor:
    """The number of this rank's targets that count, as int64; with those of other ranks over ``axes``, which have the same rows."""
    return ops.all_sum(env, (target != ignore_index).sum(), axes, "targets")


def valid_targets_once(env: Env, target: Tensor, ignore_index: int, axes: tuple[str, ...] = ()) -> Tensor:
    """The same of targets that every rank has: the first rank counts them for all."""
    return valid_targets(env, target, ignore_index, axes) * (env.index == 0)
