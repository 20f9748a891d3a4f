"""Batches that are given to a trainer as they are, without a loader, train as on one device."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import numpy as np
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
from shardwise.train.distribute import distribute
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


class OfMapping(OfDict):
    def forward(self, batch: Any) -> Tensor:
        assert type(batch) is UserDict
        return super().forward(batch)


def test_a_mapping_keeps_its_class() -> None:
    """Also without its labels, and where a later batch is another mapping."""
    trainer = alone(model_of(OfMapping), UserDict(batch_of(0)))
    expected = model_of(OfDict)
    assert float(trainer.evaluate_batch(batch_of(1)).loss) == pytest.approx(expected(batch_of(1)).item(), rel=1e-10)
    found = trainer.evaluate(iter([UserDict(batch_of(2)), batch_of(2)]), mean_of_output)
    output = expected.output(batch_of(2)["x"])
    assert found.metrics["mean_of_output"] == pytest.approx(output.mean().item(), rel=1e-10)


def mean_of_output(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.mean(1).sum(), len(output)


class Pairs(UserDict[str, Tensor]):
    def __init__(self, x: Tensor, labels: Tensor) -> None:
        super().__init__(x=x, labels=labels)


def test_a_mapping_that_no_dict_makes_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"batch: no Pairs is made of a dict \(.*'labels'\); legal: dict\(...\) of it"
    ):
        alone(model_of(OfDict), Pairs(**batch_of(0)))


class Thing:
    """An object with tensors."""

    def __init__(self, step: int) -> None:
        self.x, self.labels, self.size = *batch_of(step).values(), 4


class OfThing(Net):
    def forward(self, thing: Thing) -> Tensor:
        return self.loss(thing.x, thing.labels) * thing.size


def test_a_loop_of_objects_has_one_program() -> None:
    model = model_of(OfThing)
    ours, optimizer = wrapped(OfThing)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        losses = []
        for one, by in ((model, plain), (ours, optimizer)):
            by.zero_grad()
            loss = one(Thing(step))
            loss.backward()
            by.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    assert ours._steps._captures == 0  # beside the first


class OfThings(Net):
    """It reads an object for each row."""

    def forward(self, things: list[Thing], x: Tensor) -> Tensor:
        weight = torch.tensor([float(one.x.mean()) for one in things], dtype=torch.float64)
        return (weight[:, None] * self.output(x).square()).mean()


def test_objects_of_a_list_are_those_of_its_rows() -> None:
    """They hold tensors of other sizes than the batch, and each microbatch has its own of them."""
    things, x = [Thing(step) for step in range(6)], batch_of(8, 6)["x"]
    model = model_of(OfThings)
    ours, optimizer = wrapped(OfThings, Plan.of(precision="fp64", microbatches=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the model is one unit
        loss = ours(things, x)
        loss.backward()
        optimizer.step()
    assert loss.item() == pytest.approx(model(things, x).item(), rel=1e-10)


class Scaled(Net):
    def forward(self, x: Tensor, labels: Tensor, scale: Any = 1.0) -> Tensor:
        return self.loss(x, labels) * scale


def arrays(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: one.numpy() if isinstance(one, Tensor) else one for name, one in batch.items()}


@pytest.mark.parametrize("more", [{}, {"scale": 2.0}, {"scale": np.float64(2.0)}, {"scale": np.array(2.0)}])
@pytest.mark.parametrize("first", [0, 1])
def test_arrays_and_numbers_are_tensors(first: int, more: dict[str, Any]) -> None:
    """As the example and in steps, in turn with tensors, and in evaluations."""
    ways = [arrays, dict][first:] + [arrays, dict][:first]
    model, losses = model_of(Scaled), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(step), scale=float(more.get("scale", 1.0)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trainer = alone(model_of(Scaled), ways[0]({**batch_of(0), **more}))
    found = [float(trainer.step(ways[step % 2]({**batch_of(step), **more})).loss) for step in range(STEPS)]
    assert found == pytest.approx(losses, rel=1e-10, abs=1e-10)
    after = model(**batch_of(9), scale=float(more.get("scale", 1.0))).item()
    assert trainer.evaluate(iter([ways[1]({**batch_of(9), **more})])).loss == pytest.approx(after, rel=1e-10)


def test_an_array_that_is_no_tensor_is_named() -> None:
    trainer = alone(model_of(Scaled), arrays(batch_of(0)))
    with pytest.raises(ConfigError, match='batch: field "x" is no tensor'):
        trainer.step({**batch_of(0), "x": np.array(["a"] * 4)})
    with pytest.raises(ConfigError, match='batch: "x" is no tensor'):
        alone(model_of(Scaled), {**batch_of(0), "x": np.array(["a"] * 4)})


def wrapped(kind: type[Net], plan: Plan = P64) -> tuple[Any, Any]:
    model = model_of(kind)
    return distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
