"""Buffers that a first forward makes larger, as tables of positions are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify


class Block(nn.Module):
    """It keeps a table of distances between places, which is made when rows of another length come."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("distances", torch.zeros(1, 1))
        self.layer, self.slope = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        if self.distances.shape[0] != x.shape[1]:
            self.distances = self.table(x)
        return x + (-self.slope * self.distances).softmax(-1) @ torch.tanh(self.layer(x))

    def table(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype)
        return (places[:, None] - places).abs()


class Registering(Block):
    """It registers the buffer anew, and remembers the longest row, as rotary embeddings did."""

    longest = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.register_buffer("distances", self.table(x), persistent=False)
        return x + (-self.slope * self.distances).softmax(-1) @ torch.tanh(self.layer(x))


class OfTheBatch(Block):
    """The table depends on what the batch has."""

    def table(self, x: Tensor) -> Tensor:
        return super().table(x) + x.detach().mean()


class OfTheWeights(Block):
    """The table depends on what the model learns."""

    def table(self, x: Tensor) -> Tensor:
        return super().table(x) * self.slope.detach()


class Net(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.entry(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h.mean(1)), y)


def batch(rows: int, length: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, length, 4, generator=own), "y": torch.arange(rows) % 3}


PLANS = {
    "dp": data_parallel(Plan.of(microbatches=2), 2),
    "zero3": data_parallel(Plan.of(), 3, 3),
    "tp": tensor_parallel(Plan.of(), 2),
    "pp": pipeline(Plan.of(microbatches=2), 2),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Block, Registering])
def test_a_table_that_a_first_forward_makes(kind: type[Block], plan: str) -> None:
    report = verify(Net(kind), [batch(7, 5), batch(4, 5)], PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert any("a first forward gave blocks.0.distances, blocks.1" in note for note in report.notes), report.notes


@pytest.mark.parametrize("kind", [OfTheBatch, OfTheWeights])
def test_a_table_of_values_is_refused(kind: type[Block]) -> None:
    model = Net(kind)
    with pytest.raises(ConfigError, match=r"assigns a tensor of shape \(5, 5\), .* to the buffer blocks.0.distances"):
        Compiled(model, PLANS["dp"], batch(7, 5))
    assert model.blocks[0].distances.shape == (1, 1)


def test_a_table_of_another_length_is_refused() -> None:
    """On one device it would change again; a captured step has one shape for each buffer."""
    with pytest.raises(ConfigError, match=r"to the buffer blocks.0.distances; legal: .* of shape \(5, 5\)"):
        verify(Net(Block), [batch(7, 5), batch(7, 6)], PLANS["dp"])
