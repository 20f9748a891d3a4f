"""Loops that look at a distributed model, or write to it, at unusual places: they come out as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import distribute
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan

Wrap = Callable[[nn.Module], tuple[Any, Any]]
BCE = F.binary_cross_entropy_with_logits


def plain(net: nn.Module) -> tuple[Any, Any]:
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def distributed(net: nn.Module) -> tuple[Any, Any]:
    return distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), Plan.of(Mesh.of(dp=1)))


class Net(nn.Module):
    def __init__(self, unset: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((3,), float("nan") if unset else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Critic(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        torch.manual_seed(features)
        self.a, self.norm, self.b = nn.Linear(features, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu()).squeeze(1)


class Generator(Critic):
    def __init__(self) -> None:
        super().__init__(2)
        self.b = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


def loss_of(model: Any, seed: int) -> Tensor:
    torch.manual_seed(10 + seed)
    return F.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))


def state(model: Any) -> list[Tensor]:
    return [value.detach().clone() for _, value in sorted(model.state_dict().items())]


def looked(model: Any) -> Tensor:
    return sum((p.detach().norm() for p in model.parameters()), torch.zeros(()))


def trained(model: Any, optimizer: Any, steps: int = 2) -> list[Tensor]:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def freezes_after_a_dry_run(wrap: Wrap) -> list[Tensor]:
    net = Net()
    net.second.bias.requires_grad_(False)
    model, optimizer = wrap(net)
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    net.first.weight.requires_grad_(False)
    net.second.bias.requires_grad_(True)
    return trained(model, optimizer)


def has_values_that_are_not_set(wrap: Wrap) -> list[Tensor]:
    model, optimizer = wrap(Net(unset=True))
    found = []
    for step in range(3):
        loss = loss_of(model, step)
        found += [
            looked(model),
            *(one.clone() for one in model.buffers()),
            *(p.data.norm() for p in model.parameters()),
        ]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *state(model)]


def writes_between_two_backwards(wrap: Wrap) -> list[Tensor]:
    model, optimizer = wrap(Net())
    for step in range(3):
        losses = [loss_of(model, step + k) for k in (0, 5, 7)]
        losses[0].backward()
        with torch.no_grad():
            dict(model.named_parameters())["second.bias"].mul_(0.5)
        losses[1].backward()
        losses[2].backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def trains_two_models(wrap: Wrap) -> list[Tensor]:
    """A step of each runs the other's forward, which writes to its buffers."""
    (critic, of_critic), (generator, of_generator) = wrap(Critic(4)), wrap(Generator())
    found = []
    for step in range(3):
        torch.manual_seed(step)
        real, fake = torch.randn(6, 4), generator(torch.randn(6, 2))
        of_critic.zero_grad()
        (BCE(critic(real), torch.ones(6)) + BCE(critic(fake.detach()), torch.zeros(6))).backward()
        of_critic.step()
        found.append(looked(critic))
        for one in critic.parameters():
            one.data.clamp_(-0.2, 0.2)
        of_generator.zero_grad()
        BCE(critic(fake), torch.ones(6)).backward()
        of_generator.step()
        found.append(looked(generator))
    of_critic.zero_grad()
    return [*found, *state(critic), *state(generator)]


@pytest.mark.parametrize(
    "loop",
    [freezes_after_a_dry_run, has_values_that_are_not_set, writes_between_two_backwards, trains_two_models],
    ids=lambda one: one.__name__,
)
def test_a_loop_comes_out_as_on_one_device(loop: Callable[[Wrap], list[Tensor]]) -> None:
    for mine, theirs in zip(loop(distributed), loop(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
