"""torch.vmap and torch.func in a forward: such a model trains to the numbers of plain torch, and as one unit where it
does more than map ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.errors import ConfigError

Body = Callable[[Tensor, Tensor], Tensor]


def _in_place(row: Tensor, weight: Tensor) -> Tensor:
    row = row.clone()
    row[0] = 0
    return row.add_(1) @ weight


class _Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


BODIES: dict[str, Body] = {
    "vmap": lambda h, w: torch.vmap(lambda row: (w @ row).softmax(0))(h),
    "vmap that writes": lambda h, w: torch.vmap(lambda row: _in_place(row, w))(h),
    "grad": lambda h, w: h + torch.func.vmap(torch.func.grad(lambda row: (w @ row).tanh().sum()))(h),
    "function": lambda h, w: torch.vmap(lambda row: _Doubled.apply(row) @ w)(h),
    "dropout that does nothing": lambda h, w: torch.vmap(lambda row: torch.dropout(row, 0.5, False) @ w)(h),
}

DRAWN: dict[str, Body] = {
    "dropout": lambda h, w: torch.vmap(lambda row: torch.dropout(row, 0.5, True), randomness="different")(h),
    "rand": lambda h, w: torch.vmap(lambda row: row * torch.rand(5), randomness="different")(h),
}


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.layer, self.weight = body, nn.Linear(4, 5), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer(x), self.weight).square().mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(7, 4)}


@pytest.mark.parametrize("name", BODIES)
def test_it_trains(name: str) -> None:
    subject = Subject(Model(BODIES[name]), batch())
    truth = plain_run(subject)
    for dp, microbatches in ((1, 1), (2, 1), (2, 2)):
        found = errors(sharded_run(subject, dp, microbatches), truth)
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


@pytest.mark.parametrize("name", ["grad", "function"])
def test_a_note_says_where_it_is(name: str) -> None:
    note = Subject(Model(BODIES[name]), batch()).trace.notes[0]
    assert "not captured" in note and f"{__file__}:" in note


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_inside_vmap_are_refused(name: str) -> None:
    """A mapped function does not see which rows it draws for: all of them would get the same numbers."""
    with pytest.raises(ConfigError, match=rf"{name} \({__file__}:\d+\) draws inside torch.vmap.*; legal: "):
        _ = Subject(Model(DRAWN[name]), batch()).trace
