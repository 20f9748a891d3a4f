"""Where a graph is cut, and what crosses the cuts."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
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


class Frozen(nn.Module):
    """Frozen blocks: they read a prompt that is trained, or only what is read of them is trained."""

    def __init__(self, prompt: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt = nn.Parameter(torch.randn(WIDTH)) if prompt else None
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.blocks.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x if self.prompt is None else x + self.prompt
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.head(h), y)


def numbers(rows: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, WIDTH, generator=drawn), "y": torch.randint(0, 3, (rows,), generator=drawn)}


@pytest.mark.parametrize("prompt", [True, False])
def test_frozen_blocks_are_units_too(prompt: bool) -> None:
    module = Frozen(prompt)
    assert [u.name for u in trace(module, numbers(4)).units if u.name.startswith("blocks.")] == [
        f"blocks.{i}" for i in range(4)
    ]
    for plan in (
        pipeline(Plan.of(microbatches=3), 3),
        data_parallel(pipeline(Plan.of(microbatches=2, recompute="full"), 2), 2, 1),
        data_parallel(Plan.of(microbatches=2), 2, 3),
    ):
        report = verify(module, [numbers(rows) for rows in (12, 8)], plan)
        assert report.passed and report.ranks_agree, (plan, report.worst[:3])


class Named(nn.Module):
    """Blocks that are named one by one, with numbers at the ends of their names, and not in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Module()
        for i in range(2):
            self.body.add_module(f"stage{i}_1", nn.Sequential(OrderedDict(up=nn.Linear(WIDTH, WIDTH), act=nn.Tanh())))
            self.body.add_module(f"pool{i}", nn.Identity())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.body.children():
            x = x + block(x)
        return F.cross_entropy(self.head(x), y)


def test_modules_with_names_that_end_in_numbers_are_blocks_where_none_is_numbered() -> None:
    module = Named()
    assert [u.block for u in trace(module, numbers(4)).units] == ["body.stage0_1", "body.stage1_1", "tail"]
    report = verify(module, [numbers(rows) for rows in (12, 8)], pipeline(Plan.of(microbatches=3), 3))
    assert report.passed and report.ranks_agree, report.worst[:3]
