"""The layer of Korthikanti et al. (2022, arXiv 2205.05198, figure 2): attention written out, 3 dropouts, 2 norms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.ops.keyed_random import keyed_dropout


class Layer(nn.Module):
    """``selective`` runs the attention itself again in backward: QKᵀ, softmax, dropout and the product with V.

    Under capture, dropout is torch's, which shardwise replaces; without, it is called by its own name.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.1, selective: bool = False) -> None:
        super().__init__()
        self.heads, self.p, self.selective = heads, dropout, selective
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, self.heads, -1).chunk(3, -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = (
            checkpoint(self.core, q, k, v, use_reentrant=False, preserve_rng_state=False)
            if self.selective
            else self.core(q, k, v)
        )
        y = y.transpose(1, 2).reshape(b, s, h)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[-1]))
        return self.dropout(scores.softmax(-1)) @ v

    def dropout(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return F.dropout(x, self.p, self.training)
        return keyed_dropout(x, self.p if self.training else 0.0, 0, 0, 0, (0, 1))


class Layers(nn.Module):
    """Three layers behind a lookup, so that the middle one has a layer before and after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, width), nn.Linear(width, 7)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
