"""``shardwise train`` as a user runs it: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from safetensors.torch import load_model

import forked
from shardwise.config import load_config
from shardwise.core.plan import Plan
from shardwise.data.order import sample_order
from shardwise.models import GPT

TROUBLED = Path(__file__).parent / "troubled.py"
TINY = [
    "model.width=16",
    "model.layers=1",
    "model.heads=2",
    "data.sequence_length=16",
    "data.batch_size=4",
    "train.devices=2",
]
ENVIRONMENT = {**os.environ, "COLUMNS": "80"}


def shardwise(*arguments: str, launcher: tuple[str, ...] = ("-m", "shardwise")) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=ENVIRONMENT,
        check=False,
    )


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    return f"data.source={tmp_path / 'text.txt'}"


@pytest.mark.slow
def test_train_on_two_ranks(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "run"
    done = shardwise("train", *TINY, text, "train.steps=12", f"train.run_dir={folder}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(cell_len, lines)) <= 80
    for words in (
        "starting 2 ranks",
        "7.7 K parameters",
        "step 12/12",
        "tokens/s",
        "result",
        "a sample of what the model writes",
        str(folder)[-20:],
    ):
        assert words in done.stdout, words
    assert "Traceback" not in done.stdout + done.stderr

    config = load_config(folder / "config.toml")
    assert (config.train.devices, config.train.threads, config.train.steps) == (
        2,
        max(1, len(forked.CORES) // 2),
        12,
    )
    assert Plan.from_toml((folder / "plan.toml").read_text()).mesh.axis_size("dp") == 2
    assert "BACKWARD u0 m0" in (folder / "program.txt").read_text()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in metrics] == list(range(12))
    keys = ["step", "loss", "grad_norm", "lr", "step_seconds", "tokens_per_second", "peak_memory_bytes"]
    keys += ["tflops_per_second", "mfu"]
    assert list(metrics[0]) == keys and all(one[key] > 0 for one in metrics for key in keys[1:])
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.1
    assert metrics[3]["tokens_per_second"] == pytest.approx(4 * 16 / metrics[3]["step_seconds"])
    result = json.loads((folder / "result.json").read_text())
    assert (result["loss_first"], result["loss_last"], result["ranks"]) == (metrics[0]["loss"], metrics[-1]["loss"], 2)
    assert (folder / "sample.txt").stat().st_size > 100
    assert all(
        (folder / "logs" / f"rank_{rank}.log").read_text().count(f"rank {rank}: ready") == 1 for rank in range(2)
    )

    model = GPT(vocabulary=256, width=16, layers=1, heads=2, context=16)
    load_model(model, folder / "weights.safetensors")
    words = torch.tensor([list(b"to be or not to ")])
    assert model(words, torch.tensor([list(b"o be or not to b")])).item() < metrics[0]["loss"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("hang", "rank 1 hangs at FORWARD u0 m0 over dp of step 3"),
        ("kill", "rank 1 was killed (SIGKILL, by the system if memory ran out) at FORWARD u0 m0 over dp of step 3"),
        ("stop", "rank 1 has been stopped (SIGSTOP) for 3 s at FORWARD u0 m0 over dp of step 3"),
    ],
)
def test_a_rank_in_trouble_ends_the_run(tmp_path: Path, trouble: str, message: str) -> None:
    start = time.monotonic()
    sample = max(sample_order(0, 0, 14, 16, 16))  # among rank 1's rows of step 3
    done = shardwise(
        "train", "train.devices=2", f"model.factory={TROUBLED}:troubled",
        f"model.arguments={{trouble='{trouble}', sample={sample}}}",
        "model.loss_weight=rows",  # so that no trial meets the sample
        f"data.factory={TROUBLED}:points", "data.batch_size=4", "train.steps=1000000", "train.hang_timeout=3",
        f"train.run_dir={tmp_path}", "train.max_restarts=0",
    )  # fmt: skip
    assert time.monotonic() - start < 60  # of which the start takes most
    assert done.returncode == 1
    assert message in done.stderr, done.stderr
    assert f"rank 1 is about to {trouble}" in done.stderr  # the end of its log
    if trouble != "kill":
        assert "rank 0: waits" in done.stderr  # who waits for it
    if trouble == "hang":
        assert "rank 1 is here (most recent call first):" in done.stderr
        assert "troubled.py" in done.stderr and "in forward" in done.stderr  # its Python stack
    assert "Traceback" not in done.stdout + done.stderr
    metrics = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) in (2, 3)  # written one step late


SCRIPT = """
import os, sys, torch
sys.path.insert(0, {folder!r})
from troubled import Points, troubled
from shardwise import Mesh, OptimizerChoice, Plan, Trainer

points = Points()
example = {{name: torch.stack([points[i][name] for i in range(4)]) for name in points[0]}}
with Trainer(
    troubled("hang", {sample}), OptimizerChoice("sgd", lr=1e-3), Plan.of(Mesh.of(dp=2)), example, loss_weight="rows"
) as trainer:
    loader = trainer.loader(points)
    for _ in range(1000):
        trainer.step(next(loader))
"""


@pytest.mark.slow
def test_a_hung_rank_of_a_users_script_is_named(tmp_path: Path) -> None:
    sample = max(sample_order(0, 0, 14, 16, 16))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(TROUBLED).parent), sample=sample))
    start = time.monotonic()
    done = shardwise("launch", "--ranks=2", "--hang-timeout=3", f"--run-dir={tmp_path / 'run'}", str(script))
    assert time.monotonic() - start < 60
    assert done.returncode == 1
    assert "rank 1 hangs at FORWARD u0 m0 over dp of step 3" in done.stderr, done.stderr


def test_a_factory_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\n\nfrom no_such_package import Net\n\n\ndef make(): ...\n")
    done = shardwise(
        "train",
        "train.devices=2",
        f"model.factory={tmp_path / 'broken.py'}:make",
        "train.steps=3",
        f"train.run_dir={tmp_path / 'run'}",
        "--json",
    )
    assert done.returncode == 2, done.stderr
    failure = json.loads(done.stdout)
    assert failure["cause"] == "config" and failure["error"].startswith("model.factory = ")
    assert "No module named 'no_such_package'" in failure["error"] and "broken.py:3" in failure["error"]


@pytest.mark.slow
def test_train_under_torchrun(tmp_path: Path, text: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardwise")
    done = shardwise(
        "train", *TINY, text, "train.steps=3", f"train.run_dir={tmp_path / 'run'}", "--json", launcher=launcher
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert (result["ranks"], result["steps"]) == (2, 3)
