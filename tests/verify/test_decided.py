"""What `verify` proves is what trains: the layouts and strategies that a solver decided for the plan's own precision,
devices and memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from shardwise.config import load_config
from shardwise.core.layout import Layout
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.rates import Link, Rates
from shardwise.launch.verifying import verify_config
from shardwise.lower.compiled import Compiled
from shardwise.models.gpt import GPT
from shardwise.models.llama import Llama
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.communicator import Communicator
from shardwise.shard.solver.decisions import Decisions
from shardwise.verify.verify import VerifiedStep, run_threads, verify

Placed = dict[str, tuple[Layout, tuple[str, ...]]]


def placed(one: Compiled) -> Placed:
    return {p.name: (p.placed, p.summed) for b in one.buckets for p in b.parameters}


def decided(one: Compiled) -> Decisions:
    found = one.general.decisions
    assert found is not None
    return found


def same(a: Compiled, b: Compiled) -> bool:
    ops, others = decided(a).ops, decided(b).ops
    return (
        placed(a) == placed(b)
        and repr(ops) == repr(others)
        and repr(decided(a).parameters) == repr(decided(b).parameters)
    )


class Spy:
    """Runs ranks as threads, and remembers what they ran."""

    def __init__(self) -> None:
        self.seen: list[Compiled] = []

    def __call__(
        self, compiled: Compiled, rank: Callable[[Communicator], list[VerifiedStep]]
    ) -> list[list[VerifiedStep]]:
        self.seen.append(compiled)
        return run_threads(compiled, rank)


def tokens(rows: int) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    return {name: torch.randint(0, 32, (rows, 8)) for name in ("input_ids", "labels")}


@functools.cache
def model(name: str) -> Compiled:
    """On one rank; captures serve all plans."""
    torch.manual_seed(2)
    gpt = GPT(vocabulary=32, width=32, layers=1, heads=4, context=8, dropout=0.1)
    llama = Llama(vocabulary=32, width=32, layers=1, heads=4, kv_heads=2, context=8)
    return Compiled(gpt if name == "gpt" else llama, Plan.of(precision="bf16", mesh=Mesh(())), tokens(4))


def plan_of(precision: Any, kind: Any = "1d", tp: int = 2, dropout: Any = "exact") -> Plan:
    return tensor_parallel(Plan.of(precision=precision, dropout=dropout, mesh=Mesh(())), tp, kind, "auto")


FAST, SLOW = Rates(1e9, 1e9, Link(0.0, 1e12)), Rates(1e9, 1e9, Link(0.0, 1e9))
FULL = pytest.mark.full


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "rows", "kind", "tp", "rates"), [
    ("gpt", "bf16", 64, "1d", 2, None),
    pytest.param("gpt", "fp32", 4, "1d", 2, None, marks=FULL),
    pytest.param("gpt", "bf16", 64, "1d", 2, SLOW, marks=FULL),
    pytest.param("llama", "fp16", 7, "1d", 2, FAST, marks=FULL),
    pytest.param("llama", "bf16", 64, "2d", 4, FAST, marks=FULL),
    pytest.param("llama", "fp32", 7, "2d", 4, FAST, marks=FULL),
])  # fmt: skip
def test_what_runs_in_fp64_is_what_trains(
    name: str, precision: str, rows: int, kind: str, tp: int, rates: Rates | None
) -> None:  # fmt: skip
    plan, spy = plan_of(precision, kind, tp, "fast"), Spy()
    training = replace(model(name), rates=rates, batch_rows=rows).under(plan)
    report = verify(training.module, [tokens(rows)], plan, run=spy, captured=training)
    assert report.passed, report.worst
    assert [one.plan.numeric.precision for one in spy.seen] == ["fp64", precision][: 1 + (precision != "fp32")]
    assert all(one.plan.numeric.dropout == "exact" and same(one, training) for one in spy.seen)
    assert any(layout.sharding_axes for layout, _ in placed(training).values()) or rates is not FAST
    assert not any("other ops" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "rows"), [("fp32", 4), ("bf16", 64)])
def test_rates_of_other_precisions_and_devices_decide_nothing(precision: str, rows: int) -> None:
    """What training decides from an example of two rows."""
    one, plan = model("gpt"), plan_of(precision)
    training = Compiled(one.module, plan, tokens(2), batch_rows=rows, _captures=one._captures)
    exact = replace(one, batch_rows=rows).under(plan).decided(plan.replace(precision="fp64"))
    assert same(exact, training) and same(exact.evaluation(), training.evaluation())
    alone = replace(one, batch_rows=rows).under(plan.replace(precision="fp64"))
    assert (precision, rows) != ("bf16", 64) or not same(alone, training), "so these tests are of something"


@pytest.mark.slow
def test_what_another_capture_has_alone_is_chosen_anew_and_said() -> None:
    one, plan = model("gpt"), plan_of("fp32")
    training = replace(one, batch_rows=64).under(plan)
    ops, found = decided(training).ops, training.general
    lost = next(name for name in ops if name[0] == "aten.linear.default" and name[1].endswith("up"))
    found.decisions = replace(decided(training), ops={name: own for name, own in ops.items() if name != lost})
    exact = training.decided(plan.replace(precision="fp64"))
    assert [
        note for note in exact.general.notes if f"aten.linear.default in {lost[1]}; how these are shared out" in note
    ]


@pytest.mark.slow
def test_a_plan_that_memory_decides_is_proven() -> None:
    """Its bytes are those of fp32; in fp64 it takes twice as many."""
    config = load_config(None, [
        "model.width=32", "model.heads=4", "data.sequence_length=16", "data.batch_size=12", "parallel.tp=2",
        "parallel.dp=1",
        "parallel.tensor_plan=auto", "train.memory_gib=0.0018",
    ])  # fmt: skip
    assert verify_config(config).passed


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("kind", "tp"), [("1d", 2), ("2d", 4)])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_what_is_decided_for_any_model_is_taken_up(name: str, kind: str, tp: int, precision: str) -> None:
    one = zoo.make(name)
    plan = plan_of(precision, kind, tp)
    compiled = Compiled(one.module.train(), plan, one.batch, one.loss, batch_rows=64)
    exact = compiled.decided(plan.replace(precision="fp64"))
    assert placed(exact) == placed(compiled)
    assert same(exact, compiled) or any("other ops" in note for note in exact.general.notes)
