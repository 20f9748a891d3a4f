"""An error is told before anything waits for other ranks, and ranks wait for rank 0's own work with patience."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.backend import Backend
from shardwise.cli import train as train_command
from shardwise.config import Hardware, load_config
from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.launch import training
from shardwise.launch.local import RunFailed, launch_local, run_folder
from shardwise.launch.monitor import read_errors
from shardwise.launch.rank import end_now, record_error
from shardwise.launch.ready import Surroundings
from shardwise.launch.watch import START_TIMEOUT
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.progress import Progress, record_path
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.trainer import Trainer

GPU = torch.device("cuda", 0)


class Pending(AloneCommunicator):
    """Of a device on which something is pending that never ends: to leave would wait for it."""

    def close(self) -> None:
        raise AssertionError("closed while collectives are pending")


class Failure(Exception):
    pass


def config(folder: Path) -> Any:
    return load_config(None, [f"train.run_dir={folder}", "parallel.dp=1"])


def test_a_rank_that_fails_does_not_wait_for_what_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: Any) -> Any:
        raise Failure

    monkeypatch.setattr(training, "connect", lambda mesh, **_: Pending(mesh, 0, GPU))
    monkeypatch.setattr(training, "_build", build)
    side = Surroundings(Progress(record_path(tmp_path, 0)))
    with pytest.raises(Failure):
        training.train(config(tmp_path), side)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "patience"), [("cuda", 600.0), ("cpu", 60.0)])
def test_collectives_of_devices_are_given_longer_than_any_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, patience: float
) -> None:
    """While rank 0 writes a sample, the device of another rank waits for it; the 60 s are what torchrun's ranks would
    have.
    """
    given: list[float] = []

    def connect(mesh: Any, *, timeout: float, **_: Any) -> Any:
        given.append(timeout)
        raise Failure

    monkeypatch.setattr(Backend, "here", staticmethod(lambda: Backend(device)))
    monkeypatch.setattr(training, "connect", connect)
    with pytest.raises(Failure):
        training.train(config(tmp_path), Surroundings(Progress(record_path(tmp_path, 0))), timeout=60.0)  # type: ignore[arg-type]
    assert given == [patience]
    assert device == "cpu" or patience > START_TIMEOUT


def test_on_a_cpu_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Closing(AloneCommunicator):
        def close(self) -> None:
            closed.append(1)

    def build(*_: Any) -> Any:
        raise Failure

    monkeypatch.setattr(training, "connect", lambda mesh, **_: Closing(mesh, 0, torch.device("cpu")))
    monkeypatch.setattr(training, "_build", build)
    with pytest.raises(Failure):
        training.train(config(tmp_path), Surroundings(Progress(record_path(tmp_path, 0))))  # type: ignore[arg-type]
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
    plan = data_parallel(Plan.of(), 3)
    made = net(plan)

    def rank(comm: ThreadCommunicator) -> str:
        trainer = Trainer(made, OptimizerChoice("sgd", lr=0.1), plan, made.example, comm=comm)
        with pytest.raises(ConfigError) as caught:
            Checkpoints(trainer, tmp_path / "file")
        return str(caught.value)

    found = run_ranks(plan.mesh, rank, timeout=20)
    assert len(found) == 3 and all("cannot be written" in one for one in found)


FAILING = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).square().mean()

class Data:
    read = 0
    def __len__(self):
        return 64
    def __getitem__(self, index):
        Data.read += 1
        if Data.read > 30:
            raise KeyError("no such sample")
        return {"x": torch.ones(4)}

def net():
    return Net()

def data():
    return Data()
"""


