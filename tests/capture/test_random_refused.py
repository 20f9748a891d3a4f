"""Random numbers that cannot be keyed by sample are refused, with the module and the user's line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled


def _as_many_as_rows(h: Tensor) -> Tensor:
    return h * torch.rand(len(h), len(h)).mean()


def _more_with_more_rows(h: Tensor) -> Tensor:
    if h.sum() > -1e9:  # a branch that depends on values: the model is not captured
        for _ in range(len(h)):
            h = h + torch.rand_like(h)
    return h


def _gamma(h: Tensor) -> Tensor:
    return h * torch.distributions.Gamma(torch.ones(5), torch.ones(5), validate_args=False).sample()


DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "without a key": (lambda h: h * torch.poisson(h.exp()), r"aten\.poisson\.default"),
    "a permutation": (lambda h: h + h[torch.randperm(len(h))], "randperm"),
    "by a library": (_gamma, r"aten\._standard_gamma\.default"),
    "by a generator": (lambda h: h * torch.rand(5, generator=torch.Generator()), "rand"),
    "of rows by rows": (_as_many_as_rows, "rand"),
    "for each row": (_more_with_more_rows, "rand_like"),
}


class Inner(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.up = draw, nn.Linear(5, 5)

    def forward(self, h: Tensor) -> Tensor:
        return self.draw(self.up(h))


class Model(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 5), Inner(draw)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("name", DRAWS)
def test_the_place_is_named(name: str) -> None:
    draw, op = DRAWS[name]
    with pytest.raises(ConfigError, match=rf"model: .*{op} in blocks\.1 \({__file__}:\d+\).*; legal: "):
        Compiled(Model(draw), Plan.of(), {"x": torch.randn(6, 4)})
