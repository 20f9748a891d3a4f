"""Where rows meet, microbatches exchange as ranks do (``rows = "batch"``): any number of them gives the step of the
whole batch, which plain PyTorch computes in one piece."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from covering import covering
from harness import TOLERANCE, Run, Subject, errors, oracle_run, plain_run, planned_run
from meeting import MODELS, ROWS, batch, in_fp64, planned
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Op
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import CHOICES, Plan
from shardwise.lower.compiled import Compiled
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.verify.verify import verify


@functools.cache
def subject(name: str) -> Subject:
    torch.manual_seed(3)
    return Subject(MODELS[name].make(), batch(name), MODELS[name].loss)


@functools.cache
def truth(name: str) -> Run:
    """One device; where torch has no kernel in fp64, for the products of experts, it is the oracle of ``verify``."""
    return oracle_run(subject(name)) if name == "mixtral" else plain_run(subject(name))


@functools.cache
def captured(name: str) -> Compiled:
    one = subject(name)
    return Compiled(one.module, Plan.of(precision="fp64"), one.batch, one.loss)


RANKS = ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 3))  # with a stage of ZeRO
EVERY = list(itertools.product(MODELS, RANKS, (2, 3, 7), CHOICES["recompute"]))


def check(name: str, plan: Plan) -> None:
    compiled = captured(name).under(plan)
    assert compiled.general.shared and not compiled.general.meets and compiled.general.cuts_batch
    found = errors(planned_run(compiled, subject(name).batch), truth(name))
    worst = max(found, key=lambda n: found[n])
    assert found[worst] <= TOLERANCE, f"{worst} is off by {found[worst]:.1e}"


@pytest.mark.quick(1)
@pytest.mark.few(9)
@pytest.mark.parametrize("case", list(covering(EVERY)), ids=lambda c: "-".join(map(str, c)))
def test_every_number_of_microbatches_is_the_whole_batch(case: Any) -> None:
    """Uneven microbatches on uneven ranks, some without rows."""
    name, (dp, zero), microbatches, recompute = case
    check(name, planned(dp, zero, microbatches, recompute))


@pytest.mark.full
@pytest.mark.parametrize("case", EVERY, ids=lambda c: "-".join(map(str, c)))
def test_every_plan(case: Any) -> None:
    name, (dp, zero), microbatches, recompute = case
    check(name, planned(dp, zero, microbatches, recompute))


@pytest.mark.quick(1)
@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "dp", "zero"), [(2, 1, 0), (2, 2, 3), (3, 2, 0)])
def test_with_tensor_parallelism(name: str, tp: int, dp: int, zero: int) -> None:
    check(name, planned(dp, zero, 2, "selective", tp))


@pytest.mark.slow
def test_several_steps_with_adam_and_batches_of_other_sizes() -> None:
    for name in ("norms", "towers"):
        one = subject(name)
        report = verify(
            one.module, [one.batch, *(in_fp64(name, rows) for rows in (5, 2))], planned(2, 3, 3, "full"), loss=one.loss,
            optimizer=OptimizerChoice("adamw", lr=1e-3),
        )  # fmt: skip
        assert report.passed, (name, report.worst[:3])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_low_precision(precision: Any) -> None:
    one = subject("covariance")
    plan = Plan.of(Mesh.of(dp=2), microbatches=3, precision=precision, rows="batch")
    assert verify(copy.deepcopy(one.module).float(), [batch("covariance")], plan).passed


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["norms", "towers"])
def test_an_evaluation(name: str) -> None:
    """In-batch negatives are those of the whole batch there too; BatchNorm uses its running statistics."""
    one = subject(name)
    module = copy.deepcopy(one.module).eval()
    with torch.no_grad():
        expected = float(module(**one.batch))
    compiled = captured(name).under(planned(2, 3, 3, "none"))

    def rank(comm: ThreadCommunicator) -> float:
        engine = Engine(compiled, comm, OptimizerChoice("sgd", lr=0.0))
        mine = [i for a, b in rank_rows(ROWS, 3, 2, comm.rank) for i in range(a, b)]
        return float(engine.evaluate({k: v[mine] for k, v in one.batch.items()}, ROWS).loss)

    for found in run_ranks(compiled.plan.mesh, rank, timeout=60):
        assert abs(found - expected) <= TOLERANCE * abs(expected)


def test_with_an_optimizer_on_the_host() -> None:
    check("norms", planned(2, 3, 3, "full", offload="optimizer"))


def test_buffers_are_written_once_a_batch() -> None:
    """Running statistics are those of the whole batch, and so is their count."""
    found = planned_run(captured("norms").under(planned(2, 0, 3, "none")), subject("norms").batch)
    expected = truth("norms").state
    for name in (name for name in expected if "running" in name or "tracked" in name):
        torch.testing.assert_close(found.state[name], expected[name], rtol=1e-12, atol=1e-12)


def test_the_program_says_when_rows_meet() -> None:
    """All microbatches of a phase come before the exchange, and it runs once."""
    compiled = captured("covariance").under(planned(2, 0, 3, "none"))
    (program,) = compiled.programs(compiled.general, 3)
    units = compiled.general.units
    forward = [(units[one.unit].name, one.microbatch) for one in program.instructions if one.op is Op.FORWARD]
    first, *_ = [i for i, (name, _) in enumerate(forward) if name == "exchange 1"]
    assert [m for _, m in forward[:first]] == [0, 1, 2]
    assert sum(name == "exchange 1" for name, _ in forward) == 1
    backward = [one.microbatch for one in program.instructions if one.op is Op.BACKWARD]
    assert backward[-3:] == [2, 1, 0]


def test_nothing_changes_where_rows_do_not_meet() -> None:
    torch.manual_seed(0)
    one = zoo.make("own mlp")
    plans = [Plan.of(microbatches=2, rows=rows) for rows in ("microbatch", "batch")]
    compiled = [Compiled(one.module, plan, one.batch, one.loss) for plan in plans]
    texts = [[p.text() for p in c.programs(c.general, 2)] for c in compiled]
    assert texts[0] == texts[1]


def test_one_microbatch_needs_no_exchange() -> None:
    one = subject("towers")
    assert not Compiled(one.module, Plan.of(precision="fp64", rows="batch"), one.batch).general.shared


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_pipeline_is_refused() -> None:
    one = subject("norms")
    plan = Plan.of(Mesh.of(pp=2), microbatches=2, precision="fp64", rows="batch")
    with pytest.raises(ConfigError, match=r'pp: 2 are not legal with rows = "batch"'):
        Compiled(one.module, plan, one.batch)


class Rank(nn.Module):
    """The order of all rows matters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.body(x).squeeze(-1)
        return (scores.softmax(0) * scores).sum()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y.mean() * 2 if bool((y > 100).any()) and locals() else y.mean()


def test_a_softmax_over_rows() -> None:
    """It is either right or refused by name."""
    torch.manual_seed(0)
    one = Subject(Rank(), {"x": batch("covariance")["x"]})
    plan = Plan.of(Mesh.of(dp=2), microbatches=2, precision="fp64", rows="batch")
    try:
        compiled = Compiled(one.module, plan, one.batch)
    except ConfigError as error:
        assert "softmax" in str(error), error  # noqa: PT017 - legal too
    else:
        assert max(errors(planned_run(compiled, one.batch), plain_run(one)).values()) <= TOLERANCE


def test_a_model_that_is_not_captured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'rows: "batch" is not possible: the model could not be captured'):
        Compiled(Branching(), Plan.of(microbatches=2, rows="batch"), {"x": batch("covariance")["x"]})
