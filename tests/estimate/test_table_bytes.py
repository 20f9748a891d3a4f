"""What gradients of tables by rows take and communicate is at most what is predicted, and far less than a table."""

from __future__ import annotations

import pytest
import torch
from counting import counted
from real import measured, predicted
from torch import Tensor, nn

from shardwise.core.instruction import Op
from shardwise.core.optim import OptimizerChoice
from shardwise.core.parameter_groups import ParameterGroup
from shardwise.core.plan import Plan
from shardwise.estimate.timeline import total
from shardwise.estimate.traffic import step_traffic
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.server import parameter_server

ROWS, WIDTH, TABLE = 24, 16, 20_000
ADAGRAD = OptimizerChoice("adagrad", lr=0.0)
SPARSE_ADAM = OptimizerChoice("adagrad", lr=0.0, groups=(ParameterGroup.of("table.*", name="sparse_adam"),))
PLANS = {
    "dp": data_parallel(Plan.of(), 3), "zero1": data_parallel(Plan.of(), 3, zero=1),
    "replicas": data_parallel(Plan.of(), 4, zero=1, replicas=2), "bf16": data_parallel(Plan.of(precision="bf16"), 2),
    "server": parameter_server(data_parallel(Plan.of(), 3), 2),
}  # fmt: skip


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        return ((self.head(self.table(ids)).sum((1, 2)) - wanted) ** 2).mean()


def subject(plan: Plan, below: int = TABLE) -> tuple[Compiled, dict[str, Tensor]]:
    ids = torch.randperm(below)[: 2 * ROWS].view(ROWS, 2) if below == TABLE else torch.randint(0, below, (ROWS, 2))
    given = {"ids": ids, "wanted": torch.rand(ROWS)}
    return Compiled(Scored(), plan.replace(microbatches=2, sparse_gradients="rows"), given), given


@pytest.mark.parametrize("name", PLANS)
def test_what_travels(name: str) -> None:
    """Of rows that all differ as many travel as is predicted, where they need not be spread over owners."""
    one, batch = subject(PLANS[name])
    traces, table = [one.trace_of((), ROWS // 2, ROWS)] * 2, next(b.index for b in one.buckets if b.table)
    exchanged = 0
    for rank, seen in enumerate(counted(one, batch, ADAGRAD)):
        expected = step_traffic(traces, one.plan, ADAGRAD, rows=ROWS, rank=rank)
        for mine, (instruction, theirs) in zip(expected, seen, strict=True):
            assert mine.instruction == instruction
            if instruction.bucket != table:
                assert sorted(mine.traffic) == sorted(theirs), f"rank {rank}: {instruction}"
            elif instruction.op in (Op.REDUCE, Op.PUSH) and instruction.axes != ("dp_replicate",):
                assert sorted(mine.traffic) == sorted(theirs), f"rank {rank}: {instruction}"
                exchanged += sum(t.nbytes for t in theirs)
    assert 0 < exchanged < TABLE * WIDTH * 4 / 10


@pytest.mark.parametrize("name", PLANS)
def test_rows_that_come_often_travel_once(name: str) -> None:
    one, batch = subject(PLANS[name], below=3)
    traces, table = [one.trace_of((), ROWS // 2, ROWS)] * 2, next(b.index for b in one.buckets if b.table)
    for rank, seen in enumerate(counted(one, batch, ADAGRAD)):
        for mine, (instruction, theirs) in zip(
            step_traffic(traces, one.plan, ADAGRAD, rows=ROWS, rank=rank), seen, strict=True
        ):
            if instruction.bucket == table and instruction.op in (Op.REDUCE, Op.PUSH):
                assert sum(t.nbytes for t in theirs) < 0.5 * sum(t.nbytes for t in mine.traffic)


@pytest.mark.parametrize(
    ("name", "choice"),
    [*((name, ADAGRAD) for name in PLANS), *((name, SPARSE_ADAM) for name in ("dp", "zero1", "bf16"))],
)
def test_memory(name: str, choice: OptimizerChoice) -> None:
    """Beside the table and its state there is nothing of its size."""
    one, batch = subject(PLANS[name])
    expected = [predicted(one, batch, choice, rank).timeline for rank in range(one.plan.mesh.size)]
    for ours, step in zip(expected, measured(one, batch, choice), strict=True):
        most = max(total(moment.peak) for moment in ours.moments)
        assert step.peak <= most <= 1.1 * step.peak
        assert step.peak - step.made < TABLE * WIDTH * 4 / 4
