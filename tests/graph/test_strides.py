"""``as_strided`` becomes a lookup, whose rows stay apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

LENGTH, WIDTH = 12, 8


def windows(x: Tensor) -> Tensor:
    """Blocks of 6 that overlap by half: (rows, 3, 6, width)."""
    step = LENGTH // 4 * x.stride(1)
    return x.as_strided((x.shape[0], 3, 6, WIDTH), (x.stride(0), step, x.stride(1), x.stride(2)))


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": windows,
    "windows of another order": lambda x: windows(x.transpose(0, 1).contiguous().transpose(0, 1)),
    "windows of padded rows": lambda x: windows(nn.functional.pad(x, (0, 0, 0, 2))[:, :LENGTH]),
    "across dims": lambda x: x.contiguous().as_strided((x.shape[0], 5, 4), (LENGTH * WIDTH, 17, 2)),
}


class Windowed(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        seen = self.way(h).flatten(1) if self.way(h).dim() > 1 else self.way(h)[:, None]
        return ((torch.tanh(seen).mean(-1) - y) ** 2).mean()


@pytest.mark.parametrize("plan", ["dp", "tp"])
@pytest.mark.parametrize("way", WAYS)
def test_the_step_of_one_device(way: str, plan: str) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(5, LENGTH, 4), "y": torch.randn(5)} for _ in range(2)]
    chosen = data_parallel(Plan.of(), 3, 3) if plan == "dp" else tensor_parallel(Plan.of(), 2, "1d")
    module = Windowed(WAYS[way])
    report = verify(module, batches, chosen)
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    found = Compiled(module, chosen, batches[0]).general
    assert found.opaque is None and not found.meets
