"""Ranks may have rows of several lengths in a step where the loss adds up rows, and else are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.threads import run_ranks
from shardwise.train.trainer import Trainer

ROWS, VARIES = 4, {"x.1": 9, "mask.1": 9}
LENGTHS = [(5, 7), (9, 3), (4, 4)]  # of the rows of two ranks, in each step
Batch = dict[str, Tensor]
Loss = Callable[["Net", Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Each token goes its own way; ``loss`` says what is made of the squared errors, of shape (rows, length, 2)."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last, self.of = nn.Linear(8, 2), loss
        self.double()

    def output(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.of(self, x, y, mask)


def errors(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return (net.output(x) - y[:, None]).square()


def part(length: int, seed: int) -> Batch:
    """Rows of a length, with some tokens that do not count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, length, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(ROWS, length, generator=generator, dtype=torch.float64) > 0.3
    mask[:, 0] = True
    return {"x": x, "y": x[:, 0, :2].sin(), "mask": mask.double()}


def padded(parts: Sequence[Batch]) -> Batch:
    """The rows of all parts, as long as the longest."""
    most = max(one["x"].shape[1] for one in parts)
    more = [most - one["x"].shape[1] for one in parts]
    return {
        "x": torch.cat([F.pad(one["x"], (0, 0, 0, n)) for one, n in zip(parts, more, strict=True)]),
        "y": torch.cat([one["y"] for one in parts]),
        "mask": torch.cat([F.pad(one["mask"], (0, n)) for one, n in zip(parts, more, strict=True)]),
    }


def by_padding(net: Net, parts: Sequence[Batch]) -> Tensor:
    """The loss of a device that has all rows, where the mask leaves padding out."""
    return net(**padded(parts))


def by_rows(net: Net, parts: Sequence[Batch]) -> Tensor:
    """The loss of a device that takes one row after the other, each of which weighs the same."""
    rows = [{name: value[i : i + 1] for name, value in one.items()} for one in parts for i in range(ROWS)]
    return torch.stack([net(**one) for one in rows]).mean()


def by_sum(net: Net, parts: Sequence[Batch]) -> Tensor:
    return sum((net(**one) for one in parts), torch.zeros((), dtype=torch.float64))


