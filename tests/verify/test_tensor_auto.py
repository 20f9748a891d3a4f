"""Solved tensor plans equal one device: of every model, where links are fast and where they are slow, and of plans that
nobody would choose.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from models import deep
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.rates import Link, Rates
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.shard.solver import solve
from shardwise.shard.solver.cost_model import CostModel
from shardwise.verify.oracle import Oracle, OracleStep, plain_optimizer
from shardwise.verify.verify import OPTIMIZER
from verify.test_tensor import PLAIN, check, model

FAST, SLOW = Rates(1e9, 1e9, Link(0.0, 1e12)), Rates(1e9, 1e9, Link(0.0, 1e9))
MESHES = (("1d", 2), ("1d", 4), ("2d", 4))


def solved(name: str, kind: Any, tp: int, rates: Rates, dp: int = 1, zero: int = 0) -> Compiled:
    """Compiled, run, and compared with one device."""
    one, batches, truth = model(name)
    plan = data_parallel(tensor_parallel(Plan.of(precision="fp64", mesh=Mesh(())), tp, kind, "auto"), dp, zero)
    compiled = replace(one, rates=rates).under(plan)
    check(compiled, batches, truth, PLAIN)
    return compiled


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "kind", "tp"), [
    ("own gpt", "1d", 2), ("own llama", "2d", 4), ("own mlp", "1d", 4), ("own convnet", "1d", 2),
    ("own pairs", "1d", 4), ("vit", "1d", 2),
    ("own fused", "2d", 4), ("qwen3", "2d", 4), ("bloom", "1d", 2),
])  # fmt: skip
def test_a_solved_plan(name: str, kind: str, tp: int) -> None:
    assert any(b.axes for b in solved(name, kind, tp, FAST).general.buckets)


@pytest.mark.full
@pytest.mark.parametrize("rates", [FAST, SLOW])
@pytest.mark.parametrize(("kind", "tp"), MESHES)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_solved_plan(name: str, kind: str, tp: int, rates: Rates) -> None:
    solved(name, kind, tp, rates)


@pytest.mark.slow
def test_beside_data_parallelism() -> None:
    solved("own gpt", "1d", 2, FAST, dp=2, zero=2)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "kind", "tp"), [
    ("own gpt", "1d-sp", 2), ("own mlp", "2.5d", 8), ("own mlp", "3d", 8),
    pytest.param("own gpt", "2.5d", 8, marks=pytest.mark.full),
    pytest.param("own gpt", "3d", 8, marks=pytest.mark.full),
    pytest.param("own llama", "1d-sp", 4, marks=pytest.mark.full),
])  # fmt: skip
def test_on_the_meshes_of_other_recipes(name: str, kind: str, tp: int) -> None:
    assert any(b.axes for b in solved(name, kind, tp, FAST).general.buckets)


def together(kind: Any, tp: int, pp: int, dp: int, zero: int, recompute: Any, rates: Rates) -> None:
    """A plan with everything, against one device."""
    module, batches, truth = stacked()
    base = Plan.of(microbatches=2, recompute=recompute, precision="fp64")
    plan = tensor_parallel(pipeline(data_parallel(base, dp, zero), pp, "1f1b"), tp, kind, "auto")
    compiled = replace(module, rates=rates).under(plan)
    assert any(b.axes for b in compiled.general.buckets) or rates is SLOW
    check(compiled, batches, truth, OPTIMIZER)


@functools.cache
def stacked() -> tuple[Compiled, list[dict[str, Tensor]], list[OracleStep]]:
    torch.manual_seed(3)
    module, make = deep("gpt", 2)
    batches = [make(rows) for rows in (9, 5)]
    one = Oracle(
        module.train(),
        None,
        plain_optimizer(OPTIMIZER),
        microbatches=2,
        seed=0,
        clip_norm=1.0,
        group_of=OPTIMIZER.group_of,
    )
    truth = [one.step(batch, OPTIMIZER.learning_rate(i)) for i, batch in enumerate(batches)]
    return Compiled(module, Plan.of(precision="fp64", mesh=Mesh(()), microbatches=2), batches[0]), batches, truth


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tp", "pp", "dp", "zero", "recompute"), [
    ("1d", 2, 2, 1, 0, "none"), ("1d", 2, 1, 2, 3, "full"), ("1d-sp", 2, 1, 1, 0, "selective"),
])  # fmt: skip
def test_together(kind: str, tp: int, pp: int, dp: int, zero: int, recompute: str) -> None:
    together(kind, tp, pp, dp, zero, recompute, FAST)


@pytest.mark.full
@pytest.mark.parametrize("rates", [FAST, SLOW])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize(("pp", "dp", "zero"), [(1, 1, 0), (2, 1, 0), (1, 2, 3), (2, 2, 1)])
@pytest.mark.parametrize(("kind", "tp"), [("1d", 3), ("1d-sp", 2), ("2d", 4), ("2.5d", 8), ("3d", 8)])
def test_everything_together(kind: str, tp: int, pp: int, dp: int, zero: int, recompute: str, rates: Rates) -> None:
    together(kind, tp, pp, dp, zero, recompute, rates)


class Wild(CostModel):
    """Prices without sense, so that any strategy may be the best."""

    seed = 0

    def op(self, node: Any, form: Any, strategies: Any) -> float:
        return self.drawn(self.works.key(node), tuple(strategies))

    def _step(self, value: Any, step: Any) -> float:
        return 0.2 * self.drawn(value, step)

    def drawn(self, *what: Any) -> float:
        return zlib.crc32(repr((self.seed, what)).encode()) % 1000 / 1000


def wild(monkeypatch: pytest.MonkeyPatch, seed: int, name: str, kind: str, tp: int) -> None:
    monkeypatch.setattr(solve, "CostModel", Wild)
    monkeypatch.setattr(Wild, "seed", seed)
    solved(name, kind, tp, FAST)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("seed", "name", "kind", "tp"), [
    (0, "own gpt", "1d", 3), (1, "own llama", "1d", 3), (2, "own convnet", "1d", 3), (3, "own pairs", "1d", 3),
    (1, "own gpt", "2d", 4),  # behind a table whose gradient one rank keeps, a collective that all meet in backward
])  # fmt: skip
def test_any_legal_plan_is_right(monkeypatch: pytest.MonkeyPatch, seed: int, name: str, kind: str, tp: int) -> None:
    wild(monkeypatch, seed, name, kind, tp)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "tp"), [("1d", 2), ("1d", 3), ("2d", 4)])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_legal_plan_is_right(monkeypatch: pytest.MonkeyPatch, seed: int, name: str, kind: str, tp: int) -> None:
    wild(monkeypatch, seed, name, kind, tp)


@pytest.mark.slow
def test_another_trace_keeps_where_parameters_lie() -> None:
    """Evaluation, of fewer rows and without dropout: its plan is solved for the layouts of training."""
    one, batches, _ = model("own gpt")
    plan = tensor_parallel(Plan.of(precision="fp64", mesh=Mesh(())), 2, "1d", "auto")
    compiled = Compiled(one.module, plan, batches[0], one.loss, rates=FAST)
    other = compiled.evaluation()
    here, there = ({p.name: p.placed for b in c.general.buckets for p in b.parameters} for c in (compiled, other))
    assert here == there and any(layout.sharding_axes for layout in here.values())
