"""Models and losses that cannot train are refused when they are traced, by what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.units.tracing import trace

BATCH = {"x": torch.randn(4, 3), "y": torch.randint(0, 5, (4,))}


class Model(nn.Module):
    """A linear layer whose forward ends as asked."""

    def __init__(self, end: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(3, 5), end

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.end(self.linear(x), y)


def boom(h: Tensor, y: Tensor) -> Tensor:
    raise RuntimeError("boom in forward")


ENDS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "raises": (boom,
    r"in a trial with 4 rows of the example batch \(x .*\): RuntimeError: boom in forward \(.*py:\d+, in boom\)"),
    "nothing": (lambda h, y: None, "returned None; legal: a scalar loss"),
    "scores": (lambda h, y: h, r"returned a tensor of shape \(rows, 5\); legal: a scalar loss"),
    "integers": (lambda h, y: y.sum(), "returned a loss of torch.int64; legal: a loss of a floating-point dtype"),
    "constant": (lambda h, y: torch.tensor(3.0), "no trainable parameter has a gradient"),
    "no parameter": (lambda h, y: y.float().mean(), "no trainable parameter has a gradient"),
    "detached": (lambda h, y: F.cross_entropy(h.detach(), y), "no trainable parameter has a gradient"),
    "opaque and detached": (lambda h, y: h.detach().mean() * (2 if h.sum() > 0 else 1),
    "no trainable parameter has a gradient"),
    "number": (lambda h, y: h.mean().item(), "returned a number that is no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_model(end: str) -> None:
    function, message = ENDS[end]
    with pytest.raises(ConfigError, match=message):
        trace(Model(function), BATCH)


def one_argument(output: Tensor) -> Tensor:
    return output.mean()


def other_field(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(output, batch["labels"])


def number(output: Tensor, batch: Mapping[str, Tensor]) -> float:
    return F.cross_entropy(output, batch["y"]).item()


@pytest.mark.parametrize(("loss", "message"), [
    (one_argument, r"one_argument\(\) takes 1 positional argument but 2 were given"),
    (other_field, r"KeyError: 'labels' \(.*test_refused.py:\d+, in other_field\)"),
    (number, r"model.loss: number\(output, batch\) returned a number that is no tensor.*legal: a scalar tensor"),
])  # fmt: skip
def test_loss(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trace(Model(lambda h, y: h), BATCH, loss=loss)
    assert re.search(message, str(refused.value))


def test_number_of_rows_that_cannot_stay_open_is_said_plainly() -> None:
    class Fixed(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.linear(x.view(4, 3)), y)

    (note,) = trace(Fixed(boom), BATCH).notes
    assert note.startswith("captured for 4 rows at a time, and again for every other number that comes: ")
    assert "\n" not in note and len(note) < 300


def generated(h: Tensor, y: Tensor) -> Tensor:
    noise = torch.rand(h.shape, generator=torch.Generator().manual_seed(0))
    return (h + noise).square().mean()


DRAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "randperm": lambda h, y: h[torch.randperm(h.shape[0])][:, 0].square().mean(),
    "poisson": lambda h, y: (h * torch.poisson(h.exp())).mean(),
    "binomial": lambda h, y: (h * torch.binomial(torch.full_like(h, 3), h.sigmoid())).mean(),
    "gamma": lambda h, y: (h * torch.distributions.Gamma(h.exp(), 1.0).sample()).mean(),
    "beta": lambda h, y: h.mean() * torch.distributions.Beta(torch.ones(()), torch.ones(())).sample(),
    "a generator": generated,
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_that_nobody_could_draw_again(name: str) -> None:
    """Ranks and microbatches would draw others: refused by name before the first step, as ``verify`` refuses them."""
    with pytest.raises(ShardwiseError, match="draws random numbers|random call|generator") as error:
        trace(Model(DRAWS[name]), BATCH)
    assert "legal" in str(error.value)
