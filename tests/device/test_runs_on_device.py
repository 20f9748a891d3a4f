"""Runs on a device: the host does not wait in a step, launches that block change no number, and a killed run goes on as
if it had not been.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ten_steps import batch, trainer

import shardwise
from shardwise.backend import Backend
from waiting import no_waits

PATHS = {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
TINY = [
    "model.width=16", "model.layers=1", "model.heads=2", "model.dropout=0.1", "data.sequence_length=16",
    "data.batch_size=4", "validation.share=0",
    "train.devices=1", "train.threads=1", "train.steps=300", "checkpoint.every=20",
]  # fmt: skip
SECONDS = 120.0
MOSTLY_GPU = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.full), pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
"""For what takes long, and has a near relative on the CPU among the other tests."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"recompute": "selective"}, {"recompute": "full"}, {"precision": "fp32", "microbatches": 1}]
)
def test_the_host_does_not_wait_in_a_step(changes: dict[str, object], device: torch.device) -> None:
    one = trainer(device, **changes)
    batches = [batch(step, one.plan.microbatches, device) for step in range(6)]
    for given in batches[:2]:  # the first make what stays
        one.step(given)
    Backend.of(device).synchronize(device)
    with no_waits(device):
        results = [one.step(given) for given in batches[2:]]
    losses = [float(result.loss) for result in results]
    assert all(0 < loss < 20 for loss in losses)
    one.close()


@pytest.mark.gpu
def test_a_wait_would_be_found() -> None:
    device = Backend.here().device(0)
    if device.type != "cuda":
        pytest.skip("torch tells of waits on CUDA and ROCm only")
    value = torch.ones(3, device=device)
    with no_waits(device), pytest.raises(RuntimeError, match="synchroniz"):
        float(value.sum())


def losses(device: torch.device, blocking: str) -> list[str]:
    """Of ten steps in a process of its own."""
    script = Path(__file__).with_name("ten_steps.py")
    more = {"CUDA_LAUNCH_BLOCKING": blocking, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, script, device.type],
        env={**os.environ, **PATHS, **more},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@MOSTLY_GPU
def test_launches_that_block_change_no_number(device: torch.device) -> None:
    """Were something read before it is there, waiting after each launch would heal it."""
    free, blocking = (losses(device, flag) for flag in "01")
    assert len(set(free)) == 10 and free == blocking


class Run:
    """A ``shardwise train`` in a process group of its own."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder
        command = [
            sys.executable,
            "-m",
            "shardwise",
            "train",
            *TINY,
            f"data.source={source}",
            f"train.run_dir={folder}",
        ]
        self.process = subprocess.Popen(
            command, env={**os.environ, **PATHS, "COLUMNS": "80"}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def metrics(self) -> list[dict[str, float]]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def curve(self) -> list[tuple[float, float, float]]:
        return [(one["step"], one["loss"], one["grad_norm"]) for one in self.metrics()]

    def wait_for_checkpoint(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not any((self.folder / "checkpoints").glob("step_*")):
            assert self.process.poll() is None and time.monotonic() < deadline, self.kill()
            time.sleep(0.02)

    def kill(self) -> str:
        """SIGKILL to the launcher and its rank, as by a power cut; what they had said."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.communicate()[0]

    def end(self) -> str:
        try:
            return self.process.communicate(timeout=SECONDS)[0]
        finally:
            self.kill()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = random.Random(0)
    path.write_text(" ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(3000)))
    return str(path)


@MOSTLY_GPU
def test_a_killed_run_goes_on(device: torch.device, tmp_path: Path, source: str) -> None:
    """On the CPU bit for bit; a GPU's atomic additions may give a gradient other last bits in every run."""
    whole = Run(tmp_path / "whole", source)
    output = whole.end()
    assert whole.process.returncode == 0, output
    killed = Run(tmp_path / "killed", source)
    killed.wait_for_checkpoint()
    killed.kill()
    assert 20 <= len(killed.metrics()) < 300, "it was killed under way"
    again = Run(tmp_path / "killed", source)
    output = again.end()
    assert again.process.returncode == 0, output
    assert json.loads((tmp_path / "killed" / "result.json").read_text())["device"] == device.type
    expected, found = torch.tensor(whole.curve()), torch.tensor(again.curve())
    assert expected[:, 0].tolist() == list(range(300))
    near = 0.0 if device.type == "cpu" else 1e-3
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
