"""Of parameter servers, the bytes that ranks hold and those that they send are as predicted."""

from __future__ import annotations

from typing import Any

import pytest
from counting import counted
from real import differences, predicted

import zoo
from shardwise.core.instruction import Op
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.estimate.traffic import step_traffic
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import parameter_server


def subject(ranks: int, servers: int, pp: int = 1, **fields: Any) -> tuple[Compiled, dict[str, Any]]:
    model = zoo.make("own gpt")
    plan = pipeline(parameter_server(data_parallel(Plan.of(microbatches=2, **fields), ranks), servers), pp)
    return Compiled(model.module, plan, model.batch, model.loss), dict(model.batch)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(("ranks", "servers", "pp"), [(2, 1, 1), (3, 2, 1), (3, 3, 1), (2, 1, 2)])
@pytest.mark.parametrize(
    "fields", [{}, {"precision": "bf16"}, {"reduce": "bf16"}, {"offload": "optimizer"}, {"precision": "fp16"}], ids=str
)
def test_every_instruction_s_bytes(ranks: int, servers: int, pp: int, fields: dict[str, Any]) -> None:
    assert differences(*subject(ranks, servers, pp, **fields)) == []


@pytest.mark.parametrize(("ranks", "servers", "pp"), [(2, 1, 1), (3, 2, 1), (3, 3, 1), (2, 1, 2)])
def test_what_is_pushed_and_pulled(ranks: int, servers: int, pp: int) -> None:
    one, batch = subject(ranks, servers, pp)
    rows, choice = len(next(iter(batch.values()))), OptimizerChoice("sgd", lr=0.0)
    traces = [one.trace_of(one.masks, rows // 2, rows)] * 2
    for rank, seen in enumerate(counted(one, batch, choice)):
        expected = step_traffic(traces, one.plan, choice, rows=rows, rank=rank)
        assert [each.instruction for each in expected] == [each for each, _ in seen]
        for mine, (instruction, theirs) in zip(expected, seen, strict=True):
            assert sorted(mine.traffic) == sorted(theirs), f"rank {rank}: {instruction}"
        kinds = {instruction.op for instruction, _ in seen}
        assert {Op.PUSH, Op.PULL} <= kinds and Op.GATHER not in kinds


@pytest.mark.slow
def test_the_server_holds_most() -> None:
    """Rank 0 alone has Adam's state, though the last rank has more rows."""
    one, batch = subject(2, 1)
    sizes = [sum(predicted(one, batch, OptimizerChoice("adamw"), rank).states.values()) for rank in (0, 1)]
    assert sizes[0] > 1.5 * sizes[1]
    worst = predicted(one, batch, OptimizerChoice("adamw"), None)
    assert worst.rank == 0


def test_what_servers_and_workers_send() -> None:
    """Of three ranks with two servers a worker sends the gradients once, a server half of them, and parameters."""
    one, batch = subject(3, 2)
    rows, choice = len(next(iter(batch.values()))), OptimizerChoice("sgd", lr=0.0)
    traces = [one.trace_of(one.masks, rows // 2, rows)] * 2
    size = sum(b.layout(choice, one.plan.mesh, 0).numel * 4 for b in one.buckets)
    sent = [
        {op: sum(m.sent or 0 for m in step_traffic(traces, one.plan, choice, rows=rows, rank=rank)
                 if m.instruction.op is op) for op in (Op.PUSH, Op.PULL)}
        for rank in range(3)
    ]  # fmt: skip
    assert sent[2] == {Op.PUSH: size, Op.PULL: 0}
    assert sum(each[Op.PULL] for each in sent) == 2 * size  # to two others each
    assert sum(each[Op.PUSH] for each in sent) == 2 * size  # all but what servers have from themselves
    for server in sent[:2]:
        assert server[Op.PUSH] == pytest.approx(size / 2, rel=0.02) and server[Op.PULL] == pytest.approx(size, rel=0.02)
