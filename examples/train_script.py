"""A small GPT on Python's own documentation.

`plain_script.py` trains it on one device, `train_script.py` with shardwise on any number of devices; all else is equal.
"""

from __future__ import annotations

from itertools import islice
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shardwise import distribute


class Text(Dataset[dict[str, Tensor]]):
    """Windows of ``length`` bytes; the targets are the same bytes shifted by one."""

    def __init__(self, length: int) -> None:
        self.bytes = torch.tensor(list("\n".join(topics.values()).encode()))
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.bytes[index * self.length :][: self.length + 1]
        return {"tokens": window[:-1], "targets": window[1:]}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch; tokens and targets have the shape (rows, length)."""
        logits = self.head(self.norm(self.blocks(self.embedding(tokens) + self.positions)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = distribute(model, optimizer)
    loader = DataLoader(Text(length=64), batch_size=16, shuffle=True)
    for step, batch in enumerate(islice(loader, 50), start=1):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
