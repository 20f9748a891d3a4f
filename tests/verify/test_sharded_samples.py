"""Random numbers where tensor parallelism shards the samples, or what a sample has of the dim of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.plan import Plan
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify


class Block(nn.Module):
    """It drops elements of tokens that lie one after the other; ``fixed`` lets it be captured for a number of rows."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.fixed = fixed

    def forward(self, h: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(h))))
        y = F.dropout(y.flatten(0, 1), 0.3).view_as(h)
        y = y + torch.rand_like(y.flatten(0, 1)).view_as(h) * torch.bernoulli(torch.full_like(y, 0.5))
        if self.fixed:
            y = torch.cat([row[None] for row in y])
        return h + F.dropout(y, 0.2)


class Flat(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([Block(fixed), Block(fixed)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.entry(x)
        for layer in self.layers:
            h = layer(h)
        return (self.head(h).mean((1, 2)) - y).square().mean()


@pytest.mark.quick(2)
@pytest.mark.parametrize("tokens", [6, 5, 1])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("kind", ["1d-sp", "1d"])
def test_numbers_are_those_of_one_device(kind: str, fixed: bool, tokens: int) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, tokens, 4), "y": torch.randn(rows)} for rows in (7, 5)]
    report = verify(Flat(fixed), batches, tensor_parallel(Plan.of(), 2, kind))
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert not [note for note in report.notes if "not captured" in note]
