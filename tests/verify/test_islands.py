"""Islands that train apart are as many runs on one device, which meet every so many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models import captured
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import OPTIMIZER, verify

INSIDE = {
    "alone": lambda plan: plan,
    "dp": lambda plan: data_parallel(plan, 2),
    "zero-1": lambda plan: data_parallel(plan, 2, 1),
    "zero-2": lambda plan: data_parallel(plan, 3, 2),
    "zero-3": lambda plan: data_parallel(plan, 2, 3),
    "hybrid": lambda plan: data_parallel(plan, 4, 3, 2),
    "tp": lambda plan: tensor_parallel(plan, 2),
    "pp": lambda plan: pipeline(plan, 2),
    "pp × zero-1": lambda plan: pipeline(data_parallel(plan, 2, 1), 2),
}


def check(name: str, plan: Plan, optimizer: OptimizerChoice = OPTIMIZER, steps: int = 5) -> None:
    one, make, loss = captured(name)
    torch.manual_seed(plan.mesh.size)
    rows = [13, 12, 14, 13, 15, 12, 13][:steps]
    report = verify(
        one.module, [make(n) for n in rows], plan, loss=loss, captured=one, optimizer=optimizer
    )  # fmt: skip
    assert report.passed, (report.largest, report.worst[:3], report.low_precision, report.ranks_agree)
    assert report.compared > 20 * plan.mesh.axis_size("islands")


@pytest.mark.quick(3)
@pytest.mark.parametrize("inside", INSIDE)
def test_islands_are_runs_of_their_own_that_meet(inside: str) -> None:
    plan = INSIDE[inside](Plan.of(microbatches=2))
    check("gpt", local_training(plan, 2, 2))


@pytest.mark.quick(2)
@pytest.mark.parametrize("inside", ["alone", "zero-1", "zero-3", "tp", "pp"])
@pytest.mark.parametrize(("steps", "fragments"), [(2, 2), (4, 3)])
def test_fragments_meet_in_turn_while_islands_compute(inside: str, steps: int, fragments: int) -> None:
    plan = INSIDE[inside](Plan.of(microbatches=2))
    check("gpt", local_training(plan, 2, steps, fragments=fragments, mix=0.25), steps=7)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["llama", "bert", "conv", "mlp", "vit", "mixtral"])
def test_models(name: str) -> None:
    check(name, local_training(data_parallel(Plan.of(), 2, 1), 2, 2))


@pytest.mark.quick(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad"])
@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9), (0.5, 0.5)])
def test_outer_optimizers(optimizer: Any, rate: float, momentum: float) -> None:
    plan = local_training(Plan.of(), 3, 2, outer_lr=rate, outer_momentum=momentum)
    check("gpt", plan, OptimizerChoice(optimizer, lr=1e-2, eps=None if optimizer == "sgd" else 1e-4))


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_and_dropout(precision: Any) -> None:
    check("gpt", local_training(data_parallel(Plan.of(precision=precision), 2, 2), 2, 2))