def weighed(net: Net, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Rows weigh by a number that each of them has."""
    weight = 1 + y[:, 0].square()
    return (errors(net, x, y).mean((1, 2)) * weight).sum() / weight.sum()


def of_weights(net: Net, parts: Sequence[Batch]) -> Tensor:
    weights = torch.cat([1 + one["y"][:, 0].square() for one in parts])
    rows = torch.cat([errors(net, one["x"], one["y"]).mean((1, 2)) for one in parts])
    return (rows * weights).sum() / weights.sum()


def masked(net: Net, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (errors(net, x, y).mean(-1) * mask).sum() / mask.sum()


def pooled(net: Net, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss((net.output(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), y)


GOOD: dict[str, tuple[Loss, Callable[[Net, Sequence[Batch]], Tensor]]] = {
    "mean over rows": (lambda net, x, y, mask: F.mse_loss(net.output(x).mean(1), y), by_rows),
    "mean of means": (lambda net, x, y, mask: errors(net, x, y).mean((1, 2)).mean(), by_rows),
    "absolute": (lambda net, x, y, mask: F.l1_loss(net.output(x).mean(1), y), by_rows),
    "pooled by a mask": (pooled, by_padding),
    "masked": (masked, by_padding),
    "masked and scaled": (lambda net, x, y, mask: 0.5 * masked(net, x, y, mask) / 3, by_padding),
    "weighed": (weighed, of_weights),
    "sum": (lambda net, x, y, mask: errors(net, x, y).sum(), by_sum),
    "with a penalty": (
        lambda net, x, y, mask: masked(net, x, y, mask) + 0.1 * net.last.weight.square().sum(), by_padding
    ),
}  # fmt: skip
PLANS: dict[str, Callable[[Plan], Plan]] = {
    "dp": lambda plan: data_parallel(plan, 2),
    "microbatches": lambda plan: data_parallel(plan.replace(microbatches=2), 2),
    "zero 3": lambda plan: data_parallel(plan, 2, zero=3),
    "tp": lambda plan: tensor_parallel(data_parallel(plan, 2), 2),
    "pp": lambda plan: pipeline(data_parallel(plan.replace(microbatches=2), 2), 2),
}


def trained(loss: Loss, plan: Plan, steps: Sequence[Sequence[Batch]]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """What each rank finds; of each step every rank has its own rows."""
    compiled = Compiled(Net(loss), plan, steps[0][0], varies=VARIES)

    def rank(comm: Communicator) -> tuple[list[float], dict[str, Tensor]]:
        index = comm.mesh.index(comm.rank, AXES)
        with Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, steps[0][0], comm=comm) as trainer:
            return [float(trainer.step(step[index]).loss) for step in steps], trainer.state_dict()

    return run_ranks(plan.mesh, rank, timeout=60)


STEPS = [[part(length, 10 * step + rank) for rank, length in enumerate(one)] for step, one in enumerate(LENGTHS)]


@pytest.mark.quick(5)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", GOOD)
def test_rows_of_several_lengths_train_as_on_one_device(kind: str, plan: str) -> None:
    loss, whole = GOOD[kind]
    net, losses = Net(loss), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for parts in STEPS:
        optimizer.zero_grad()
        made = whole(net, parts)
        made.backward()
        optimizer.step()
        losses.append(made.item())
    for found, state in trained(loss, PLANS[plan](Plan.of(precision="fp64")), STEPS):
        assert found == pytest.approx(losses, rel=1e-10, abs=1e-10)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)


def read(net: Net, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """It is one unit, for it looks at a value that depends on parameters."""
    mean = errors(net, x, y).mean((1, 2)).mean()
    return mean if mean.item() > 0 else 2 * mean


BAD: dict[str, Loss] = {
    "mean over all": lambda net, x, y, mask: errors(net, x, y).mean(),
    "mse_loss": lambda net, x, y, mask: F.mse_loss(net.output(x), y[:, None].expand(-1, x.shape[1], -1)),
    "divided by the length": lambda net, x, y, mask: errors(net, x, y).sum() / x.shape[1],
    "times the length": lambda net, x, y, mask: errors(net, x, y).mean((1, 2)).mean() * x.shape[1],
    "a tensor of the length": lambda net, x, y, mask: pooled(net, x, y, mask) * torch.tensor(1.0 / x.shape[1]),
    "as many ones": lambda net, x, y, mask: pooled(net, x, y, mask) / x.new_ones(x.shape[1]).sum(),
    "positions": lambda net, x, y, mask: errors(net, x, y).mean((0, 2)).mean(),
    "largest position": lambda net, x, y, mask: errors(net, x, y).sum((0, 2)).square().sum(),
    "means of a mask": lambda net, x, y, mask: (errors(net, x, y).mean(-1) * mask).sum() / mask.mean(),
    "a mean beside": lambda net, x, y, mask: masked(net, x, y, mask) + 0.1 * net.output(x).square().mean(),
    "a maximum beside": lambda net, x, y, mask: masked(net, x, y, mask) + 0.1 * net.output(x).amax(),
    "squared": lambda net, x, y, mask: masked(net, x, y, mask).square(),
    "one unit": read,
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", BAD)
def test_other_losses_take_one_length_in_a_step(kind: str) -> None:
    plan = data_parallel(Plan.of(precision="fp64"), 2)
    same = [[part(length, 7), part(length, 8)] for length in (5, 8)]
    assert len(trained(BAD[kind], plan, same)) == 2
    for steps in ([same[0], [part(5, 1), part(8, 2)]], [same[0], [part(7, 1), part(8, 2)]]):
        with pytest.raises(ConfigError, match="the ranks have rows of different shapes in a step; legal: one shape on"):
            trained(BAD[kind], plan, steps)
