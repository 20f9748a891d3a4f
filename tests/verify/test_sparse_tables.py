"""Tables whose lookups are sparse: the rows that travel and are updated give the numbers of one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covering import covering
from shardwise.core.optim import OptimizerChoice
from shardwise.core.parameter_groups import ParameterGroup
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import parameter_server
from shardwise.verify.verify import verify

ADAGRAD = OptimizerChoice("adagrad", lr=0.05)
SGD = OptimizerChoice("sgd", lr=0.1)
TABLES = ["users.weight", "pages.weight"]
SPARSE_ADAM = OptimizerChoice(
    "adamw", lr=0.01, weight_decay=0.1, groups=(ParameterGroup.of(TABLES, name="sparse_adam", lr=0.02, eps=1e-4),)
)
ASCENT = OptimizerChoice(
    "adagrad", lr=0.05, groups=(
        ParameterGroup.of("users.*", name="sparse_adam", betas=(0.5, 0.9), eps=1e-4, maximize=True),
        ParameterGroup.of("pages.*", maximize=True),
    ),
)  # fmt: skip


class Clicks(nn.Module):
    """Two tables of odd sizes, one of which has a row without a gradient, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(101, 5, sparse=True)
        self.pages = nn.Embedding(37, 6, padding_idx=3, sparse=True)
        self.days = nn.Embedding(7, 4)
        self.deep = nn.Sequential(nn.Linear(5 + 6 + 4, 9), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, user: Tensor, pages: Tensor, day: Tensor) -> Tensor:
        seen = torch.cat([self.users(user), self.pages(pages).sum(1), self.days(day)], -1)
        return self.deep(seen).squeeze(-1)


def clicked(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, batch["clicked"].to(output.dtype))


def batch(rows: int, seed: int, users: int = 101) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int, below: int) -> Tensor:
        return torch.randint(0, below, shape, generator=generator)

    return {
        "user": drawn(rows, below=users), "pages": drawn(rows, 3, below=37), "day": drawn(rows, below=7),
        "clicked": drawn(rows, below=2).float(),
    }  # fmt: skip


def check(
    plan: Plan, optimizer: OptimizerChoice = ADAGRAD, clip_norm: float | None = 0.5, clip_value: float | None = None,
    **fields: Any,
) -> None:  # fmt: skip
    torch.manual_seed(plan.mesh.size)
    batches = [batch(rows, rows, **fields) for rows in (13, 12, 7, 5)]
    plan = plan.replace(sparse_gradients="rows")
    clips = {"clip_norm": clip_norm, "clip_value": clip_value}
    report = verify(Clicks(), batches, plan, loss=clicked, optimizer=optimizer, **clips)
    assert report.passed, (report.largest, report.worst[:3])
    assert report.compared > 20 and report.ranks_agree


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["dp", "zero2", "server 2"])
def test_rows_are_clipped_element_by_element(kind: str) -> None:
    """What is clipped is the sum of a row's gradients over lookups, microbatches and ranks."""
    check(planned(kind, 3, 2), SGD, clip_value=3e-3, users=5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["dp", "zero1", "server 2"])
def test_the_average_of_a_table_moves_in_all_its_rows(kind: str) -> None:
    """A row that is not looked up stays as it is, and its average still moves to it."""
    check(planned(kind, 3, 2), OptimizerChoice("adagrad", lr=0.5, ema=0.7), users=5)


KINDS = ("dp", "zero1", "zero2", "zero3", "replicas", "server 1", "server 2", "pp")
PRODUCT = list(itertools.product(KINDS, (1, 3), (ADAGRAD, SGD, SPARSE_ADAM, ASCENT), (None, 0.5), (2, 4)))


def planned(kind: str, ranks: int, microbatches: int) -> Plan:
    plan = Plan.of(microbatches=microbatches)
    if kind == "replicas":
        return data_parallel(plan, 2 * ranks, zero=1, replicas=2)
    if kind == "pp":
        return pipeline(data_parallel(plan, ranks, zero=1), 2)
    if kind.startswith("server"):
        return parameter_server(data_parallel(plan, ranks), int(kind[-1]))
    return data_parallel(plan, ranks, zero=int(kind[-1]) if kind.startswith("zero") else 0)


@pytest.mark.quick(6)
@pytest.mark.parametrize(("kind", "microbatches", "optimizer", "clip_norm", "ranks"), list(covering(PRODUCT)))
def test_rows_equal_one_device(
    kind: str, microbatches: int, optimizer: OptimizerChoice, clip_norm: float | None, ranks: int
) -> None:
    check(planned(kind, ranks, microbatches), optimizer, clip_norm)


@pytest.mark.parametrize("optimizer", [ADAGRAD, SPARSE_ADAM])
def test_one_rank(optimizer: OptimizerChoice) -> None:
    check(Plan.of(microbatches=2), optimizer)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("kind", "optimizer"), [("dp", ADAGRAD), ("zero1", ADAGRAD), ("zero2", SPARSE_ADAM)])
def test_low_precision(precision: str, kind: str, optimizer: OptimizerChoice) -> None:
    check(planned(kind, 2, 2).replace(precision=precision), optimizer)


def test_servers_in_groups() -> None:
    check(parameter_server(data_parallel(Plan.of(microbatches=2), 4, replicas=2), 2))


class Shared(Clicks):
    """A table that is read other than by lookups, and one that two blocks look up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Looking(self.pages), Looking(self.pages)])

    def forward(self, user: Tensor, pages: Tensor, day: Tensor) -> Tensor:
        extra = self.users.weight.square().mean() + sum(block(pages) for block in self.blocks)
        return super().forward(user, pages, day) + extra


class Looking(nn.Module):
    def __init__(self, pages: nn.Embedding) -> None:
        super().__init__()
        self.pages, self.scale = pages, nn.Linear(6, 1)

    def forward(self, pages: Tensor) -> Tensor:
        found: Tensor = self.scale(self.pages(pages)).sum((1, 2))
        return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["dp", "zero1", "pp"])
def test_tables_that_have_dense_gradients(kind: str) -> None:
    plan = planned(kind, 2, 2).replace(sparse_gradients="rows")
    batches = [batch(rows, rows) for rows in (13, 7)]
    torch.manual_seed(1)
    one = Compiled(Shared(), plan, batches[0], clicked)
    assert [p.name for b in one.buckets if b.table for p in b.parameters] == []
    report = verify(Shared(), batches, plan, loss=clicked, optimizer=ADAGRAD)
    assert report.passed, report.worst[:3]


class Decayed(Clicks):
    """A table that is read other than by lookups, where it is looked up."""

    def forward(self, user: Tensor, pages: Tensor, day: Tensor) -> Tensor:
        return super().forward(user, pages, day) + self.users.weight.square().mean()


def test_a_table_that_is_read_beside_its_lookups() -> None:
    plan = planned("dp", 2, 1).replace(sparse_gradients="rows")
    one = Compiled(Decayed(), plan, batch(9, 1), clicked)
    assert [p.name for b in one.buckets if b.table for p in b.parameters] == ["pages.weight"]
    report = verify(Decayed(), [batch(9, 1), batch(8, 2)], plan, loss=clicked, optimizer=ADAGRAD)
    assert report.passed, report.worst[:3]


def test_all_ranks_look_up_the_same_row() -> None:
    check(data_parallel(Plan.of(), 3, zero=1), users=1)
