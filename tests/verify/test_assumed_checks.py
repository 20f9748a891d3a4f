"""Checks of values in a forward that a healthy step passes: the model is captured, and each step makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify


def finite(h: Tensor) -> Tensor:
    """As in the encoders of DETR."""
    if not torch.isfinite(h).all():
        limit = torch.finfo(h.dtype).max - 1000
        h = h.clamp(-limit, limit)
    return h


def not_inf_or_nan(h: Tensor) -> Tensor:
    if torch.isinf(h).any() or h.isnan().any():
        h = torch.zeros_like(h)
    return h


def in_order(h: Tensor) -> Tensor:
    low, high = h.sigmoid() - 1, h.sigmoid()
    if not (high >= low).all():
        raise ValueError("boxes end before they begin")
    return h


def beside_the_distance(h: Tensor) -> Tensor:
    """What ``l1_loss`` has compared is read from then on as what it made of both."""
    goal = torch.ones(h.shape[1:], dtype=h.dtype).expand(h.shape)
    distance = F.l1_loss(h, goal)
    if not torch.isfinite(h).all() or (goal < 0).any():
        raise ValueError("no box")
    return h - distance / 100


def small(h: Tensor) -> Tensor:
    assert h.detach().abs().max() < 1e3, "it has exploded"
    return h


CHECKS: dict[str, Callable[[Tensor], Tensor]] = {
    "finite": finite,
    "not inf or nan": not_inf_or_nan,
    "raises": in_order,
    "beside l1_loss": beside_the_distance,
    "asserts": small,
}

PLANS = {
    "dp": data_parallel(Plan.of(microbatches=2), 3),
    "ZeRO-3": data_parallel(Plan.of(), 2, 3),
    "tp": tensor_parallel(Plan.of(), 2, "1d"),
    "tp-sp": tensor_parallel(Plan.of(), 2, "1d-sp"),
    "pp": pipeline(Plan.of(microbatches=2), 2),
}


class Checked(nn.Module):
    """It checks what each of its blocks computes."""

    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3)])
        self.check = check

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.check(x + block(x))
        return (x.mean(-1) - y).square().mean()


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, 4, 6, generator=own, dtype=torch.float64)
    return {"x": numbers, "y": torch.randn(rows, 4, generator=own, dtype=torch.float64)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("check", CHECKS)
def test_the_step_of_one_device(check: str, plan: str) -> None:
    torch.manual_seed(0)
    module = Checked(CHECKS[check]).double()
    report = verify(module, [batch(7, 1), batch(5, 2)], PLANS[plan])
    assert report.passed and report.largest < 1e-12, report.worst[:3]


@pytest.mark.parametrize("check", [one for one in CHECKS if one != "beside l1_loss"])
def test_rows_and_shards_are_checked_where_they_are(check: str) -> None:
    """But for a maximum, which is one number of all."""
    given = {name: one.float() for name, one in batch(6, 1).items()}
    plan = tensor_parallel(data_parallel(Plan.of(), 2), 2, "1d")
    found = Compiled(Checked(CHECKS[check]), plan, given).general
    assert found.opaque is None and found.checks is None
    assert bool(found.meets) == (check == "asserts")


@pytest.mark.parametrize("plan", ["dp", "tp", "pp"])
def test_another_outcome_stops_the_step(plan: str) -> None:
    torch.manual_seed(0)
    bad = batch(6, 2)
    bad["x"][4, 0, 0] = float("inf")
    with pytest.raises(ShardwiseError, match=r"a check of values .*\.py:\d+\) has another outcome"):
        verify(Checked(finite).double(), [batch(6, 1), bad], PLANS[plan])


def grown(h: Tensor) -> Tensor:
    return h * 2 if h.detach().sum() > 0 else h


def not_all(h: Tensor) -> Tensor:
    if not (h.detach() > 0).any():
        raise ValueError("nothing is positive")
    return h


@pytest.mark.parametrize("check", [grown, not_all])
def test_other_branches_are_not_taken_for_granted(check: Callable[[Tensor], Tensor]) -> None:
    """Neither those that go on by another way, nor those whose values differ."""

    class Inside(Checked):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.blocks[0](x) * self.blocks[1][0].bias[0]
            if (x.detach() > 0).any() if check is not_all and locals() else x.detach().sum() > 0:
                return (self.blocks[2](x).mean(-1) - y).square().mean()
            if check is not_all:
                raise ValueError("nothing is positive")
            return x.square().mean() + y.mean()

    given = {name: one.float() for name, one in batch(6, 1).items()}
    with pytest.raises(ConfigError, match="tp: the model could not be captured"):
        Compiled(Inside(check), PLANS["tp"], given)
