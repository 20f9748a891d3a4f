"""Tensors whose rows cannot be cut are refused in words, wherever they come from; whole ones may be sparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.checksum import checksum
from shardwise.data.samples import Samples
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.distribute import distribute
from shardwise.train.trainer import Trainer

ROWS = 4
DENSE = torch.arange(16, dtype=torch.float64).reshape(ROWS, 4)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "coo": (Tensor.to_sparse, r"a sparse tensor \(torch.sparse_coo\); legal: its to_dense\(\), or its indices"),
    "csr": (Tensor.to_sparse_csr, r"a sparse tensor \(torch.sparse_csr\); legal: its to_dense"),
    "csc": (Tensor.to_sparse_csc, r"a sparse tensor \(torch.sparse_csc\); legal: its to_dense"),
    "bsr": (lambda one: one.to_sparse_bsr((2, 2)), r"a sparse tensor \(torch.sparse_bsr\); legal: its to_dense"),
    "bsc": (lambda one: one.to_sparse_bsc((2, 2)), r"a sparse tensor \(torch.sparse_bsc\); legal: its to_dense"),
    "jagged": (
        lambda one: nested(torch.jagged),
        r"a nested tensor \(torch.jagged\); legal: torch.nested.to_padded_tensor",
    ),
    "nested": (lambda one: nested(torch.strided), r"a nested tensor \(torch.strided\); legal: torch.nested.to_padded"),
    "quantized": (
        lambda one: torch.quantize_per_tensor(one.float(), 0.1, 0, torch.qint8),
        r"a quantized tensor \(torch.qint8\); legal: its dequantize",
    ),
}


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(1 + i) for i in range(ROWS)], layout=layout)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor, odd: Any = None) -> Tensor:
        return (self.last(self.first(x).tanh()) - y).square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": DENSE.sin(), "y": DENSE[:, :2].cos()}


def alone(model: nn.Module, example: Any, **more: Any) -> Trainer:
    plan = Plan.of(precision="fp64")
    comm = AloneCommunicator(plan.mesh, 0, torch.device("cpu"))
    return Trainer(model, OptimizerChoice("sgd", lr=0.1), plan, example, comm=comm, **more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_field_of_another_layout_is_refused(layout: str) -> None:
    """It is named, whatever the form of the batch, before anything starts and in a later step."""
    made, said = LAYOUTS[layout]
    plain, form = {**batch(), "odd": made(DENSE)}, {**batch(), "odd": made(DENSE), "name": ["a"] * ROWS}
    for example in (plain, form, {"odd": made(DENSE), **batch()}):
        with pytest.raises(ConfigError, match=f'^batch: "odd" is {said}'):
            alone(Net(), example)
    with pytest.raises(ConfigError, match=f'^batch: "more.odd" is {said}'):
        alone(Net(), {**batch(), "more": {"odd": made(DENSE)}})
    with pytest.raises(ConfigError, match=f'^batch: field "odd" is {said}'):
        Compiled(Net(), Plan.of(), plain)
    with pytest.raises(ConfigError, match=f'^batch: field "odd" is {said}'):
        alone(Net(), {**batch(), "odd": DENSE}).step(plain)
    with pytest.raises(ConfigError, match=f'^data: sample 0, field "odd": it is {said}'):
        Samples([plain])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_own_loop_is_told_the_same(layout: str) -> None:
    made, said = LAYOUTS[layout]
    model = Net()
    ours, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.of(precision="fp64"))

    def step() -> None:
        ours(**batch(), odd=made(DENSE)).backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=rf'^model\(...\): "odd" is {said}'):
        step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_of_another_layout_is_refused(layout: str) -> None:
    made, said = LAYOUTS[layout]
    model = Net()
    model.register_buffer("odd", made(DENSE))
    with pytest.raises(ConfigError, match=f"^model: odd is {said}"):
        Compiled(model, Plan.of(), batch())


class Graph(Net):
    def forward(self, x: Tensor, y: Tensor, odd: Any = None) -> Tensor:
        return super().forward(x @ torch.sparse.mm(odd, self.first.weight), y)


SPARSE = ("coo", "csr")


@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_tensor_for_all_rows(layout: str) -> None:
    """It has the same values on all ranks, which compare them."""
    plan, odd = data_parallel(Plan.of(precision="fp64"), 2), LAYOUTS[layout][0](DENSE)
    whole = {**batch(), "odd": odd}
    model, losses = Graph(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**whole)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def rank(comm: ThreadCommunicator) -> list[float]:
        choice = OptimizerChoice("sgd", lr=0.1)
        trainer = Trainer(Graph(), choice, plan, whole, comm=comm, whole=("odd",))
        mine = {**whole, **{name: whole[name][2 * comm.rank :][:2] for name in ("x", "y")}}
        found = [float(trainer.step(mine).loss) for _ in range(2)]
        with pytest.raises(ConfigError, match="the ranks have read different batches"):
            trainer.step({**mine, "odd": odd * (1 + comm.rank)})
        return found

    for found in run_ranks(plan.mesh, rank, timeout=60):
        assert found == pytest.approx(losses, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if "sparse" in LAYOUTS[one][1]])
def test_a_checksum_sees_values_and_places(layout: str) -> None:
    made, eye = LAYOUTS[layout][0], torch.eye(4)
    assert checksum(made(eye)) == checksum(made(eye.clone()))
    assert len({checksum(made(one)) for one in (eye, eye.flip(1), 2 * eye)}) == 3
