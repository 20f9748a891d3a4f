"""Tensor parallelism in low precision: as near to the truth as one device, on all ranks the same, and clipped by the
norm of all pieces.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from models import captured
from shardwise.core.mesh import Mesh
from shardwise.core.numeric_options import LOW_PRECISIONS
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import CHOICES, Plan
from shardwise.core.scale import ScaleChoice
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.oracle import Oracle
from shardwise.verify.verify import LOW_PRECISION_FACTOR, OPTIMIZER, VerifiedStep, low_precision, run_steps, run_threads
from verify.test_tensor import equal

NAMES = ("gpt", "own-llama", "mlp")
MESHES = (("1d", 2), ("1d", 3), ("1d-sp", 2), ("2d", 4), ("2.5d", 8), ("3d", 8))
BESIDE = ((1, 0, 1), (2, 0, 1), (2, 3, 1), (1, 0, 2), (2, 3, 2))
"""(dp, stage of ZeRO, pp)"""
ROWS, MICROBATCHES = 7, 2

Case = tuple[str, tuple[str, int], str, tuple[int, int, int], str]
EVERY: list[Case] = list(itertools.product(NAMES, MESHES, LOW_PRECISIONS, BESIDE, CHOICES["recompute"]))
FEW: list[Case] = [
    ("own-llama", ("1d-sp", 2), "fp16", (2, 3, 1), "full"),
    ("own-llama", ("2d", 4), "bf16", (1, 0, 2), "none"),
    ("mlp", ("2.5d", 8), "fp16", (1, 0, 1), "none"),
    ("mlp", ("3d", 8), "bf16", (1, 0, 1), "selective"),
]


def planned(
    mesh: tuple[str, int], precision: str, beside: tuple[int, int, int] = (1, 0, 1), recompute: str = "none"
) -> Plan:
    kind, tp = mesh
    dp, zero, pp = beside
    base: Any = Plan.of(mesh=Mesh(()), microbatches=MICROBATCHES, recompute=recompute, precision=precision)
    return tensor_parallel(pipeline(data_parallel(base, dp, zero), pp), tp, kind)  # type: ignore[arg-type]


@functools.cache
def subject(name: str) -> tuple[Compiled, dict[str, Tensor], dict[str, Tensor]]:
    """A model whose capture serves all plans, a batch, and the true gradients.

    The MLP gives many numbers, of many rows: of a few the ratio of two rounding errors is that of two random numbers.
    """
    torch.manual_seed(len(name))
    if name == "mlp":
        batch = {field: torch.randn(5 * ROWS, 32) for field in ("x", "y")}
        one = Compiled(zoo.Blocks(32).train(), Plan.of(precision="fp64"), batch)
    else:
        one, make, _ = captured(name)
        batch = make(ROWS)
    return one, batch, Oracle(one.module, None, microbatches=MICROBATCHES).step(batch).gradients


def check(case: Case) -> None:
    name, mesh, precision, beside, recompute = case
    one, batch, truth = subject(name)
    plan = planned(mesh, precision, beside, recompute)
    ranks: list[list[VerifiedStep]] = []

    def run(compiled: Compiled, rank: Any) -> list[list[VerifiedStep]]:
        assert any(b.axes for b in compiled.general.buckets), "in pieces"
        ranks[:] = run_threads(compiled, rank)
        return ranks

    found = low_precision(one.module, batch, plan, None, OPTIMIZER, 0, run, truth, one)
    assert found["one_device"] > 1e-4, "it is low precision that is compared"
    assert found["ratio"] <= LOW_PRECISION_FACTOR, found
    assert len(ranks) == plan.mesh.size and all(equal(ranks[0][0], other[0]) for other in ranks)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)))
def test_first_gradients_are_as_near_to_the_truth_as_one_device(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY, ids=lambda case: "-".join(map(str, case)))
def test_every_plan(case: Case) -> None:
    check(case)


def clipped(mesh: tuple[str, int], precision: str, beside: tuple[int, int, int], share: float) -> None:
    """With SGD an update is the gradient times what is left of it, so all three can be held against each other, in
    fp32.
    """
    one, batch, _ = subject("own-llama")
    compiled = one.under(planned(mesh, precision, beside))
    choice, fixed = OptimizerChoice("sgd", lr=1.0, weight_decay=0.0, momentum=0.0), ScaleChoice.fixed(2.0**10)
    whole = run_threads(compiled, lambda comm: run_steps(compiled, comm, [batch], choice, None, 0, fixed))[0][0]
    norm = math.hypot(*(float(g.double().norm()) for g in whole.gradients.values()))
    assert whole.grad_norm == pytest.approx(norm, rel=1e-6)
    limit = share * norm
    ranks = run_threads(compiled, lambda comm: run_steps(compiled, comm, [batch], choice, limit, 0, fixed))
    assert all(equal(ranks[0][0], other[0]) for other in ranks)
    (step,), before = ranks[0], dict(one.module.named_parameters())
    assert step.grad_norm == whole.grad_norm
    for name, gradient in step.gradients.items():
        moved = before[name].detach().double() - step.parameters[name].double()
        assert float((moved - min(share, 1.0) * gradient.double()).abs().max()) < 1e-6, name


CLIPPED = [(("1d", 2), "fp16", (2, 3, 1), 0.3), (("2d", 4), "bf16", (1, 0, 2), 0.3)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "precision", "beside", "share"), CLIPPED)
def test_clipping(mesh: tuple[str, int], precision: str, beside: tuple[int, int, int], share: float) -> None:
    clipped(mesh, precision, beside, share)


@pytest.mark.full
@pytest.mark.parametrize("share", [0.3, 2.0])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("precision", LOW_PRECISIONS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_clipping(mesh: tuple[str, int], precision: str, beside: tuple[int, int, int], share: float) -> None:
    clipped(mesh, precision, beside, share)
