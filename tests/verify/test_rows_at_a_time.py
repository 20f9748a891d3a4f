"""Models that are captured for one number of rows at a time: their microbatches may have several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

HEADS = 4


class RowByRow(nn.Module):
    """It goes through rows in Python, and passes a list of them from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = list(x.unbind())
        for block in self.blocks:
            rows = [block(row) for row in rows]
        return (torch.stack(rows).mean(1) - y).square().mean()


class Heads(nn.Module):
    """It drops of as many heads as a microbatch has rows, and fixes their number by a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, HEADS * 3), nn.Linear(HEADS * 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.stack([x[i] * 2 for i in range(len(x))])
        h = F.dropout(self.up(x).view(-1, HEADS, 3), 0.4, self.training)
        return (self.down(h.flatten(1))[:, 0] - y).square().mean()


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 5, generator=own, dtype=torch.float64),
        "y": torch.randn(rows, generator=own, dtype=torch.float64),
    }


def test_microbatches_of_one_size_pass_lists_between_stages() -> None:
    torch.manual_seed(0)
    report = verify(RowByRow().double(), [batch(8, 1), batch(8, 2)], pipeline(Plan.of(microbatches=2), 2))
    assert report.passed and report.largest < 1e-12, report.worst[:3]


class Centred(RowByRow):
    """Its rows meet, so that each microbatch is captured by itself."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, *others = self.blocks
        h = first(x)
        rows = list((h - h.mean(0)).unbind())
        for block in others:
            rows = [block(row) for row in rows]
        return (torch.stack(rows).mean(1) - y).square().mean()


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", ["1f1b", "gpipe", "all"])
def test_those_of_two_sizes_pass_lists_of_two_lengths(plan: str) -> None:
    torch.manual_seed(0)
    if plan == "all":
        found = tensor_parallel(data_parallel(pipeline(Plan.of(microbatches=3), 2), 2), 2)
    else:
        found = pipeline(Plan.of(microbatches=2), 2, plan)
    report = verify(Centred().double(), [batch(7, 1), batch(5, 2)], found)
    assert report.passed and report.largest < 1e-12, report.worst[:3]


class Skipping(RowByRow):
    """Three rows skip from the first block to the last."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = first = [self.blocks[0](row) for row in x.unbind()]
        for block in list(self.blocks)[1:]:
            rows = [block(row) for row in rows]
        if len(first) == 3:
            rows = [a + b for a, b in zip(first, rows, strict=True)]
        return (torch.stack(rows).mean(1) - y).square().mean()


def test_those_in_which_other_stages_pass_something_are_refused() -> None:
    given = {name: one.float() for name, one in batch(7, 1).items()}
    found = Compiled(Skipping(), pipeline(Plan.of(microbatches=2), 2), given)
    found.programs_for([found.trace((), 4), found.trace((), 4)])
    with pytest.raises(ConfigError, match=r"microbatches: some have 4 and 3 rows, .* legal: a number that divides"):
        found.programs_for([found.trace((), 4), found.trace((), 3)])


class Shared(RowByRow):
    """For three rows, two blocks read what follows from the batch alone."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = list(x.unbind())
        scale = (x > 0).double().mean(-1, keepdim=True).to(x).unbind() if len(rows) == 3 else None
        for block in self.blocks:
            rows = [block(row) for row in rows]
            if scale is not None:
                rows = [row * one for row, one in zip(rows, scale, strict=True)]
        return (torch.stack(rows).mean(1) - y).square().mean()


def test_those_that_are_cut_into_other_units_are_refused() -> None:
    given = {name: one.float() for name, one in batch(7, 1).items()}
    found = Compiled(Shared(), Plan.of(microbatches=2), given)
    assert len(found.trace((), 4).units) < len(found.trace((), 3).units)
    with pytest.raises(ConfigError, match="microbatches: by the way that forward takes .* other units"):
        found.programs_for([found.trace((), 4), found.trace((), 3)])


@pytest.mark.parametrize("rows", [7, 9])
def test_as_many_rows_as_heads(rows: int) -> None:
    """The capture for the first number tells which dim of the random numbers has the rows."""
    torch.manual_seed(0)
    plan = data_parallel(Plan.of(microbatches=2), 2)
    report = verify(Heads().double(), [batch(rows, 1), batch(2 * HEADS, 2)], plan)
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    first, other = ({k: v.float() for k, v in batch(number, 1).items()} for number in (rows, HEADS))
    assert Compiled(Heads(), plan, first).trace((), HEADS).opaque is None
    assert "has the samples is not known" in str(Compiled(Heads(), Plan.of(), other).general.opaque)


class Places(Heads):
    """It drops of a table of places, for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, HEADS, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.stack([x[i] * 2 for i in range(len(x))])
        h = self.up(x).view(-1, HEADS, 3) * F.dropout(self.places, 0.4, self.training)
        return (self.down(h.flatten(1))[:, 0] - y).square().mean()


def test_as_many_rows_as_places() -> None:
    """The capture for the first number tells that no dim of the random numbers has rows."""
    torch.manual_seed(0)
    plan = data_parallel(Plan.of(microbatches=2), 2)
    report = verify(Places().double(), [batch(7, 1), batch(HEADS, 2)], plan)
    assert report.passed and report.largest < 1e-12, report.worst[:3]


def test_rows_that_cannot_be_captured_alone_are_refused() -> None:
    """Where the first batch tells nothing of them."""

    class Either(Heads):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if len(x) == 3 and not bool((self.up(x) < 1e9).sum() > 0):
                return x.sum() + self.up(x).sum()
            return super().forward(x, y)

    given = {name: one.float() for name, one in batch(7, 1).items()}
    found = Compiled(Either(), Plan.of(microbatches=1), given)
    assert found.general.opaque is None
    with pytest.raises(ConfigError, match="microbatch: 3 rows at a time cannot be captured: "):
        found.trace((), 3)
