"""What does not fit the plan is refused before a step: batches of other rows, too few batches, another mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES, Batch
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.train.trainer import Trainer
from zoo import Blocks

ROWS = 8
SGD = OptimizerChoice("sgd", lr=1e-2)


def whole(rows: int = ROWS) -> dict[str, Tensor]:
    return {name: torch.randn(rows, 5) for name in "xy"}


def compiled(plan: Plan) -> Compiled:
    torch.manual_seed(0)
    return Compiled(Blocks(5), plan, whole())


def own(comm: Communicator, plan: Plan, rows: int = ROWS) -> Batch:
    """This rank's part of a batch."""
    spans = rank_rows(rows, plan.microbatches, comm.mesh.axis_size(AXES), comm.mesh.index(comm.rank, AXES))
    mine = {name: torch.cat([value[a:b] for a, b in spans]) for name, value in whole(rows).items()}
    return Batch(mine, rows, tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def refused(plan: Plan, take: Callable[[Trainer], object]) -> str:
    """What ``take`` is refused with, the same on all ranks."""
    model = compiled(plan)

    def rank(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            take(Trainer(model, SGD, plan, {}, comm=comm))
        return str(caught.value)

    (found,) = set(run_ranks(plan.mesh, rank, timeout=60))
    return found


def batch(fields: Mapping[str, Tensor]) -> Batch:
    return Batch(dict(fields), ROWS, (0,), (ROWS,))


@pytest.mark.parametrize("rows", [ROWS, ROWS + 2, 3, 0])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_rows_that_are_not_this_rank_s_part(microbatches: int, rows: int) -> None:
    plan = data_parallel(Plan.of(microbatches=microbatches), 2)
    wrong = f'batch: field "x" has {rows} rows on this rank; legal: 4, its part of {ROWS}'
    assert wrong in refused(plan, lambda trainer: trainer.step(batch(whole(rows))))
    assert wrong in refused(plan, lambda trainer: trainer.evaluate_batch(batch(whole(rows))))


def test_one_field_with_other_rows() -> None:
    fields = {"x": torch.zeros(4, 5), "y": torch.zeros(3, 5)}
    found = refused(data_parallel(Plan.of(), 2), lambda trainer: trainer.step(batch(fields)))
    assert 'field "y" has 3 rows' in found


def test_a_field_without_rows() -> None:
    fields = {"x": torch.zeros(4, 5), "y": torch.zeros(())}
    found = refused(data_parallel(Plan.of(), 2), lambda trainer: trainer.step(batch(fields)))
    assert 'field "y" is () torch.float32; expected (rows, 5) torch.float32' in found


@pytest.mark.parametrize(("rows", "microbatches"), [(1, 1), (2, 4), (7, 2), (5, 3)])
def test_uneven_parts_are_legal(rows: int, microbatches: int) -> None:
    """Also those of ranks without a row."""
    plan = data_parallel(Plan.of(microbatches=microbatches), 3)
    model = compiled(plan)

    def rank(comm: Communicator) -> None:
        trainer, part = Trainer(model, SGD, plan, {}, comm=comm), own(comm, plan, rows)
        trainer.step(part)
        trainer.evaluate_batch(part)

    run_ranks(plan.mesh, rank, timeout=60)


def test_all_ranks_of_a_pipeline_have_all_rows() -> None:
    plan = pipeline(Plan.of(microbatches=2), 2)
    found = refused(plan, lambda trainer: trainer.step(batch(whole(4))))
    assert f'field "x" has 4 rows on this rank; legal: {ROWS}, its part of {ROWS}' in found


def test_a_communicator_over_another_mesh() -> None:
    """Also one of as many ranks; axes of size 1 make no difference."""
    model = compiled(data_parallel(Plan.of(), 2))

    def rank(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            Engine(model, comm, SGD)
        return str(caught.value)

    for mesh in (Mesh.of(pp=2), Mesh.of(dp=3)):
        for found in run_ranks(mesh, rank, timeout=60):
            assert "mesh" in found and str(mesh.names[0]) in found and "dp" in found
    run_ranks(Mesh.of(pp=1, dp=2), lambda comm: Engine(model, comm, SGD), timeout=60)


@pytest.mark.parametrize(
    ("schedule", "window", "came"), [("1f1b", 1, 0), ("1f1b", 1, 2), *(("pipedream", 2, came) for came in (0, 1, 3))]
)
def test_too_few_batches(schedule: Any, window: int, came: int) -> None:
    """Where steps overlap or not, the error says how many came."""
    plan = pipeline(Plan.of(), 2, schedule).replace(window=window)

    def take(trainer: Trainer) -> None:
        batches: Iterator[Batch] = (own(trainer.comm, plan) for _ in range(came))
        for _ in trainer.steps(batches, 4):
            pass

    assert f"batches: {came} came; legal: 4" in refused(plan, take)


def test_too_few_batches_for_the_engine() -> None:
    plan = Plan.of()
    model = compiled(plan)

    def rank(comm: Communicator) -> None:
        given = iter([(whole(), ROWS, False)])
        with pytest.raises(ConfigError, match="batches: 1 came; legal: 2"):
            list(Engine(model, comm, SGD).steps(given, 2))

    run_ranks(plan.mesh, rank, timeout=60)
