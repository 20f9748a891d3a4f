"""The memory of servers apart is predicted: their stores have these bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.estimate.servers import server_bytes
from shardwise.lower.compiled import Compiled
from shardwise.parallel.server import asynchronous_server
from shardwise.runtime.served_store import ServedStore
from shardwise.units.served import served_ranges


class Tables(nn.Module):
    """Two tables, one by rows, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.days = nn.Embedding(101, 5, sparse=True), nn.Embedding(7, 5)
        self.deep = nn.Linear(5, 3)

    def forward(self, user: Tensor, day: Tensor) -> Tensor:
        return self.deep(self.users(user) + self.days(day)).square().mean()


def of_store(store: ServedStore) -> dict[str, int]:
    """Count the bytes of all tensors of a store, each once."""
    found, seen = dict.fromkeys(("parameters", "gradients", "optimizer", "versions"), 0), set[int]()

    def add(kind: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[kind] += tensor.nbytes

    for memory in store.memory.values():
        add("parameters", memory.param)
        add("gradients", memory.grad)
        add("optimizer", memory.master)
        for update in memory.updates:
            for _, kept in update.optimizer.states():
                for value in kept.values():
                    add("optimizer", value)
    for changes in store.changes.values():
        add("versions", changes)
    return found


@pytest.mark.quick(6)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "choice",
    [OptimizerChoice("adamw", 0.1), OptimizerChoice("adagrad", 0.1), OptimizerChoice("sgd", 0.1, momentum=0.9)],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize("model", ["gpt", "tables"])
def test_a_store_has_the_predicted_bytes(model: str, choice: OptimizerChoice, precision: Any, servers: int) -> None:
    plan = asynchronous_server(Plan.of(precision=precision), "async", servers, 2)
    if model == "tables":
        numbers = torch.arange(9)
        rows = "rows" if choice.name == "adagrad" else "dense"
        made = Compiled(Tables(), plan.replace(sparse_gradients=rows), {"user": numbers, "day": numbers % 7})
    else:
        model_of = zoo.own("gpt", 64)
        made = Compiled(model_of.module, plan, model_of.batch, model_of.loss)
    predicted = server_bytes(made.buckets, made.plan, choice)
    assert len(predicted) == servers
    for number, one in enumerate(predicted):
        store = ServedStore(made.buckets, made.plan, choice, number)
        store.load(made.values)
        found = one.to_dict()
        ranges = served_ranges(made.buckets, made.plan, choice)[number]
        assert found.pop("push") == sum(held.numel * held.gradient for held in ranges.values() if not held.row)
        assert found == of_store(store)
        assert one.total(2) == sum(found.values()) + 2 * one.push
        assert bool(one.versions) == (model == "tables" and choice.name == "adagrad")
