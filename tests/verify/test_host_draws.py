"""What forward draws from the generators of Python and numpy is the same on one device and under every plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

WIDTH = 8


def spans(shape: tuple[int, int], lengths: Tensor) -> numpy.ndarray:
    """Return a mask with a span in each row, within the row's length, which starts by chance, as in SpecAugment."""
    mask = numpy.zeros(shape, dtype=bool)
    extra = int(numpy.random.rand(1).item() < 0.5)
    for row, length in zip(mask, lengths.tolist(), strict=True):
        start = numpy.random.randint(0, max(length - 1, 1))
        row[start : start + 2 + extra] = True
    return mask


class Speech(nn.Module):
    """It hides spans of its input behind a vector that learns."""

    def __init__(self, also: bool = False) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, WIDTH), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head, self.hidden, self.also = nn.Linear(WIDTH, 3), nn.Parameter(torch.rand(WIDTH)), also

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(self.first(x).tanh(), 0.1, self.training)
        h = self.masked(h, mask)
        for layer in self.layers:
            h = h + layer(h).tanh()
        if self.also and self.training:
            scale = torch.tensor([random.uniform(0.5, 2) for _ in range(len(x))], dtype=h.dtype)
            h = h * scale[:, None, None]
        return F.cross_entropy(self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)), y)

    def masked(self, h: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = h.shape
        if self.training:
            chosen = spans((rows, length), mask.sum(1))
            chosen = torch.tensor(chosen, device=h.device, dtype=torch.bool)
            h = torch.where(chosen[..., None], self.hidden, h)
        return h


def batch(seed: int, rows: int = 7, length: int = 6) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows, 1), generator=own)
    return {
        "x": torch.randn(rows, length, 4, generator=own), "mask": (torch.arange(length) < lengths).long(),
        "y": torch.randint(0, 3, (rows,), generator=own),
    }  # fmt: skip


PLANS: Mapping[str, Callable[[], Plan]] = {
    "one device": Plan.of,
    "dp and microbatches": lambda: data_parallel(Plan.of(microbatches=2), 2),
    "zero3": lambda: data_parallel(Plan.of(), 3, zero=3),
    "tp": lambda: tensor_parallel(Plan.of(), 2),
    "tp, dp and microbatches": lambda: tensor_parallel(data_parallel(Plan.of(microbatches=3), 2), 2),
    "pp": lambda: pipeline(Plan.of(microbatches=2), 2, "1f1b"),
}


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_draws_what_one_device_draws(plan: str, also: bool) -> None:
    torch.manual_seed(0)
    before = random.getstate(), str(numpy.random.get_state())
    report = verify(Speech(also), [batch(0), batch(1), batch(2, rows=5)], PLANS[plan]())
    assert report.passed, report
    assert (random.getstate(), str(numpy.random.get_state())) == before
