"""Views of parameters and buffers that outlive the unit, the slot or the step in which they were taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.verify.verify import verify

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Five blocks of a kind, and the squared error of what they make of ``x``."""

    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


class TiedByHand(Blocks):
    """The transposed embedding at the end is a view that export puts at the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.table((x.abs() * 3).long().clamp(0, 6))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((x @ self.table.weight.t()).flatten(0, 1), (y.abs() * 3).long().clamp(0, 6).flatten())


class HandedOn(Blocks):
    """Each block's parameter, and a frozen one's rows, scale the result of the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = self.frozen[0]
        for block, row in zip(self.blocks, self.frozen, strict=True):
            x = block(x) * scale * row.cos()
            scale = block.norm.weight[:]
        return F.mse_loss(x, y)


class Queries(nn.Module):
    """A linear layer over a parameter: its weight's gradient is multiplied outside of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.inner, self.block = nn.Parameter(torch.randn(2, WIDTH)), nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x + self.inner(self.queries).tanh().sum(0))


class Complex(nn.Module):
    """A parameter used as complex numbers, and as their conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.block = nn.Parameter(torch.randn(WIDTH // 2, 2) / 2), Block()

    def forward(self, x: Tensor) -> Tensor:
        z, w = torch.view_as_complex(x.view(-1, WIDTH // 2, 2).contiguous()), torch.view_as_complex(self.weight)
        return self.block(torch.view_as_real(z * w + z * w.conj()).flatten(1))


class Remembering(nn.Module):
    """Buffers that take what a parameter and another buffer were: both change before the step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.block = nn.Parameter(torch.randn(WIDTH)), Block()
        for name in ("seen", "before", "old"):
            self.register_buffer(name, torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x) * self.weight + self.old
        if self.training:
            self.before.copy_(self.seen)
            self.seen.copy_(x.detach().mean(0))
            self.old.copy_(self.weight.detach())
        return y


MODELS = {
    "tied-by-hand": TiedByHand, "handed-on": HandedOn, "queries": lambda: Blocks(Queries),
    "complex": lambda: Blocks(Complex),
    "remembering": lambda: Blocks(Remembering),
}  # fmt: skip
PLANS: list[tuple[int, dict[str, Any]]] = [
    (0, {}), (3, {}), (3, {"prefetch": 3}), (3, {"recompute": "full", "prefetch": 2}),
    (3, {"recompute": "selective", "prefetch": 0}),
]  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.few(5)
@pytest.mark.parametrize(("zero", "choices"), PLANS)
@pytest.mark.parametrize("name", list(MODELS))
def test_views_have_the_values_of_their_time(name: str, zero: int, choices: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(rows, WIDTH), "y": torch.randn(rows, WIDTH)} for rows in (13, 12, 7)]
    report = verify(MODELS[name]().train(), batches, data_parallel(Plan.of(microbatches=2, **choices), 2, zero))
    assert report.passed, (report.largest, report.worst[:3])
    assert report.ranks_agree
