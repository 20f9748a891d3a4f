"""The moving average of the weights is torch's `AveragedModel`, under every kind of plan."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covering import covering
from models import captured
from shardwise.core.averaging import check_average
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.local import local_training
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.server import asynchronous_server, parameter_server
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.average import Average
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.verify.verify import OVERLAPPING_STEPS, verify

PLANS: dict[str, Plan] = {
    "ddp": data_parallel(Plan.of(microbatches=2), 2),
    "zero-1": data_parallel(Plan.of(), 3, 1),
    "zero-2": data_parallel(Plan.of(microbatches=2), 2, 2),
    "zero-3": data_parallel(Plan.of(microbatches=3), 3, 3),
    "hybrid": data_parallel(Plan.of(), 4, 3, 2),
    "offload": data_parallel(Plan.of(offload="optimizer"), 2, 3),
    "tp": tensor_parallel(Plan.of(microbatches=2), 2, "1d-sp"),
    "pp": pipeline(Plan.of(microbatches=3), 2, "1f1b"),
    "post-validated": pipeline(Plan.of(microbatches=4, norm="post-validate", window=3), 2, "1f1b"),
    "2bw": pipeline(Plan.of(microbatches=4), 2, "pipedream-2bw"),
    "sync": parameter_server(data_parallel(Plan.of(), 3), 2),
    "three": tensor_parallel(pipeline(data_parallel(Plan.of(microbatches=2), 2, 1), 2, "1f1b"), 2, "1d"),
}
AVERAGES: dict[str, dict[str, Any]] = {
    "always": {"ema": 0.8},
    "from a step on": {"ema": 0.7, "ema_start": 2},
    "every other step": {"ema": 0.7, "ema_every": 2},
    "warming up": {"ema": 0.95, "ema_warmup": True},
    "all together": {"ema": 0.9, "ema_start": 1, "ema_every": 2, "ema_warmup": True},
}


def check(plan: Plan, choice: OptimizerChoice, model: str = "gpt") -> Any:
    one, make, loss = captured(model)
    torch.manual_seed(3)
    rows = (9, 8, 7, 9, 8) if not plan.overlaps else (8,) * max(OVERLAPPING_STEPS, 5)
    batches = [make(n) for n in rows]
    return verify(one.module, batches, plan, loss=loss, optimizer=choice, captured=one, clip_norm=0.5)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("plan", "average"), list(covering(list(itertools.product(PLANS, AVERAGES)))))
def test_the_average_is_torchs(plan: str, average: str) -> None:
    name: Any = ("adamw", "sgd", "rmsprop")[len(plan) % 3]
    eps = None if name == "sgd" else 1e-4
    report = check(PLANS[plan], OptimizerChoice(name, lr=1e-2, eps=eps, **AVERAGES[average]))
    assert report.passed, (report.largest, report.worst[:3])
    assert report.summary["average"] < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "zero-1"])
def test_of_a_model_that_is_not_captured(plan: str) -> None:
    """A parameter that nothing reaches takes no step, and its average still moves to it."""
    report = check(PLANS[plan], OptimizerChoice("sgd", lr=0.1, ema=0.8), "data-dependent")
    assert report.passed, (report.largest, report.worst[:3])


@pytest.mark.slow
def test_an_average_that_counts_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Average.update

    def twice(self: Average, *given: Any) -> None:
        update(self, *given)
        update(self, *given)

    monkeypatch.setattr(Average, "update", twice)
    report = check(PLANS["zero-1"], OptimizerChoice("sgd", lr=1e-2, ema=0.8))
    assert not report.passed and report.worst[0].what == "average"


class Sum(nn.Module):
    """Its gradient is the sum of the rows of x, times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 7.0, 0.0, 3.0, -2.0]))

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return (x * factor[:, None] @ self.weight).sum()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_skipped_step_leaves_it_bit_for_bit(zero: int) -> None:
    """Under fp16 a step overflows: the average is as it was, and its warm-up does not go on."""
    x = torch.zeros(2, 5)
    x[:, 0], x[:, 4] = 0.5, -0.25
    compiled = Compiled(Sum(), data_parallel(Plan.of(precision="fp16"), 2, zero), {"x": x, "factor": torch.ones(2)})
    choice = OptimizerChoice("sgd", lr=0.1, ema=0.9, ema_warmup=True)

    def rank(comm: Any) -> list[Tensor]:
        engine = Engine(compiled, comm, choice, loss_scale=ScaleChoice.fixed(512.0))
        found = []
        for factor in (1.0, 1e4, 1.0, 1.0):
            row = slice(comm.rank, comm.rank + 1)
            engine.step({"x": x[row], "factor": torch.full((1,), factor)}, 2)
            with engine.averaged():
                found.append(engine.state_dict()["weight"])
        return found

    for found in run_ranks(compiled.plan.mesh, rank):
        assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))
        weights = [Sum().weight.detach() - 0.1 * (n + 1) * x.sum(0) for n in range(3)]
        right = weights[0]
        for number, weight in enumerate(weights[1:], 1):
            decay = (1 + number) / (10 + number)
            right = decay * right + (1 - decay) * weight
        torch.testing.assert_close(found[3], right, rtol=1e-6, atol=1e-7)


