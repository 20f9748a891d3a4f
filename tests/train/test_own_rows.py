"""Steps on dicts of a rank's own rows are steps on the batch that these rows make up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.trainer import Trainer

ROWS, STEPS = 8, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.norm(self.first(x)))) - y).square().mean()


def batch(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(rows, 4, generator=numbers, dtype=torch.float64),
        "y": torch.randn(rows, 1, generator=numbers, dtype=torch.float64),
    }


def made(plan: Plan) -> Compiled:
    torch.manual_seed(0)
    return Compiled(Net().double(), plan, batch(0))


def fp64(**options: Any) -> Plan:
    return Plan.of(precision="fp64", rows="batch", **options)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights of ordinary torch on one device."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (2, 2), (4, 2)])
def test_the_steps_are_those_of_one_device(ranks: int, microbatches: int) -> None:
    """Batch norm over the whole batch would show a row that is missing, or counted twice."""
    plan = data_parallel(fp64(microbatches=microbatches), ranks)
    compiled, own = made(plan), ROWS // ranks

    def rank(comm: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]]:
        trainer = Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, compiled.example, comm=comm)
        first = comm.rank * own
        parts = [{name: value[first : first + own] for name, value in batch(step).items()} for step in range(STEPS)]
        return [trainer.step(part).loss.item() for part in parts], trainer.state_dict()

    losses, weights = plain()
    for found, state in run_ranks(plan.mesh, rank, timeout=60):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)


def test_the_ranks_have_to_agree() -> None:
    """In the first call all hear of it; later each rank knows by itself, so that none waits for another."""
    plan = data_parallel(fp64(), 2)
    compiled = made(plan)

    def rank(comm: ThreadCommunicator) -> list[str]:
        trainer = Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, compiled.example, comm=comm)
        told = []
        for rows in (3 + comm.rank, 4, 5):
            try:
                trainer.step(batch(0, rows))
                told.append("")
            except ConfigError as error:
                told.append(str(error))
        trainer.evaluate_batch(batch(0, 6))  # whose number of rows is another
        return told

    for unequal, right, later in run_ranks(plan.mesh, rank, timeout=60):
        assert "the ranks pass different numbers of rows: 3, 4; legal: as many on every rank" in unequal
        assert right == "" and "5 rows after 4 in the first call; legal: as many" in later


def alone(**options: Any) -> Trainer:
    plan = data_parallel(fp64(**options), 1)
    comm = AloneCommunicator(plan.mesh, 0, torch.device("cpu"))
    return Trainer(made(plan), OptimizerChoice("sgd", lr=0.1), plan, batch(0), comm=comm)


def test_a_lone_rank_may_pass_any_number() -> None:
    trainer = alone(microbatches=2)
    for rows in (8, 5, 1):
        assert trainer.step(batch(0, rows)).loss.isfinite()


def test_refused() -> None:
    trainer = alone()
    with pytest.raises(ShardwiseError, match=r"Trainer.step\(...\) of a list; legal: a batch of trainer.loader"):
        trainer.step([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='field "y" is of type int; legal: tensors with rows'):
        trainer.step({"x": batch(0)["x"], "y": 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="different numbers of rows"):
        trainer.step({"x": batch(0)["x"], "y": batch(0)["y"][:2]})
    with pytest.raises(ConfigError, match="fields .'x'.; the model was traced with"):
        trainer.step({"x": batch(0)["x"]})
    plan = data_parallel(fp64(microbatches=2), 2)
    compiled = made(plan)

    def rank(comm: ThreadCommunicator) -> str:
        one = Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, compiled.example, comm=comm)
        with pytest.raises(ConfigError) as found:
            one.step(batch(0, 3))
        return str(found.value)

    assert all("a multiple of the plan's microbatches = 2" in one for one in run_ranks(plan.mesh, rank, timeout=60))
