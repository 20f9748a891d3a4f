"""This is a Llama in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.nn import MoE

from .gpt import apply_mlp, attend, document_mask, token_loss, with_losses


class RMSNorm(nn.Module):
    """Compute x / rms(x) * weight over the last dim, with statistics in fp32 at least (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        low = x.dtype in (torch.bfloat16, torch.float16)
        wide = x.float() if low else x
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (y.to(x.dtype) if low else y) * self.weight


def rotary_table(context: int, size: int) -> Tensor:
    """Return cos and sin of position x frequency, (2, context, size); a head's halves share their frequencies."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn pairs (i, i + size/2) of ``x`` (B, heads, S, size) by ``rotary`` (2, S, size) (Su et al. 2021)."""
    cos, sin = rotary.unbind(0)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Compute causal attention, (B, S, width) -> (B, S, width), in which groups of heads share keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.groups = heads // kv_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.size, self.size).transpose(1, 2)

    def _shared(self, x: Tensor) -> Tensor:
        """Return one copy of each key or value head for every query head of its group."""
        if self.groups == 1:
            return x
        return x.unsqueeze(2).expand(-1, -1, self.groups, -1, -1).flatten(1, 2)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        q = rotate(self._heads(self.q_proj(x)), rotary)
        k = self._shared(rotate(self._heads(self.k_proj(x)), rotary))
        v = self._shared(self._heads(self.v_proj(x)))
        y = attend(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Compute down(silu(gate(x)) * up(x)), (B, S, width) -> (B, S, width) (Shazeer, 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def swiglu_hidden(width: int) -> int:
    """Return 8/3 x width, rounded up to a multiple of 32, for as many parameters as a plain MLP of 4 x width has."""
    return -(-8 * width // 96) * 32


class Block(nn.Module):
    """Add attention and an MLP, each normed before, to what came in, (B, S, width) -> (B, S, width).

    ``moe`` are arguments of :class:`~shardwise.nn.MoE`, which is then in place of the MLP.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, moe: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.norm1 = RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.norm2 = RMSNorm(width)
        self.mlp = SwiGLU(width, hidden) if moe is None else MoE(width, hidden, **moe)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = x + self.attention(self.norm1(x), rotary, mask)
        found, loss = apply_mlp(self.mlp, self.norm2(x))
        return x + found, loss


class Llama(nn.Module):
    """This has Llama's architecture (Touvron et al., 2023).

    ``kv_heads`` (default: heads) divides ``heads``, which divides ``width`` into heads of an even size; ``hidden`` is
    the MLP's width (default: :func:`swiglu_hidden`); with ``tied`` the head is the embedding.  ``moe`` are arguments of
    :class:`~shardwise.nn.MoE`, such as ``{"experts": 8, "top_k": 2}``: then each block has experts, of ``hidden``
    elements each, in place of its MLP.
    """

    rotary: Tensor

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        width: int = 256,
        layers: int = 4,
        heads: int = 8,
        kv_heads: int | None = None,
        hidden: int | None = None,
        context: int = 256,
        tied: bool = False,
        moe: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if width % (2 * heads) or heads % kv_heads:
            raise ValueError(f"{width=} must be an even multiple of {heads=}, and that a multiple of {kv_heads=}")
        self.context, hidden = context, hidden or swiglu_hidden(width)
        self.embedding = nn.Embedding(vocabulary, width)
        self.register_buffer("rotary", rotary_table(context, width // heads), persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden, moe) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return logits (B, S, vocabulary) of ``input_ids`` (B, S), or with aligned ``labels`` the scalar mean loss.

        In training the losses of experts are added to it.  ``documents`` (B, S) says to which document each token
        belongs: attention stays inside it.  Positions need not begin anew, because rotary attention sees their
        differences only.
        """
        mask = None if documents is None else document_mask(documents)
        x = self.embedding(input_ids)
        rotary = self.rotary[:, : input_ids.shape[1]].to(x.dtype)
        added = []
        for block in self.blocks:
            x, loss = block(x, rotary, mask)
            added.append(loss)
        logits: Tensor = self.lm_head(self.norm(x))
        if labels is None:
            return logits
        return with_losses(token_loss(logits, labels), added if self.training else ())
