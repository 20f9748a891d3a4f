"""Of islands that train apart, the bytes that ranks hold and those that they send are as predicted, also where they
meet."""

from __future__ import annotations

from typing import Any

import pytest
from counting import counted
from real import differences

import zoo
from shardwise.core.instruction import Op
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.estimate.traffic import step_traffic
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel

INSIDE = {
    "alone": lambda plan: plan, "zero-1": lambda plan: data_parallel(plan, 2, 1),
    "zero-3": lambda plan: data_parallel(plan, 3, 3), "pp": lambda plan: pipeline(plan, 2),
    "tp × dp": lambda plan: data_parallel(tensor_parallel(plan, 2), 2),
}  # fmt: skip


def planned(inside: str, steps: int, **fields: Any) -> Plan:
    options = {"fragments": fields.pop("fragments", 1)}
    return local_training(INSIDE[inside](Plan.of(microbatches=2, **fields)), 2, steps, **options)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("fields", [{}, {"fragments": 2}, {"precision": "bf16"}, {"offload": "optimizer"}], ids=str)
def test_every_instruction_s_bytes(inside: str, fields: dict[str, Any]) -> None:
    """Of the second step, in which islands meet."""
    model, plan = zoo.make("own gpt"), planned(inside, 2, **fields)
    subject = Compiled(model.module, plan, model.batch, model.loss)
    assert plan.local.due(1) == plan.local.first_due != ()
    assert differences(subject, dict(model.batch)) == []


@pytest.mark.quick(2)
@pytest.mark.parametrize("inside", INSIDE)
def test_what_islands_send(inside: str) -> None:
    """With one local step they meet in the first."""
    model, plan, choice = zoo.make("own gpt"), planned(inside, 1), OptimizerChoice("sgd", lr=0.0)
    subject = Compiled(model.module, plan, model.batch, model.loss)
    rows = len(next(iter(model.batch.values())))
    traces = [subject.trace_of(subject.masks, rows // 2, rows)] * 2
    over = 0
    for rank, seen in enumerate(counted(subject, model.batch, choice)):
        expected = step_traffic(traces, plan, choice, rows=rows, rank=rank)
        assert [one.instruction for one in expected] == [one for one, _ in seen]
        for mine, (one, theirs) in zip(expected, seen, strict=True):
            assert sorted(mine.traffic) == sorted(theirs), f"rank {rank}: {one}"
            over += sum(sent.nbytes for sent in theirs if sent.axes == ("islands",) and one.bucket >= 0)
        assert any(one.op is Op.OUTER for one, _ in seen)
    every = sum(p.numel * 4 for b in subject.buckets for p in b.parameters)
    held = 2 * every * (2 if inside == "tp × dp" else 1)  # dp ranks hold the same
    assert over == pytest.approx(held, rel=0.1)  # with padding
