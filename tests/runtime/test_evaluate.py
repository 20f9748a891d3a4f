"""The loss in evaluation mode is that of the plain module in evaluation mode, for any ranks and microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES
from shardwise.lower.compiled import Compiled
from shardwise.models.gpt import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks


class Normed(nn.Module):
    """BatchNorm and dropout, whose evaluation is another function than their training."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.between = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.before(x)), 0.5, self.training)
        for one in self.between:
            h = torch.tanh(one(h))
        return F.mse_loss(self.after(h), y)


def subject(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    if name == "normed":
        return Normed(), {"x": torch.randn(7, 3), "y": torch.randn(7, 1)}
    labels = torch.randint(0, 31, (7, 12))
    labels[:3, 2:] = -100
    return GPT(vocabulary=31, width=16, layers=2, heads=2, context=12, dropout=0.2), {
        "input_ids": torch.randint(0, 31, (7, 12)), "labels": labels,
    }  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.few(5)
@pytest.mark.parametrize(("dp", "microbatches"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("name", ["normed", "gpt"])
def test_evaluation(name: str, dp: int, microbatches: int) -> None:
    check(name, Plan.of(Mesh.of(dp=dp), microbatches=microbatches, precision="fp64"))


@pytest.mark.quick(1)
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "pp", "schedule", "microbatches", "dp", "zero"),
    [("gpt", 2, "1f1b", 3, 1, 0), ("gpt", 3, "zb-h1", 2, 2, 1), ("gpt", 2, "interleaved", 3, 1, 0),
    ("gpt", 2, "zbv", 2, 2, 3),
     ("gpt", 4, "naive", 1, 1, 0), ("normed", 2, "1f1b", 3, 2, 0), ("normed", 2, "dualpipe-v", 3, 1, 0)],
)  # fmt: skip
def test_evaluation_in_a_pipeline(name: str, pp: int, schedule: str, microbatches: int, dp: int, zero: int) -> None:
    """The first and the last stage have the same embedding, one has the running statistics."""
    check(name, pipeline(data_parallel(Plan.of(microbatches=microbatches, precision="fp64"), dp, zero), pp, schedule))


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "tensor", "tp", "microbatches", "dp", "pp"),
    [("gpt", "1d", 2, 3, 1, 1), ("gpt", "1d-sp", 3, 2, 1, 1), ("gpt", "1d", 2, 2, 2, 2), ("gpt", "1d-sp", 2, 1, 2, 1),
     ("normed", "1d", 2, 3, 2, 1), ("normed", "1d-sp", 4, 1, 1, 1), ("gpt", "2d", 4, 2, 1, 1),
     *(pytest.param(*one, marks=pytest.mark.full) for one in [
        ("gpt", "2d", 9, 1, 1, 1), ("gpt", "2d", 4, 3, 2, 2), ("gpt", "2.5d", 8, 2, 1, 1), ("gpt", "3d", 8, 1, 2, 1),
        ("gpt", "3d", 8, 2, 1, 2),
        ("normed", "2d", 4, 3, 1, 1), ("normed", "3d", 8, 1, 1, 1), ("normed", "2.5d", 8, 2, 1, 2)])],
)  # fmt: skip
def test_evaluation_by_ranks_that_share_layers(
    name: str, tensor: Any, tp: int, microbatches: int, dp: int, pp: int
) -> None:
    """Parameters lie as in training, whatever the evaluated graph would have liked."""
    plan = tensor_parallel(Plan.of(microbatches=microbatches, precision="fp64"), tp, tensor)
    check(name, pipeline(data_parallel(plan, dp), pp))


def check(name: str, plan: Plan) -> None:
    """The loss is that of one device with the weights of that moment, on all ranks; nothing changes by it."""
    module, batch = subject(name)
    compiled = Compiled(module, plan, batch)

    def rank(comm: Communicator) -> Any:
        engine = Engine(compiled, comm, OptimizerChoice("adamw", lr=1e-2))
        parts, index = comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES)
        own = [i for a, b in rank_rows(7, plan.microbatches, parts, index) for i in range(a, b)]
        fields = {k: v[own] for k, v in batch.items()}
        engine.step(fields, 7)
        state = engine.state_dict()
        found = engine.evaluate(fields, 7)
        after = engine.state_dict()
        assert all(torch.equal(state[k], after[k]) for k in state)
        engine.step(fields, 7)  # training goes on as if nothing had been
        return float(found.loss), int(found.weight), state

    results = run_ranks(plan.mesh, rank, timeout=60)
    plain = module.double().eval()
    plain.load_state_dict(results[0][2])
    with torch.no_grad():
        truth = float(plain(**{k: v.double() if v.is_floating_point() else v for k, v in batch.items()}))
    weight = 7 if name == "normed" else int((batch["labels"] != -100).sum())
    for loss, amount, _ in results:
        assert abs(loss - truth) < 1e-12
        assert amount == weight
