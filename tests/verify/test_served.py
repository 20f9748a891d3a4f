"""What workers and parameter servers do without waiting for each other is, by their record, what one device does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from covering import covering
from models import captured
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.server import asynchronous_server
from shardwise.runtime.compression import Feedback
from shardwise.runtime.served_store import masters_of
from shardwise.verify.oracle import Oracle
from shardwise.verify.replay import bound_holds, replay
from shardwise.verify.served import receiving, run_served, slices_of
from shardwise.verify.verify import in_pieces

PRODUCT = list(itertools.product(("gpt", "llama", "conv", "mlp"), ("async", "stale"), (1, 2, 3), (1, 2, 4), (1, 2)))
ADAM = OptimizerChoice("adamw", lr=1e-3, eps=1e-4, weight_decay=0.1)


def check(name: str, plan: Plan, choice: OptimizerChoice = ADAM, batches: int = 9, clip: float | None = 0.5) -> Any:
    one, make, loss = captured(name)
    compiled = one.under(plan.replace(precision="fp64"))
    torch.manual_seed(3)
    given = [make(rows) for rows in itertools.islice(itertools.cycle((5, 4, 6)), batches)]
    served = run_served(compiled, given, choice, clip_norm=clip, seed=1)
    pieces = in_pieces(compiled)
    oracle = Oracle(one.module, loss, None, seed=1, microbatches=pieces.microbatches, parts=pieces.parts)
    oracle.module.train()
    found = replay(
        oracle, given.__getitem__, served.records, slices_of(compiled, choice), choice,
        by_staleness=plan.serving.rate == "staleness", received=receiving(compiled, choice),
    )  # fmt: skip
    assert len(found.losses) == batches and sorted(key[1] for key in found.losses) == list(range(batches))
    for (_, ticket, _), value in found.losses.items():
        assert served.losses[ticket] == pytest.approx(value, rel=1e-10)
    for key, norm in found.norms.items():
        assert served.norms[key[1]] == pytest.approx(norm, rel=1e-10)
        assert found.weights[key] == pytest.approx(1.0 if clip is None else min(1.0, clip / (norm + 1e-6)), rel=1e-10)
    for parameter, value in masters_of(served.stores).items():
        right = found.parameters[parameter]
        assert float((value - right).norm()) <= 1e-10 * float(right.norm()) + 1e-14, parameter
    assert sum(found.staleness.values()) == batches * plan.serving.servers
    if plan.serving.bound is not None:
        assert all(bound_holds(record, plan.serving.bound) for record in served.records)
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "kind", "servers", "workers", "microbatches"), list(covering(PRODUCT)))
def test_the_record_replayed(name: str, kind: Any, servers: int, workers: int, microbatches: int) -> None:
    staleness = 1 if kind == "stale" else 0
    plan = Plan.of(microbatches=microbatches)
    check(name, asynchronous_server(plan, kind, servers, workers, staleness=staleness))


@pytest.mark.quick(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_optimizers(optimizer: Any) -> None:
    choice = OptimizerChoice(optimizer, lr=1e-2, eps=None if optimizer == "sgd" else 1e-4)
    check("gpt", asynchronous_server(Plan.of(), "async", 2, 3), choice, clip=None)


@pytest.mark.slow
def test_rates_by_staleness_and_seldom_pulls() -> None:
    found = check("gpt", asynchronous_server(Plan.of(), "async", 2, 3, rate="staleness", pull_every=2), batches=12)
    assert max(found.staleness) >= 1


@pytest.mark.parametrize(("pull_every", "stale"), [(1, {0: 6}), (2, {0: 3, 1: 3}), (3, {0: 2, 1: 2, 2: 2})])
def test_a_lone_worker_is_as_stale_as_it_pulls(pull_every: int, stale: dict[int, int]) -> None:
    found = check("gpt", asynchronous_server(Plan.of(), "async", 1, 1, pull_every=pull_every), batches=6)
    assert dict(found.staleness) == stale


@pytest.mark.quick(1)
@pytest.mark.parametrize("push", ["bf16", "int8", "top-k"])
def test_what_is_pushed_may_be_compressed(push: Any) -> None:
    """What is left out is added to the worker's next gradient, in the replay too."""
    plan = asynchronous_server(Plan.of(), "async", 2, 2, push=push, push_share=0.05)
    check("gpt", plan, OptimizerChoice("sgd", lr=1e-2), batches=10)


@pytest.mark.slow
def test_the_strictest_bound_is_bulk_synchronous() -> None:
    """With staleness 0 nobody begins a batch before all have pushed as many."""
    found = check("gpt", asynchronous_server(Plan.of(), "stale", 1, 3, staleness=0), batches=12)
    assert max(found.staleness) <= 4


def refused(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> str:
    plan = asynchronous_server(Plan.of(precision="fp64"), "async", 1, 1)
    with pytest.raises(ConfigError) as error:
        run_served(Compiled(module, plan, batch), [batch], ADAM)
    return str(error.value)


class Linear(torch.nn.Module):
    def __init__(self, branches: str = "") -> None:
        super().__init__()
        self.one, self.branches = torch.nn.Linear(3, 1).double(), branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.branches == "by a float" and float(x.sum()) > 0 and locals():
            return 2 * self.one(x).mean()
        if self.branches and x.sum() > 0:
            return self.one(x).mean() * 2
        return self.one(x).mean()


def test_what_workers_cannot_know_is_refused() -> None:
    """A hook would see the gradient too late; of a model that is not captured nobody knows what a batch reaches."""
    batch = {"x": torch.ones(4, 3, dtype=torch.float64)}
    hooked = Linear()
    hooked.one.weight.register_hook(lambda g: g * 0)
    assert "one.weight: it has a hook" in refused(hooked, batch)
    assert "the model could not be captured" in refused(Linear("by a float"), batch)
    assert "forward decides in Python by values of a batch" in refused(Linear("by a branch"), batch)


@pytest.mark.parametrize("push", ["int8", "top-k"])
def test_a_gradient_that_is_not_finite_is_sent_as_it_is(push: Any) -> None:
    """Nothing is committed then, and the norm says why."""
    feedback = Feedback(push, 0.1)
    x = torch.ones(1000)
    x[3] = torch.inf
    encoding, payload = feedback.encoded((0, 0, 0), x)
    assert encoding == 0 and payload.numel() == 4000
