"""The wide-and-deep model of examples/clicks on rows that differ from step to step: an ordinary loop with DDP, and
shardwise's."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from alternate import Step

ROWS, WIDTH, BATCHES = 2048, 16, 48
EXAMPLE = Path(__file__).parents[1] / "examples" / "clicks" / "clicks.py"


def clicks() -> Any:
    """Return the example's module."""
    spec = importlib.util.spec_from_file_location("clicks", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Alone(nn.Module):
    """The example's model, whose forward returns the loss alone."""

    def __init__(self, buckets: int, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = clicks().wide_and_deep(buckets, WIDTH)
        self.model.weights.sparse = self.model.vectors.sparse = sparse

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels)["loss"]
        return loss


def batches(rank: int, buckets: int) -> Iterator[dict[str, Tensor]]:
    """Yield one rank's batches, over and over."""
    data = clicks().dataset(ROWS * BATCHES, buckets, part=rank)
    each = [data.read_rows(np.arange(i * ROWS, (i + 1) * ROWS)) for i in range(BATCHES)]
    return itertools.cycle(each)


def distinct(buckets: int) -> float:
    """Return how many rows of the table a rank's batch looks up, as a mean."""
    given = batches(0, buckets)
    return float(np.mean([len(next(given)["ids"].unique()) for _ in range(BATCHES)]))


def plain(rank: int, ranks: int, *, buckets: int, sparse: bool) -> Step:
    """Make the step of an ordinary loop with DDP."""
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Alone(buckets, sparse))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=None if sparse else True)
    given = batches(rank, buckets)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = model(**next(given))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ours(
    rank: int, ranks: int, *, buckets: int, gradients: str, kind: str, backend: Literal["auto", "gloo"] = "auto"
) -> Step:
    """Make the step of shardwise."""
    from shardwise import OptimizerChoice, Plan, Trainer
    from shardwise.data.loader import Batch
    from shardwise.parallel.data import data_parallel
    from shardwise.parallel.server import parameter_server
    from shardwise.runtime.connect import connect

    plan = data_parallel(Plan.of(sparse_gradients=gradients), ranks, zero=1 if kind == "zero1" else 0)
    plan = parameter_server(plan) if kind == "server" else plan
    given = batches(rank, buckets)
    trainer = Trainer(
        Alone(buckets, True), OptimizerChoice("adagrad", lr=0.1), plan, next(given),
        comm=connect(plan.mesh, torch.device("cpu"), backend=backend),
    )  # fmt: skip
    return lambda: trainer.step(Batch(next(given), ROWS * ranks, (rank * ROWS,), (ROWS,))).loss
