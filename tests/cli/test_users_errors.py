"""An error in the user's code shows its lines and the batch, and none of ours; the log has all of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError, users_lines
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.runtime.alone import AloneCommunicator
from shardwise.train.trainer import Trainer

TIRED = """
import torch
from torch import nn

class Net(nn.Module):
    calls = 0
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x, y):
        if float(x.sum()) > 1e30 and locals():  # so that it is not captured
            return x.sum()
        return self.rest(x, y)
    def rest(self, x, y):
        Net.calls += self.training
        if Net.calls > 30:
            raise ValueError("tired")
        return (self.linear(x) - y).square().mean()

class Data:
    def __len__(self): return 64
    def __getitem__(self, i): return {"x": torch.ones(4), "y": torch.ones(4)}
"""


def test_a_run(tmp_path: Path) -> None:
    path = tmp_path / "tired.py"
    path.write_text(TIRED)
    done = subprocess.run(
        [
            sys.executable, "-m", "shardwise", "train", f"model.factory={path}:Net", f"data.factory={path}:Data",
            "data.batch_size=6", "train.devices=1", "train.steps=100", f"train.run_dir={tmp_path / 'run'}",
            "model.loss_weight=rows", "checkpoint.every=0",
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    error, *lines = done.stderr.splitlines()
    assert error.startswith("error: rank 0 failed at FORWARD") and f"ValueError: tired ({path}:17, in rest)" in error
    assert lines == [
        "in your code (the innermost call last):",
        f"  {path}:13, in forward",
        "    return self.rest(x, y)",
        f"  {path}:17, in rest",
        '    raise ValueError("tired")',
        "the batch on this rank: x (6, 4) float32, y (6, 4) float32",
        f"logs: {tmp_path / 'run' / 'logs'}",
    ]
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "Traceback" in log and "shardwise/runtime/interpreter.py" in log


BROKEN: list[bool] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if float(x.sum()) > 1e30 and locals():
            return x.sum()
        if BROKEN:
            raise KeyError("gone")
        return (self.linear(x) - y).square().mean()


def test_in_a_script_the_exception_has_a_note() -> None:
    BROKEN.clear()
    net = Net()
    fields = {"x": torch.ones(3, 4), "y": torch.ones(3, 4)}
    plan = Plan.of()
    compiled = Compiled(net, plan, fields, loss_weight="rows")
    comm = AloneCommunicator(plan.mesh, 0, torch.device("cpu"))
    trainer = Trainer(compiled, OptimizerChoice("sgd", lr=0.1), plan, fields, comm=comm)
    trainer.step(fields)
    trainer.evaluate_batch(fields)
    BROKEN.append(True)
    for call in (trainer.step, trainer.evaluate_batch):
        with pytest.raises(KeyError, match="gone") as found:
            call(fields)
        assert found.value.__notes__ == ["the batch on this rank: x (3, 4) float32, y (3, 4) float32"]
        assert users_lines(found.value)[-2:] == ['    raise KeyError("gone")', *found.value.__notes__]


def test_a_batch_that_does_not_fit_is_named_with_its_shapes() -> None:
    BROKEN.clear()
    fields = {"x": torch.ones(2, 4), "y": torch.ones(2, 3, dtype=torch.int64)}
    with pytest.raises(
        ConfigError, match=r"x \(2, 4\) float32, y \(2, 3\) int64\): RuntimeError: .*test_users_errors.py"
    ):
        Compiled(Net(), Plan.of(), fields)
