"""Optimizers with a step of the user's own, under every kind of plan, against the same class on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from models import captured
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.train.optimizers import choice_of
from shardwise.verify.verify import verify

PLANS: dict[str, Plan] = {
    "ddp": data_parallel(Plan.of(microbatches=2), 2),
    "zero-3": data_parallel(Plan.of(), 3, 3),
    "tp and zero-1": tensor_parallel(data_parallel(Plan.of(), 2, 1), 2, "1d"),
    "pp": pipeline(Plan.of(microbatches=3), 2, "1f1b"),
}


class Own(torch.optim.Optimizer):
    """What the tests' optimizers have in common."""

    def __init__(self, params: Any, lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        raise NotImplementedError


class Counted(Own):
    """Adam without a second average; a Python number counts the steps."""

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        state.setdefault("count", 0)
        state.setdefault("average", torch.zeros_like(p))
        state["count"] += 1
        state["average"].mul_(0.9).add_(grad)
        p.sub_(state["average"] / (1 - 0.9 ** state["count"]), alpha=group["lr"])


class ByRows(Own):
    """It divides a gradient by the norms of its rows, which it averages, and puts another tensor into ``p.data``."""

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        norms = grad.flatten(1).norm(dim=1) if p.dim() > 1 else grad.norm().reshape(1)
        state["norms"] = norms if "norms" not in state else 0.5 * state["norms"] + 0.5 * norms
        scale = (state["norms"] + group["eps"]).reshape(-1, *[1] * (p.dim() - 1))
        p.data = p.data - group["lr"] * grad / scale


class Averaged(torch.optim.AdamW):
    """A subclass of torch's that does more in its step: it pulls parameters to their mean."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(p.mean(), 0.01)


OPTIMIZERS: dict[str, Any] = {
    "counted": lambda model: Counted(model.parameters()),
    "by rows": lambda model: ByRows(halves(model), eps=1e-2),
    "averaged": lambda model: Averaged(halves(model), lr=1e-3, eps=1e-4),
}


def halves(model: nn.Module) -> list[dict[str, Any]]:
    every = [p for p in model.parameters() if p.requires_grad]
    return [{"params": every[::2]}, {"params": every[1::2], "lr": 3e-3}]


@pytest.mark.quick(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_is_that_of_one_device(name: str, plan: str) -> None:
    one, make, loss = captured("gpt")
    torch.manual_seed(3)
    choice = choice_of(OPTIMIZERS[name](one.module), one.module)
    batches = [make(rows) for rows in (9, 8, 7)]
    report = verify(one.module, batches, PLANS[plan], loss=loss, optimizer=choice, captured=one)
    assert report.passed, (report.largest, report.worst[:3])


class WholeNorm(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.square().sum() for p in every) ** 0.5
        for p in every:
            p.sub_(p.grad / norm, alpha=1e-2)


class CountedByGroup(Own):
    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        group["seen"] = group.get("seen", 0) + 1
        p.sub_(grad, alpha=group["lr"] / group["seen"])


class CountedByItself(Own):
    seen = 0

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        self.seen += 1
        p.sub_(grad, alpha=group["lr"])


class Noisy(Own):
    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        p.sub_(grad + torch.randn_like(grad), alpha=group["lr"])


class Listing(Own):
    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        state.setdefault("gradients", []).append(grad.clone())
        p.sub_(grad, alpha=group["lr"])


class Failing(Own):
    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        raise ValueError("only of some shape")


REFUSED = {
    WholeNorm: "its step of one parameter depends on other parameters",
    CountedByGroup: r"its step changes group\['seen'\], which is not in the state",
    CountedByItself: "its step changes self.seen, which is not in the state",
    Noisy: "its step draws random numbers",
    Listing: "it keeps a list under 'gradients'",
    Failing: r"its step fails in a trial on small tensors \(ValueError: only of some shape\)",
    torch.optim.LBFGS: "its step needs a closure",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_taken_tensor_by_tensor(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=f"optimizer {kind.__name__}: {REFUSED[kind]}"):
        choice_of(kind(model.parameters(), lr=0.1), model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
