"""Models whose forward asks for gradients: penalties, forces, and steps inside a step train like on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from harness import TOLERANCE, Subject, errors, plain_run, sharded_run
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.verify.verify import verify


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def penalty(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The gradient penalty of Gulrajani et al. (2017), for each row."""
    x = x.detach().requires_grad_()
    scores = net(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def forces(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """An energy and its forces, as potentials of molecules are trained."""
    x = x.detach().requires_grad_()
    energy = net(x)
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return F.mse_loss(energy[:, 0], y) + F.mse_loss(-slope, x.detach().sin())


def inner_step(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A step for each row, as in MAML (Finn et al., 2017), with each row as a task of its own."""
    parameters = dict(net.named_parameters())
    losses = []
    for i in range(len(x)):
        loss = (functional_call(net, parameters, (x[i : i + 1],))[:, 0] - y[i]).square().sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        moved = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), grads, strict=True)}
        losses.append((functional_call(net, moved, (x[i : i + 1] * 2,))[:, 0] - y[i]).square().sum())
    return torch.stack(losses).mean()


BODIES: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "penalty": penalty, "forces": forces, "inner step": inner_step
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.net = BODIES[name], Net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(self.net, x, y)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(7, 4), "y": torch.randn(7)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", BODIES)
def test_gradients_of_gradients(name: str) -> None:
    subject = Subject(Model(name), batch())
    truth = plain_run(subject)
    for dp, microbatches in ((1, 1), (2, 1), (3, 1), (2, 2)):
        found = errors(sharded_run(subject, dp, microbatches), truth)
        assert max(found.values()) <= TOLERANCE, (dp, microbatches, found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", BODIES)
def test_under_verify(name: str) -> None:
    report = verify(Model(name), [batch()] * 2, Plan.of(Mesh.of(dp=2), microbatches=2))
    assert report.passed, report.worst[:3]
