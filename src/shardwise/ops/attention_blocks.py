"""Attention of queries to a block of the keys, with what is needed to merge it with that to other blocks.

Beside its result a block gives for each query the logarithm of the sum of exp(score), over the keys of the block.  From
these the results of blocks are merged (Dao et al., FlashAttention, arXiv 2205.14135, section 3.1), and the backward of
a block asks for the merged result and the merged logarithms alone.

The fused kernels of torch are used where they give these logarithms for what is asked, and plain products elsewhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Block(NamedTuple):
    """Queries (..., heads, length, size), keys and values (..., heads of keys, block, size), and a mask that broadcasts
    to the scores (..., heads, length, block) or None; ``causal`` asks that no query looks beyond the key of its number.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    kernel: str  # "host", "flash", or "" for plain products, as Backend.attention_kernel says

    @property
    def shared(self) -> int:
        """The number of heads of queries that share a head of keys."""
        return self.q.shape[-3] // self.k.shape[-3] if self.q.dim() > 2 else 1

    @property
    def fused(self) -> bool:
        """Whether a fused kernel takes the block."""
        sizes = {x.shape[-1] for x in (self.q, self.k, self.v)}
        if self.q.dim() != 4 or len(sizes) > 1:
            return False
        half = self.q.dtype in (torch.float16, torch.bfloat16)
        aligned = self.q.shape[-1] % 8 == 0 and self.q.shape[-1] <= 256
        return self.kernel == "host" or (self.kernel == "flash" and half and aligned and self.mask is None)


class Result(NamedTuple):
    """The result of a block (..., heads, length, size) and the logarithms (..., heads, length), which are -inf where a
    query may attend to no key; ``state`` is what a kernel's backward asks for beside them."""

    out: Tensor
    logarithms: Tensor
    state: tuple[Tensor, ...] = ()


def attend(block: Block) -> Result:
    """Return the attention of the queries to the block."""
    if not block.fused:
        scores = _scores(block)
        logarithms = scores.logsumexp(-1)
        weights = (scores - _finite(logarithms)[..., None]).exp().to(block.q.dtype)
        return Result(weights @ _repeated(block.v, block.shared), logarithms)
    if block.kernel == "host":
        options = {"attn_mask": _added(block), "scale": block.scale}
        out, logarithms = aten._scaled_dot_product_flash_attention_for_cpu(
            block.q, block.k, block.v, 0.0, block.causal, **options
        )
        return Result(out, logarithms if block.mask is None else logarithms.masked_fill(_dead(block), -math.inf))
    k, v = (_repeated(x, block.shared) for x in (block.k, block.v))
    found = aten._scaled_dot_product_flash_attention(block.q, k, v, 0.0, block.causal, False, scale=block.scale)
    return Result(found[0], found[1][..., : block.q.shape[-2]], (found[6], found[7]))


def attend_backward(
    block: Block, grad: Tensor, merged: Result, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of the queries, keys, values and mask of a block, from that of the merged result; that of
    a mask has the shape of the scores, and is None unless the mask is ``learned``, which no fused kernel knows."""
    logarithms = _finite(merged.logarithms)
    if learned or not block.fused:
        dq, dk, dv, scores = _plain_backward(block, grad, merged.out, logarithms)
        return dq, dk, dv, scores if learned else None
    grad = grad.contiguous()
    if block.kernel == "host":
        options = {"attn_mask": _added(block), "scale": block.scale}
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, block.q, block.k, block.v, merged.out, logarithms, 0.0, block.causal, **options
        )
        return *found, None
    k, v = (_repeated(x, block.shared) for x in (block.k, block.v))
    lengths = None, None, block.q.shape[-2], k.shape[-2]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, block.q, k, v, merged.out, logarithms.contiguous(), *lengths, 0.0, block.causal, *merged.state,
        scale=block.scale,
    )  # fmt: skip
    return dq, _folded(dk, block.shared), _folded(dv, block.shared), None


def merge(out: Tensor, logarithms: Tensor, more: Result) -> None:
    """Merge the result of another block into ``out`` and ``logarithms``, in place."""
    both = torch.logaddexp(logarithms, more.logarithms)
    old, new = ((one - _finite(both)).exp()[..., None] for one in (logarithms, more.logarithms))
    out.mul_(old).add_(more.out * new)
    logarithms.copy_(both)


def _finite(logarithms: Tensor) -> Tensor:
    """Return 0 where a query has no key: its weights, exp(-inf - 0), are 0 then."""
    return logarithms.masked_fill(torch.isneginf(logarithms), 0)


def _scores(block: Block) -> Tensor:
    """Return the scores (..., heads, length, block), in fp32 at least; -inf where a query may not look."""
    scores = (block.q @ _repeated(block.k, block.shared).transpose(-2, -1)) * block.scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if block.causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if block.mask is None:
        return scores
    return scores.masked_fill(~block.mask, -math.inf) if block.mask.dtype is torch.bool else scores + block.mask


def _plain_backward(
    block: Block, grad: Tensor, out: Tensor, logarithms: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, k, v = block.q.dtype, _repeated(block.k, block.shared), _repeated(block.v, block.shared)
    weights = (_scores(block) - logarithms[..., None]).exp()
    wide = weights.dtype
    of_scores = (grad @ v.transpose(-2, -1)).to(wide) - (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    of_scores *= weights
    scaled = (of_scores * block.scale).to(dtype)
    of_keys, of_values = scaled.transpose(-2, -1) @ block.q, weights.to(dtype).transpose(-2, -1) @ grad
    return scaled @ k, _folded(of_keys, block.shared), _folded(of_values, block.shared), of_scores


def _repeated(x: Tensor, number: int) -> Tensor:
    return x if number == 1 else x.repeat_interleave(number, -3)


def _folded(x: Tensor, number: int) -> Tensor:
    """Return the sum over the heads of queries that share a head of keys."""
    return x if number == 1 else x.view(*x.shape[:-3], -1, number, *x.shape[-2:]).sum(-3)


def _added(block: Block) -> Tensor | None:
    """Return a mask as numbers to add, of as many dims as the scores."""
    mask = block.mask
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=block.q.dtype, device=mask.device).masked_fill(~mask, -math.inf)
    return mask.to(block.q.dtype).expand(*block.q.shape[:-1], block.k.shape[-2])


def _dead(block: Block) -> Tensor:
    """Return which queries may attend to no key of the block."""
    assert block.mask is not None
    none = ~block.mask.any(-1) if block.mask.dtype is torch.bool else torch.isneginf(block.mask).all(-1)
    return none.expand(block.q.shape[:-1])