def test_a_skipped_step_keeps_negative_zeros() -> None:
    master = torch.tensor([-0.0, 0.0, 1.0])
    average = Average(master, OptimizerChoice("sgd", ema=0.5))
    master.fill_(torch.nan)
    for kind in ("average", "copy", ""):
        average.update(kind, torch.ones(()))  # type: ignore[arg-type]
        assert torch.equal(average.average.view(torch.int32), torch.tensor([-0.0, 0.0, 1.0]).view(torch.int32))
        assert float(average.count) == 0


class Normed(nn.Module):
    """Its running statistics are buffers; a parameter is frozen, and one is read by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unread = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(torch.tanh(self.norm(self.first(x))) + self.frozen), y)


@pytest.mark.quick(1)
@pytest.mark.parametrize("zero", [1, 3])
def test_evaluations_and_states_of_the_average(zero: int) -> None:
    """In a context the weights are the average, buffers the model's own; afterwards training goes on as before."""
    torch.manual_seed(0)
    module = Normed().double()
    batches = [{"x": torch.randn(6, 4).double(), "y": torch.randint(0, 3, (6,))} for _ in range(5)]
    compiled = Compiled(module, data_parallel(Plan.of(precision="fp64"), 2, zero), batches[0])
    choice = OptimizerChoice("adamw", lr=1e-2, decay="all", weight_decay=0.1, ema=0.6)

    def rank(comm: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
        engine = Engine(compiled, comm, choice)
        mine = slice(3 * comm.rank, 3 * comm.rank + 3)
        losses = []
        for batch in batches:
            engine.step({name: value[mine] for name, value in batch.items()}, 6)
            with engine.averaged():
                losses.append(float(engine.evaluate({n: v[mine] for n, v in batches[0].items()}, 6).loss))
                state = engine.state_dict()
                with pytest.raises(ShardwiseError, match="step: the weights are their averages"):
                    engine.step({name: value[mine] for name, value in batch.items()}, 6)
                with pytest.raises(ShardwiseError, match=r"averaged\(\): the weights are their"), engine.averaged():
                    pass
        return engine.state_dict(), state, losses

    plain = Normed().double()
    plain.load_state_dict(module.state_dict())
    average = torch.optim.swa_utils.AveragedModel(plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.6))
    learns = [p for name, p in plain.named_parameters() if name not in ("frozen", "unread")]
    optimizer, losses = torch.optim.AdamW(learns, lr=1e-2, weight_decay=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        plain(**batch).backward()
        optimizer.step()
        average.update_parameters(plain)
        average.module.eval()
        losses.append(average.module(**batches[0]).item())
    right = average.module.state_dict()
    for state, averaged, found in run_ranks(compiled.plan.mesh, rank):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(averaged[name], right[name], rtol=1e-10, atol=1e-12)
        assert (averaged["first.weight"] - state["first.weight"]).abs().max() > 1e-4


@pytest.mark.quick(1)
@pytest.mark.parametrize("zero", [1, 0, 3])
def test_what_computes_in_bf16_is_the_average(zero: int) -> None:
    """Parameters in lower precision follow the masters, in and out of the context."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}
    plan = data_parallel(Plan.of(precision="bf16"), 2, zero)
    compiled = Compiled(Normed(), plan, batch)

    def rank(comm: Any) -> list[list[float]]:
        engine, other = (Engine(compiled, comm, OptimizerChoice("sgd", lr=2.0, ema=0.9)) for _ in range(2))
        own = {name: value[3 * comm.rank : 3 * comm.rank + 3] for name, value in batch.items()}
        for _ in range(4):
            engine.step(own, 6)
        found = [[float(engine.evaluate(own, 6).loss)]]
        plain = engine.state_dict()
        with engine.averaged():
            found.append([float(engine.evaluate(own, 6).loss)])
            averages = engine.state_dict()
        found[0].append(float(engine.evaluate(own, 6).loss))
        for losses, state in zip(found, (plain, averages), strict=True):
            other.load_state_dict(state)
            losses.append(float(other.evaluate(own, 6).loss))
        return found

    for weights, averages in run_ranks(plan.mesh, rank):
        assert len(set(weights)) == len(set(averages)) == 1
        assert weights[0] != averages[0]


REFUSED = {
    "servers apart": (asynchronous_server(Plan.of(), "async", 1, 2), 'ema: 0.9 is not legal with server = "async"'),
    "islands": (local_training(Plan.of(), 2, 2), "ema: 0.9 is not legal with local_steps = 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plans_without_steps_of_all_are_refused(case: str) -> None:
    plan, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check_average(plan, OptimizerChoice("sgd", ema=0.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema": 1.0}, "optimizer.ema: 1.0 is not legal.*less than 1"),
        ({"ema": -0.1}, "optimizer.ema: -0.1"),
        ({"ema_start": 5}, "optimizer.ema_start: 5 is not legal without optimizer.ema"),
        ({"ema": 0.9, "ema_every": 0}, "optimizer.ema_every: 0"),
        ({"ema": 0.9, "ema_warmup": 1}, "optimizer.ema_warmup: 1 is not legal; legal: true or false"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerChoice(**options)


def test_without_an_average_there_is_none() -> None:
    compiled = Compiled(Sum(), Plan.of(), {"x": torch.zeros(2, 5), "factor": torch.ones(2)})

    def rank(comm: Any) -> None:
        with pytest.raises(ShardwiseError, match=r"no average.*legal: an optimizer with ema"):
            Engine(compiled, comm, OptimizerChoice("sgd")).averaged().__enter__()

    run_ranks(compiled.plan.mesh, rank)
