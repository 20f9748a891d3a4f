"""This is a GPT in plain PyTorch: learned positions, pre-norm blocks, tied embedding and head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.nn import MoE


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


def apply_mlp(mlp: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what an MLP, or a mixture of experts, gives for ``x``, and what it adds to the loss, if it adds any."""
    if not isinstance(mlp, MoE):
        return mlp(x), None
    found, loss = mlp(x)
    return found, loss if mlp.has_loss else None


def with_losses(loss: Tensor, added: Sequence[Tensor | None]) -> Tensor:
    """Return the loss with those that the blocks add to it."""
    return sum((one for one in added if one is not None), loss)


class Block(nn.Module):
    """Add attention and an MLP, each normed before, to what came in, (B, S, width) -> (B, S, width).

    ``moe`` are arguments of :class:`~shardwise.nn.MoE`, which is then in place of the MLP.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, dropout: float, moe: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden) if moe is None else MoE(width, hidden, activation="gelu", **moe)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = x + self.drop(self.attention(self.norm1(x), mask))
        found, loss = apply_mlp(self.mlp, self.norm2(x))
        return x + self.drop(found), loss


class GPT(nn.Module):
    """This has GPT-2's architecture and initialisation (Radford et al., 2019).

    ``hidden`` is the MLP's width (default 4 x width), ``context`` the longest sequence in tokens, ``dropout`` the
    probability in the residual branches, the embedding and the attention weights.  ``width`` must be a multiple of
    ``heads``.  ``moe`` are arguments of :class:`~shardwise.nn.MoE`, such as ``{"experts": 8, "top_k": 2}``: then each
    block has experts, of ``hidden`` elements each, in place of its MLP.
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
        moe: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.context = context
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, hidden or 4 * width, dropout, moe) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Make weights normal with deviation 0.02, less for those of the 2 x layers sums into the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "mlp.down", "shared_down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return logits (B, S, vocabulary) of the tokens ``input_ids`` (B, S), or with ``labels`` the scalar loss.

        ``labels`` (B, S) are the next tokens, already aligned; -100 is ignored.  In training the losses of experts are
        added.  ``documents`` (B, S), growing along S, says to which document each token belongs: attention stays inside
        documents, and positions begin anew in each.
        """
        mask = None if documents is None else document_mask(documents)
        if mask is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        else:
            positions = mask.squeeze(1).sum(-1) - 1  # tokens of the same document before this one
        x = self.drop(self.wte(input_ids) + self.wpe(positions))
        added = []
        for block in self.blocks:
            x, loss = block(x, mask)
            added.append(loss)
        logits: Tensor = self.lm_head(self.norm(x))
        if labels is None:
            return logits
        return with_losses(token_loss(logits, labels), added if self.training else ())
