"""Devices without float64, such as MPS and some of Intel's: nothing of that type is made on them, and the numbers are
the same to rounding.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.backend import Backend
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.ops.cross_entropy import cross_entropy
from shardwise.ops.env import Env
from shardwise.ops.keyed_random import keyed_bernoulli, keyed_normal
from shardwise.parallel.data import data_parallel
from shardwise.runtime.scale import LossScale
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.evaluation import evaluate
from shardwise.train.metrics import FunctionMetric
from shardwise.verify.verify import run_steps

CPU = torch.device("cpu")


class Narrow(TorchDispatchMode):
    """Raises what MPS does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in tree_leaves(found)):
            raise TypeError(
                f"{func}: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
            )
        return found


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Narrow:
    monkeypatch.setattr(Backend, "widest_float", torch.float32)
    return Narrow()


def test_float64_is_found(narrow: Narrow) -> None:
    with narrow, pytest.raises(TypeError, match="float64"):
        torch.ones(2).double()


def test_an_evaluation(narrow: Narrow) -> None:
    losses = {1.5: 3.0, 2.5: 1.0}
    results = iter(
        [
            SimpleNamespace(loss=torch.tensor(loss), weight=torch.tensor(weight), outputs=None)
            for loss, weight in losses.items()
        ]
    )
    compiled = SimpleNamespace(evaluation=lambda *_: None)
    engine: Any = SimpleNamespace(
        comm=SimpleNamespace(device=CPU, mesh=Mesh.of(dp=1)), compiled=compiled, evaluate=lambda *_, **__: next(results)
    )
    batch: Any = SimpleNamespace(rows=2, fields={}, ones=None, alike=False)
    with narrow:
        found = evaluate(engine, [batch] * 2)
    assert found.loss == 1.75


def test_sums_of_a_metric(narrow: Narrow) -> None:
    """Sums are added without fp64, and counts exactly."""
    metric = FunctionMetric("far", lambda outputs, batch: (outputs.sum(), 2**24 + 1))
    state = metric.begin(CPU)
    with narrow:
        for _ in range(2):
            state = metric.add(state, torch.ones(3), {"x": torch.ones(3)})
    assert {name: value.dtype for name, value in state.items()} == {"far sum": torch.float32, "far count": torch.int64}
    assert int(state["far count"]) == 2**25 + 2


def test_a_loss_scale(narrow: Narrow) -> None:
    scale = LossScale(ScaleChoice(initial=1024.0, interval=1), CPU)
    with narrow:
        scale.update(torch.zeros(()))
        scale.update(torch.ones(()))
        scale.update(torch.ones(()))
    assert float(scale.scale) == 512.0


def test_draws(narrow: Narrow) -> None:
    """The same 0 and 1 as on other devices, and the same normal values to rounding."""
    chance = torch.cat(
        [
            torch.linspace(-0.1, 1.1, 9991),
            torch.tensor([0.0, 1.0, math.nan, 2.0**-33, 1 - 2.0**-24, math.inf, -math.inf]),
        ]
    )
    exact = keyed_normal(1, 2, 3, (9998,), dtype=torch.float64), keyed_bernoulli(chance.double(), 1, 2, 3)
    with narrow:
        ours = keyed_normal(1, 2, 3, (9998,)), keyed_bernoulli(chance, 1, 2, 3)
    assert (ours[0] - exact[0]).abs().max() < 1e-6 and torch.equal(ours[1].double(), exact[1])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_steps(narrow: Narrow, precision: Any) -> None:
    """Nothing of a step of training is float64, and what a rank computes is what it computes elsewhere."""
    torch.manual_seed(0)
    module = GPT(vocabulary=32, width=16, layers=2, heads=2, context=4, dropout=0.1)
    batches = [{"input_ids": torch.randint(0, 32, (8, 4)), "labels": torch.randint(0, 32, (8, 4))} for _ in range(2)]
    compiled = Compiled(module, data_parallel(Plan.of(precision=precision, microbatches=2), 2, 2), batches[0])

    def rank(comm: ThreadCommunicator, within: Any) -> list[float]:
        with within:  # of this thread alone
            return [one.loss for one in run_steps(compiled, comm, batches, OptimizerChoice("adamw", lr=1e-2), 1.0, 0)]

    elsewhere = run_ranks(compiled.plan.mesh, lambda comm: rank(comm, nullcontext()), timeout=60)
    ours = run_ranks(compiled.plan.mesh, lambda comm: rank(comm, Narrow()), timeout=60)
    assert ours == elsewhere and all(math.isfinite(loss) for losses in ours for loss in losses)


@pytest.mark.parametrize("probabilities", [False, True])
def test_a_mean_over_targets(narrow: Narrow, probabilities: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 5, generator=generator)
    target = torch.rand(6, 5, generator=generator) if probabilities else torch.tensor([0, 4, -100, 2, 1, 3])
    how: dict[str, Any] = {
        "ignore_index": -100,
        "smoothing": 0.0,
        "reduction": 1,
        "log_probabilities": False,
        "count": 6 if probabilities else 5,
    }
    with narrow:
        found = cross_entropy(Env(rows=6), scores, target, None, **how, summand=True, share=None)
    assert torch.allclose(found, F.cross_entropy(scores, target), rtol=1e-6)
