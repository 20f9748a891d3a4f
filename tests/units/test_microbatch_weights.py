"""A microbatch weighs as much as it has targets, whatever views a loss passes through on its way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Subject, parity

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda loss: loss,
    "a view and back": lambda loss: loss.view(1).reshape(()),
    "a dim and back": lambda loss: loss.unsqueeze(0).squeeze(0),
    "flat": lambda loss: loss.flatten().squeeze(),
    "like itself": lambda loss: loss.view_as(loss).contiguous().clone(),
}


class Scores(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.end, self.layer = end, nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.end(F.cross_entropy(self.layer(x), y))


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_of_unequal_targets(name: str) -> None:
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, -100, -100, -100, -100, 1])
    one = Subject(Scores(LOSSES[name]), {"x": x, "y": y})
    parity(one, dp=2, microbatches=2)
    assert one.trace.targets is not None
