"""An error is told before anything waits for other ranks, and ranks wait for rank 0's own work with patience."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.checkpoints import Checkpoints
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.launch import training
from shardwise.parallel.data import data_parallel
from shardwise.runtime.compiled import Compiled
from shardwise.runtime.connect import LoneCommunicator
from shardwise.runtime.progress import Progress, record_path
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.trainer import Trainer

GPU = torch.device("cuda", 0)


class Pending(LoneCommunicator):
    """Of a device on which something is pending that never ends: to leave would wait for it."""

    def close(self) -> None:
        raise AssertionError("closed while collectives are pending")


class Failure(Exception):
    pass


def config(folder: Path) -> Any:
    from shardwise.config import load_config

    return load_config(None, [f"train.run_dir={folder}", "parallel.dp=1"])


def test_a_rank_that_fails_does_not_wait_for_what_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> Any:
        raise Failure

    monkeypatch.setattr(training, "connect", lambda mesh, **_: Pending(mesh, 0, GPU))
    monkeypatch.setattr(training, "_build", build)
    side = SimpleNamespace(progress=Progress(record_path(tmp_path, 0)))
    with pytest.raises(Failure):
        training.train(config(tmp_path), side)  # type: ignore[arg-type]


def test_on_a_cpu_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Closing(LoneCommunicator):
        def close(self) -> None:
            closed.append(1)

    def build(*_: Any) -> Any:
        raise Failure

    monkeypatch.setattr(training, "connect", lambda mesh, **_: Closing(mesh, 0, torch.device("cpu")))
    monkeypatch.setattr(training, "_build", build)
    with pytest.raises(Failure):
        training.train(config(tmp_path), SimpleNamespace(progress=Progress(record_path(tmp_path, 0))))  # type: ignore[arg-type]
    assert closed == [1]


def net(plan: Plan) -> Compiled:
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().mean()

    return Compiled(Net(), plan, {"x": torch.ones(4, 4)})


def test_all_ranks_hear_that_rank_0_cannot_write(tmp_path: Path) -> None:
    """Nobody waits in a gather that rank 0 does not come to."""
    (tmp_path / "file").write_text("no folder")
    plan = data_parallel(Plan(), 3)
    made = net(plan)

    def rank(comm: ThreadCommunicator) -> str:
        trainer = Trainer(made, OptimizerChoice("sgd", lr=0.1), plan, made.example, comm=comm)
        with pytest.raises(ConfigError) as caught:
            Checkpoints(trainer, tmp_path / "file")
        return str(caught.value)

    found = run_ranks(plan.mesh, rank, timeout=20)
    assert len(found) == 3 and all("cannot be written" in one for one in found)
