"""Batches that are given to a trainer as they are, without a loader, train as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.trainer import Trainer

STEPS = 3
P64 = Plan.of(precision="fp64")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def output(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.output(x) - y).square().mean()


class OfDict(Net):
    """It returns its loss where the batch has labels, and else its output."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(batch["x"], batch["labels"]) if "labels" in batch else self.output(batch["x"])


class OutputOfDict(Net):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.output(batch["x"])


def square(output: Tensor, batch: Any) -> Tensor:
    return (output - batch["labels"]).square().mean()


def batch_of(step: int, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": x[:, :2].sin() + 0.1 * step}


def model_of(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind().double()


def alone(model: nn.Module, example: Any, **more: Any) -> Trainer:
    comm = AloneCommunicator(P64.mesh, 0, torch.device("cpu"))
    return Trainer(model, OptimizerChoice("sgd", lr=0.1), P64, example, comm=comm, **more)


class Rows:
    """Samples of a dataset, one for each row of a batch."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in batch_of(9, 7).items()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [OfDict, OutputOfDict])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forward_takes_the_dict_itself(kind: type[Net], ranks: int) -> None:
    """It trains, is evaluated, and gives its outputs; each rank passes its rows of a dict of tensors."""
    loss = square if kind is OutputOfDict else None
    model, losses = model_of(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(step)
        made = model(batch) if loss is None else square(model(batch), batch)
        made.backward()
        optimizer.step()
        losses.append(made.item())
    whole = batch_of(9, 7)
    outputs = model.output(whole["x"])
    plan = P64 if ranks == 1 else data_parallel(P64, ranks)
    compiled = Compiled(model_of(kind), plan, batch_of(0), loss)

    def rank(comm: ThreadCommunicator) -> tuple[list[float], float, Tensor]:
        with Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, batch_of(0), comm=comm) as trainer:
            part = slice(comm.rank * 4 // ranks, (comm.rank + 1) * 4 // ranks)
            mine = [{name: value[part] for name, value in batch_of(step).items()} for step in range(STEPS)]
            found = [float(trainer.step(one).loss) for one in mine]
            return found, trainer.evaluate(Rows(), batch_size=4).loss, trainer.predict(Rows(), 4)

    for found, evaluated, predicted in run_ranks(plan.mesh, rank, timeout=60):
        assert found == pytest.approx(losses, rel=1e-10, abs=1e-10)
        assert evaluated == pytest.approx(square(outputs, whole).item(), rel=1e-10)
        torch.testing.assert_close(predicted, outputs, rtol=1e-10, atol=1e-10)


class AnyOther(Net):
    def forward(self, batch: Any, **more: Any) -> Tensor:
        return self.loss(batch["x"], batch["labels"])


class ByNameToo(Net):
    def forward(self, batch: Any, x: Tensor | None = None) -> Tensor:
        return self.loss(batch["x"] if x is None else x, batch["labels"])


class Two(Net):
    def forward(self, batch: Any, other: Any) -> Tensor:
        return self.loss(batch["x"], batch["labels"])


class OnlyByName(Net):
    def forward(self, *, batch: Any) -> Tensor:
        return self.loss(batch["x"], batch["labels"])


@pytest.mark.parametrize("kind", [AnyOther, ByNameToo, Two, OnlyByName])
@pytest.mark.parametrize("more", [{}, {"name": ["a"] * 4}])
def test_a_forward_that_could_take_parts_by_name_gets_no_dict(kind: type[Net], more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="batch: it has x, labels.*, and forward requires batch.*; legal: the parts"):
        alone(model_of(kind), {**batch_of(0), **more})
