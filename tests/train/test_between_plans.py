"""Checkpoints go from any plan to any other: training goes on as if one device had never stopped."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_resume import Rows
from torch import Tensor

import zoo
from settings import Setting, drawn
from shardwise.checkpoint import Checkpoint, latest
from shardwise.core.optim import OptimizerChoice
from shardwise.core.schedules import traits
from shardwise.lower.compiled import Compiled
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.trainer import Trainer

BATCH, LENGTH, WORDS = 5, 12, 11
STEPS, STOP = 5, 2
CHOICE = OptimizerChoice("adamw", lr=1e-2, schedule="cosine", warmup_steps=2, total_steps=STEPS)


class Trained(NamedTuple):
    """The loss of each step, and all that is saved after the last."""

    losses: list[float]
    saved: dict[str, Tensor]


@functools.cache
def alone(model: str) -> Compiled:
    """On one device; its capture serves all plans."""
    rows = [Rows(17, LENGTH)[i] for i in range(2)]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return Compiled(zoo.make(model, WORDS).module.double().train(), Setting(model).plan, batch)


def trained_by_ranks(folder: Path, made: Compiled, stop: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Go on from the folder's checkpoint, if it has one, to step ``stop`` and save: each rank's losses, and what is
    saved."""

    def rank(comm: ThreadCommunicator) -> list[float]:
        trainer, losses = Trainer(made, CHOICE, made.plan, {}, clip_norm=0.5, seed=3, comm=comm), []
        with trainer.loader(Rows(17, LENGTH), BATCH) as loader, Checkpoints(trainer, folder) as checkpoints:
            checkpoints.restore(loader)
            while trainer.engine.step_index < stop:
                losses.append(float(trainer.step(next(loader)).loss))
            checkpoints.save(loader)
        return losses

    losses = run_ranks(made.plan.mesh, rank, timeout=60)
    saved = Checkpoint.open(latest(folder))  # type: ignore[arg-type]
    return losses, {name: saved.read(name) for name in saved.tensors}


def trained(folder: Path, setting: Setting, stop: int) -> Trained:
    """The same of ranks that have all the same losses."""
    losses, saved = trained_by_ranks(folder, alone(setting.model).under(setting.plan), stop)
    assert all(other == losses[0] for other in losses), "ranks disagree on a loss"
    return Trained(losses[0], saved)


@functools.cache
def truth(model: str, base: Path) -> Trained:
    return trained(base / model, Setting(model), STEPS)


def difference(ours: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of a tensor, and its name."""
    assert ours.keys() == right.keys()
    found = {n: float((ours[n] - x).double().norm() / x.double().norm().clamp(min=1e-30)) for n, x in right.items()}
    assert all(torch.tensor(list(found.values())).isfinite())
    return max((error, name) for name, error in found.items())


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


def synchronous(setting: Setting) -> bool:
    return not traits(setting.pp[1]).asynchronous


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize("seed", range(60))
def test_between_any_two_plans(seed: int, tmp_path: Path, base: Path) -> None:
    rng = random.Random(seed)
    first = drawn(rng, synchronous, precision="fp64")
    second = drawn(rng, synchronous, precision="fp64", model=first.model)
    right = truth(first.model, base)
    before = trained(tmp_path, first, STOP)
    after = trained(tmp_path, second, STEPS)
    error, name = difference(after.saved, right.saved)
    print(f"\nseed {seed}: from {first} to {second}: {name} is off by {error:.1e}")
    assert error <= 1e-12, (error, name)
    assert before.losses + after.losses == pytest.approx(right.losses, rel=1e-12, abs=0)
