"""Statements that read values and write to a tensor in place: all that shares its memory sees the write, under every
plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_eager_calls import PLANS
from test_reads_in_line import Model, batches
from torch import Tensor

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify


class Augmented(Model):
    """A view from before sees the write, though nothing else uses the name."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        first = h[:, :2]
        if h.sum() > self.limit:
            h *= 2.0
        return self.head(self.blocks[1](x)).square().mean() + first.square().mean()


class ThroughView(Model):
    """A method writes to a part of what goes on."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        left = h[:, :3]
        if h.sum() > self.limit:
            left.clamp_(min=0).add_(1)
        return self.head(self.blocks[1](h)).square().mean()


class Item(Model):
    """A number that is read is in what is written to some elements."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        scale = float(h.detach().abs().max())
        h[:, 0] = h[:, 1] / scale
        return self.head(self.blocks[1](h)).square().mean()


class Loop(Model):
    """It writes as often as the mean over all rows asks for, and counts; each turn of an outer loop does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        for limit in (3.0, 5.0):
            turns = 0
            while h.abs().mean() < limit and turns < 20:
                h *= 1.3
                turns += 1
        return self.head(self.blocks[1](h)).square().mean()


class Unseen(Model):
    """Autograd sees one write and not the other."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > self.limit:
            with torch.no_grad():
                h *= 2.0
            h[0:] += 1
        else:
            h -= h.mean()
        return self.head(self.blocks[1](h)).square().mean()


class Adding(Model):
    """What has no gradient before has one after, in one branch; a field is changed as well."""

    def forward(self, x: Tensor) -> Tensor:
        h, total = self.blocks[0](x * 1.0), torch.zeros_like(x)
        if h.sum() > self.limit:
            total += h
            x *= 0.5
        return self.head(self.blocks[1](total + x)).square().mean()


class Parts(Model):
    """One part after the other writes to one tensor, the second to what a first has returned."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > self.limit:
            h = h * 1.5
        h = self.blocks[1](h)
        if h.sum() < 1:
            h *= 0.5
        elif h.mean() > 0:
            h[:, 1] = 0
        return self.head(h).square().mean()


MODELS: dict[str, Any] = {
    one.__name__: one for one in (Augmented, ThroughView, Item, Loop, Unseen, Adding, Parts)
}  # fmt: skip


@pytest.mark.quick(6)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_the_step_of_one_device(name: str, plan: str) -> None:
    torch.manual_seed(0)
    report = verify(MODELS[name]().double(), batches(), PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]
    assert any(f"{name}." in note and "runs as it is written" in note for note in report.notes), report.notes


@pytest.mark.slow
@pytest.mark.parametrize("plan", [
    data_parallel(Plan.of(recompute="full"), 2), data_parallel(Plan.of(microbatches=2, rows="batch"), 2),
    tensor_parallel(Plan.of(), 4, "2d"),
])  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_other_plans(name: str, plan: Plan) -> None:
    torch.manual_seed(0)
    report = verify(MODELS[name]().double(), batches(), plan)
    assert report.passed and report.largest < 1e-12, report.worst[:3]


def test_a_batch_is_not_changed() -> None:
    torch.manual_seed(0)
    given = {"x": batches()[0]["x"].float()}
    before = given["x"].clone()
    Compiled(Adding(), PLANS["dp"], given)
    assert torch.equal(given["x"], before)


class Both(Model):
    """A part sees what it writes through another name."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        first = h[:, :1]
        if h.sum() > self.limit:
            h *= 2.0
            y = first * 3.0
        else:
            y = first * 2.0
        return self.head(self.blocks[1](h + y)).square().mean()


def test_memory_that_a_part_uses_in_two_ways_is_not_told_apart() -> None:
    torch.manual_seed(0)
    why = "writes to a tensor whose memory it uses in another way, too"
    with pytest.raises(ConfigError, match=rf"nor can it run as written, for Both\.forward .*{why}"):
        Compiled(Both(), PLANS["tp"], {"x": batches()[0]["x"].float()})


class Viewing(Model):
    """A part returns a view, which shows what is written later to what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > self.limit:
            y = h[:, :1]
        else:
            y = h[:, 1:2]
        h += 1.0
        return self.head(self.blocks[1](h + y)).square().mean()


class Lately(Model):
    """The same, where no other answer can show it before the first step."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        y = h[:, :1] if h.detach().numpy().sum() < 0 else h[:, :1] * 2.0
        h += 1.0
        return self.head(self.blocks[1](h + y)).square().mean()


def test_a_view_that_a_part_returns_of_what_is_written_later() -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=r"forward writes to what Viewing\.forward .* returns of its arguments"):
        Compiled(Viewing(), PLANS["tp"], {"x": batches()[0]["x"].float()})
    with pytest.raises(ShardwiseError, match=r"Lately\.forward .* for this batch returns memory of its arguments"):
        verify(Lately().double(), batches(), PLANS["tp"])


class Shaping(Model):
    """To change a shape in place is no write."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        if h.sum() > self.limit:
            h.unsqueeze_(0)
        return self.head(self.blocks[1](h)).square().mean()


def test_a_shape_that_changes_in_place() -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="the model could not be captured"):
        Compiled(Shaping(), PLANS["tp"], {"x": batches()[0]["x"].float()})
