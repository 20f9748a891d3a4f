"""Offload: the same numbers, with state or activations on the host.  On a CPU the host is the device, and every copy is
made all the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.layout import rank_rows
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.runtime import gathered
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

ROWS = 6


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 23, (ROWS, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def run(plan: Plan, activations: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = GPT(vocabulary=23, width=18, layers=3, heads=3, context=8, dropout=0.1)
    compiled = Compiled(module, plan, batch(0))

    def rank(comm: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]]:
        engine = Engine(compiled, comm, OptimizerChoice("adamw", lr=1e-2), clip_norm=0.5, strict=True)
        engine.interpreter.offload = activations
        mine = [i for a, b in rank_rows(ROWS, plan.microbatches, comm.mesh.size, comm.rank) for i in range(a, b)]
        losses = [float(engine.step({k: v[mine] for k, v in batch(i).items()}, ROWS).loss) for i in range(4)]
        return losses, engine.state_dict()

    return run_ranks(plan.mesh, rank, timeout=60)[0]


def assert_same(ours: tuple[list[float], dict[str, Tensor]], theirs: tuple[list[float], dict[str, Tensor]]) -> None:
    assert ours[0] == theirs[0]
    assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("dp", "zero", "precision"),
    [
        pytest.param(*axes, precision, marks=() if (i + j) % 3 == 0 or axes == (2, 3) else pytest.mark.full)
        for i, axes in enumerate([(1, 0), (2, 0), (2, 1), (3, 2), (2, 3)])
        for j, precision in enumerate(("fp32", "bf16", "fp16"))
    ],
)
def test_the_host_takes_the_same_step(dp: int, zero: int, precision: Any) -> None:
    plan = data_parallel(Plan.of(precision=precision, microbatches=2), dp, zero)
    assert_same(run(plan.replace(offload="optimizer")), run(plan))


@pytest.mark.slow
def test_masters_and_state_are_on_the_host_alone() -> None:
    """The gradient that the optimizer takes is a copy there, and so are its parameters."""
    module = GPT(vocabulary=23, width=18, layers=1, heads=3, context=8)
    compiled = Compiled(module, Plan.of(offload="optimizer"), batch(0))

    def rank(comm: ThreadCommunicator) -> None:
        for memory in Engine(compiled, comm, OptimizerChoice("adamw", lr=1e-2)).memory.buckets.values():
            assert memory.optimizer_gradient is not None
            assert memory.grad is not None
            segment = memory.updates[0].optimizer.segments[0]
            assert segment.param.data_ptr() == memory.master.data_ptr() != memory.param.data_ptr()
            assert segment.grad.data_ptr() == memory.optimizer_gradient.data_ptr() != memory.grad.data_ptr()

    run_ranks(compiled.plan.mesh, rank, timeout=60)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (2, 3)])
def test_offloaded_activations_change_no_bit(
    dp: int, zero: int, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    original = gathered.Gathered.keep

    def count(self: Any, value: Any) -> Any:
        kept = original(self, value)
        if isinstance(kept, gathered.Offloaded):
            copied.append(kept.host.nbytes)
        return kept

    plan = data_parallel(Plan.of(microbatches=2, recompute=recompute), dp, zero)
    truth = run(plan)
    monkeypatch.setattr(gathered, "LEAST_OFFLOAD", 0)
    monkeypatch.setattr(gathered.Gathered, "keep", count)
    assert_same(run(plan, activations=True), truth)
    assert sum(copied) > 100_000


def test_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match='offload: "activations" is not legal on a CPU'):
        run(Plan.of(offload="activations"))
