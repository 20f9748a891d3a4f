"""The average of the weights in runs: saved and loaded under any plan, exported, evaluated, and in people's loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import BATCH, Rows, compiled
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwise import Plan
from shardwise.checkpoint import Checkpoint, latest
from shardwise.checkpoint.export import export
from shardwise.checkpoint.weights import read_weights
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.lower.compiled import Compiled
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.distribute import distribute
from shardwise.train.trainer import Trainer

State = dict[str, Tensor]
EMA = OptimizerChoice("adamw", lr=1e-2, ema=0.8, ema_warmup=True)


def run(folder: Path, made: Compiled, stop: int, choice: OptimizerChoice = EMA) -> tuple[State, State]:
    """Go on from the folder's checkpoint to step ``stop`` and save; the weights, and their averages."""

    def rank(comm: ThreadCommunicator) -> tuple[State, State]:
        trainer = Trainer(made, choice, made.plan, {}, clip_norm=0.5, seed=3, comm=comm)
        with trainer.loader(Rows(), BATCH) as loader, Checkpoints(trainer, folder) as checkpoints:
            checkpoints.restore(loader)
            while trainer.engine.step_index < stop:
                trainer.step(next(loader))
            checkpoints.save(loader)
            checkpoints.wait()
            if choice.ema is None:
                return trainer.state_dict(), {}
            with trainer.averaged():
                averages = trainer.state_dict()
                with pytest.raises(ShardwiseError, match="restoring: the weights are their averages"):
                    checkpoints.restore(loader)
        return trainer.state_dict(), averages

    return run_ranks(made.plan.mesh, rank, timeout=60)[0]


def saved(folder: Path) -> State:
    checkpoint = Checkpoint.open(latest(folder))  # type: ignore[arg-type]
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


PLANS: dict[str, dict[str, Any]] = {
    "zero-3": {"ranks": 3, "zero": 3}, "pp": {"ranks": 1, "pp": 2}, "tp": {"ranks": 1, "tp": 2},
    "zero-1 x tp": {"ranks": 2, "zero": 1, "tp": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_it_goes_on_under_another_plan(tmp_path: Path, plan: str) -> None:
    """What another plan loads and saves again is the same, bit for bit; and training goes on as on one device."""
    one, other = compiled("gpt", 1, "fp64"), compiled("gpt", precision="fp64", **PLANS[plan])
    weights, averages = run(tmp_path / "whole", one, 5)
    run(tmp_path / "parts", one, 2)
    before = saved(tmp_path / "parts")
    run(tmp_path / "parts", other, 2)
    after = saved(tmp_path / "parts")
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    names = {name for name in before if name.startswith("ema.")}
    assert {f"ema.{name}.{key}" for name in weights for key in ("average", "count")} >= names and len(names) > 20
    found, found_averages = run(tmp_path / "parts", other, 5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(found_averages[name], averages[name], rtol=1e-11, atol=1e-12)
    assert max(float((value - averages[name]).abs().max()) for name, value in weights.items()) > 1e-3


@pytest.mark.slow
def test_a_run_may_begin_to_average_and_cease_to(tmp_path: Path) -> None:
    """A checkpoint without an average begins one where the weights are; one with an average serves a run without."""
    made, plain = compiled("gpt", 2, "fp64", 1), OptimizerChoice("adamw", lr=1e-2)
    run(tmp_path, made, 2, plain)
    begun, average = run(tmp_path, made, 2)
    assert all(torch.equal(value, average[name]) for name, value in begun.items())
    run(tmp_path, made, 4)
    assert any(name.startswith("ema.") for name in saved(tmp_path))
    run(tmp_path, made, 5, plain)
    assert not any(name.startswith("ema.") for name in saved(tmp_path))


def test_an_export_has_the_average(tmp_path: Path) -> None:
    made = compiled("normed", 2, "fp64", 1)
    weights, averages = run(tmp_path / "run", made, 3)
    checkpoint = Checkpoint.open(latest(tmp_path / "run"))  # type: ignore[arg-type]
    export(checkpoint, tmp_path / "plain")
    export(checkpoint, tmp_path / "average", average=True)
    export(checkpoint, tmp_path / "narrow", average=True, dtype=torch.bfloat16)
    plain, average, narrow = (read_weights(tmp_path / one) for one in ("plain", "average", "narrow"))
    for name in plain.names:
        assert torch.equal(plain.read(name), weights[name])
        assert torch.equal(average.read(name), averages[name])
        rounds = average.read(name).is_floating_point()
        assert torch.equal(narrow.read(name), averages[name].bfloat16() if rounds else averages[name])
    assert not torch.equal(plain.read("scale"), average.read("scale"))
    assert torch.equal(plain.read("norm.running_mean"), average.read("norm.running_mean"))
    run(tmp_path / "without", made, 1, OptimizerChoice("adamw"))
    with pytest.raises(ConfigError, match="no average of the weights.*without optimizer.ema"):
        export(Checkpoint.open(latest(tmp_path / "without")), tmp_path / "none", average=True)  # type: ignore[arg-type]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.quick(1)
@pytest.mark.parametrize("microbatches", [2, 1])
def test_a_loop_reads_and_evaluates_the_average(microbatches: int) -> None:
    """`model.averaged()` is torch's `AveragedModel` of the same loop; what the loop writes does not end it."""
    batches = [(torch.randn(6, 4).double(), torch.randint(0, 3, (6,))) for _ in range(4)]

    def looped(model: Any, optimizer: Any, average: Any) -> list[float]:
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if average is not None:
                average.update_parameters(model)
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.4, 0.4)
        return losses

    def measured(model: Any) -> float:
        model.eval()
        with torch.no_grad():
            found = float(functional.cross_entropy(model(batches[0][0]), batches[0][1]))
        model.train()
        return found

    plain = net()
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    looped(plain, torch.optim.SGD(plain.parameters(), lr=0.5), average)
    for mine, theirs in zip(average.module.buffers(), plain.buffers(), strict=True):
        mine.copy_(theirs)
    module = net()
    plan = Plan.of(precision="fp64", microbatches=microbatches, rows="batch" if microbatches > 1 else "microbatch")
    model, optimizer = distribute(module, torch.optim.SGD(module.parameters(), lr=0.5), plan, ema=0.7)
    with pytest.raises(ShardwiseError, match="not captured yet"), model.averaged():
        pass
    looped(model, optimizer, None)
    right, own = average.module.state_dict(), plain.state_dict()
    with model.averaged():
        assert measured(model) == pytest.approx(measured(average.module), rel=1e-10)
        state = model.state_dict()
    assert measured(model) == pytest.approx(measured(plain), rel=1e-10)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, own[name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(state[name], right[name], rtol=1e-10, atol=1e-12)
    with pytest.raises(ZeroDivisionError), model.averaged():
        _ = measured(model) / 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, own[name], rtol=1e-10, atol=1e-12)
    optimizer.zero_grad()
    functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    with pytest.raises(ShardwiseError, match=r"averaged\(\) after loss.backward\(\) without"), model.averaged():
        pass