def test_an_error_is_told_before_leaving_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails within its steps, and whose communicator does not let it go."""
    released, leaving = threading.Event(), threading.Event()

    class Blocking(AloneCommunicator):
        def abort(self) -> None:
            leaving.set()
            released.wait(60)

        def close(self) -> None:
            raise AssertionError("closed after an error")

    monkeypatch.setattr(training, "connect", lambda mesh, **_: Blocking(mesh, 0, torch.device("cpu")))
    (tmp_path / "failing.py").write_text(FAILING)
    chosen = [f"{tmp_path}/failing.py:{name}" for name in ("net", "data")]
    made = load_config(
        None,
        [f"train.run_dir={tmp_path}", "train.devices=1", f"model.factory={chosen[0]}", f"data.factory={chosen[1]}",
               "data.batch_size=4", "train.steps=50"], hardware=Hardware(cores=1),
    )  # fmt: skip
    told: list[tuple[Exception, bool]] = []
    side = Surroundings(Progress(record_path(tmp_path, 0)), failed=lambda error: told.append((error, leaving.is_set())))
    ended: list[BaseException] = []

    def work() -> None:
        try:
            training.train(made, side)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert leaving.wait(60)
    assert [("no such sample" in str(error), late) for error, late in told] == [(True, False)] and not ended
    released.set()
    thread.join(20)
    assert ended and ended[0] is told[0][0]


def test_what_ends_a_run_before_its_steps_is_told_by_the_rank_itself(tmp_path: Path) -> None:
    """A second error of a rank does not take the place of its first."""
    progress = Progress(record_path(tmp_path, 3))
    first = record_error(tmp_path, 3, progress, KeyError("the cause"))
    record_error(tmp_path, 3, progress, RuntimeError("what followed"))
    assert read_errors(tmp_path) == [first] and first.place == "starting" and "the cause" in first.message


def launched(tmp_path: Path, script: str) -> tuple[RunFailed, float]:
    """How two ranks that run a script fail, and after how many seconds."""
    path = tmp_path / "script.py"
    path.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{script}\n")
    begin, command = time.monotonic(), ["-m", "shardwise.launch.rank", str(tmp_path / "run"), str(path)]
    with run_folder(tmp_path / "run"), pytest.raises(RunFailed) as failed:
        launch_local(command, 2, tmp_path / "run", threads=1, hang_timeout=20.0)
    return failed.value, time.monotonic() - begin


def test_a_rank_that_fails_while_others_wait_for_it_is_the_cause(tmp_path: Path) -> None:
    """Over gloo: rank 0 is in a step whose sums rank 1 does not come to."""
    script = """
os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if each were on a host of its own
import torch
from torch import nn
from shardwise import OptimizerChoice, Plan, Trainer
from shardwise.parallel.data import data_parallel
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).square().mean()
example = {"x": torch.ones(4, 4)}
with Trainer(Net(), OptimizerChoice("sgd", lr=0.1), data_parallel(Plan.of(), 2), example) as trainer:
    assert type(trainer.comm).__name__ == "DistributedCommunicator", trainer.comm
    batches = trainer.loader([{"x": torch.ones(4)}] * 64, 4)
    for step in range(4):
        batch = next(batches)
        if step == 2 and rank == 1:
            raise ValueError("the cause")
        trainer.step(batch)
"""
    failure, _ = launched(tmp_path, script)
    assert failure.cause == "other" and failure.rank == 1 and "ValueError: the cause" in str(failure)
    assert time.monotonic() - failure.began < 15


@pytest.mark.slow
def test_ranks_may_finish_a_checkpoint_after_an_error(tmp_path: Path) -> None:
    """The launcher waits longer than for those that are merely stuck."""
    script = f"""
from pathlib import Path
from shardwise.launch.rank import end_now, record_error
from shardwise.runtime.progress import LEAVING, Progress
if rank == 1:
    progress = Progress.from_environment()
    progress.phase(LEAVING)
    record_error(Path({str(tmp_path / "run")!r}), 1, progress, ValueError("the cause"))
    time.sleep(5)
    open({str(tmp_path / "saved")!r}, "w").close()
    os._exit(1)
time.sleep(60)
"""
    failure, seconds = launched(tmp_path, script)
    assert (tmp_path / "saved").exists() and failure.rank == 1 and "the cause" in str(failure)
    assert seconds < 40


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_somebody_else_started_tells_at_once_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    """Under torchrun its error is printed where it happens; with work pending on a device the interpreter is not left
    to wait for that.
    """
    at_exit: list[tuple[Any, ...]] = []

    def fail(config: Any, side: Surroundings, timeout: float) -> bool:
        assert side.failed is not None
        side.failed(ConfigError("no such thing"))
        assert "rank 2 ends: no such thing" in capsys.readouterr().out and not at_exit
        raise ConfigError("no such thing")

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr(training, "train", fail)
    monkeypatch.setattr(train_command, "stop_on", lambda *_, **__: lambda: False)
    monkeypatch.setattr(Backend, "here", staticmethod(lambda: SimpleNamespace(asynchronous=asynchronous)))
    monkeypatch.setattr(train_command.atexit, "register", lambda *what: at_exit.append(what))
    made: Any = SimpleNamespace(train=SimpleNamespace(run_dir=str(tmp_path), hang_timeout=5.0))
    with pytest.raises(ConfigError):
        train_command._train_here(made, None)
    assert at_exit == ([(end_now, 2)] if asynchronous else [])
