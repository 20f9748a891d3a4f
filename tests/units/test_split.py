"""Where a graph is cut, and what crosses the cuts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.units.tracing import trace
from shardwise.verify.verify import verify

VOCABULARY, WIDTH = 50, 12


class ScaledHead(nn.Module):
    """Embeddings tied by hand: the head computes with a scaled copy of them, made before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, shift = (self.embedding.weight * 0.5).chunk(2, dim=1)
        h = self.embedding(x)
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(F.linear(h, torch.cat([weight, shift], 1)).flatten(0, 1), y.flatten())


def batch(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(rows))
    return {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}


def test_what_follows_from_parameters_alone_is_made_where_it_is_read() -> None:
    found = trace(ScaledHead(), batch(4))
    assert len(found.units) > 3
    crossing = {name for unit in found.units for name in unit.inputs}
    assert all(unit.values[name].meta["val"].shape[-1] == WIDTH for unit in found.units for name in unit.inputs), (
        crossing
    )
    assert "embedding.weight" in found.units[0].parameters and "embedding.weight" in found.units[-1].parameters


def test_and_is_right_under_zero() -> None:
    torch.manual_seed(0)
    plan = data_parallel(Plan.of(microbatches=2), 2, 3)
    report = verify(ScaledHead(), [batch(rows) for rows in (5, 4)], plan)
    assert report.passed and report.ranks_agree
