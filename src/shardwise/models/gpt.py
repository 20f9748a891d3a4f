"""This is a GPT in plain PyTorch: learned positions, pre-norm blocks, tied embedding and head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over the targets that count, a scalar.

    ``logits`` is (B, S, V), ``labels`` (B, S) integers: the token that follows each position, or -100 where there is
    none.  It is computed in fp32 at least, whatever the precision of the logits.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def document_mask(documents: Tensor) -> Tensor:
    """Return which keys (last dim) each query may look at, (B, 1, S, S) bool: those of its own document up to itself.

    ``documents`` (B, S) says to which document each token belongs.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    causal = places.unsqueeze(1) >= places
    return ((documents.unsqueeze(2) == documents.unsqueeze(1)) & causal).unsqueeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Return attention of (B, heads, S, size), causal, or as ``mask`` (B, 1, S, S) allows, in the shape of ``q``."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)


class Attention(nn.Module):
    """Compute causal self-attention, (B, S, width) -> (B, S, width), with one linear for queries, keys and values."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        size = x.shape[-1] // self.heads
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, size)).permute(2, 0, 3, 1, 4).unbind(0)
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Compute two linears around a GELU, (B, S, width) -> (B, S, width)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.up(x)))


class Block(nn.Module):
    """Add attention and an MLP, each normed before, to what came in, (B, S, width) -> (B, S, width)."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), mask))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """This has GPT-2's architecture and initialisation (Radford et al., 2019).

    ``hidden`` is the MLP's width (default 4 x width), ``context`` the longest sequence in tokens, ``dropout`` the
    probability in the residual branches, the embedding and the attention weights.  ``width`` must be a multiple of
    ``heads``.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        width: int = 256,
        layers: int = 4,
        heads: int = 8,
        hidden: int | None = None,
        context: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.context = context
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, hidden or 4 * width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Make weights normal with deviation 0.02, less for those of the 2 x layers sums into the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return logits (B, S, vocabulary) of the tokens ``input_ids`` (B, S), or with ``labels`` the scalar loss.

        ``labels`` (B, S) are the next tokens, already aligned; -100 is ignored.  ``documents`` (B, S), growing along S,
        says to which document each token belongs: attention stays inside documents, and positions begin anew in each.
        """
        mask = None if documents is None else document_mask(documents)
        if mask is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        else:
            positions = mask.squeeze(1).sum(-1) - 1  # tokens of the same document before this one
        x = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits if labels is None else token_loss(logits, labels)
