"""What surrounds the steps of ``shardwise train``: evaluation, records, exported weights, runs that start from them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import checkpoints

ENVIRONMENT = {**os.environ, "COLUMNS": "80"}
LLAMA = [
    "model.transformers=LlamaForCausalLM",
    "model.config={vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, "
    "num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=true}",
]  # fmt: skip
TINY = ["data.sequence_length=16", "data.batch_size=4", "train.devices=2"]


def shardwise(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=ENVIRONMENT,
        check=False,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A hundred documents, some of them for validation."""
    folder = tmp_path_factory.mktemp("text")
    rows = [
        json.dumps({"text": f"{number} bottles of beer on the wall, {number} bottles of beer. " * 3})
        for number in range(100)
    ]
    (folder / "songs.jsonl").write_text("\n".join(rows))
    return f"data.source={folder / 'songs.jsonl'}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "run"
    done = shardwise(
        "train", *LLAMA, *TINY, text, "validation.share=0.1", f"train.run_dir={folder}", "train.steps=12",
        "validation.every=5",
        "train.loggers=['tensorboard']", "data.attention=document",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "after step 5: validation loss" in done.stdout and "perplexity" in done.stdout
    return folder


@pytest.mark.slow
def test_evaluations(llama: Path) -> None:
    found = lines(llama / "evaluations.jsonl")
    assert [one["step"] for one in found] == [5, 10, 12]
    assert all(one["perplexity"] == pytest.approx(math.exp(one["validation_loss"])) for one in found)
    assert found[-1]["validation_loss"] < found[0]["validation_loss"]
    result = json.loads((llama / "result.json").read_text())
    assert result["validation_loss"] == found[-1]["validation_loss"]


@pytest.mark.slow
def test_tensorboard_has_the_metrics(llama: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(llama / "tensorboard"))
    events.Reload()
    losses = [(one.step, one.value) for one in events.Scalars("loss")]
    assert losses == [(one["step"], pytest.approx(one["loss"])) for one in lines(llama / "metrics.jsonl")]
    assert [one.step for one in events.Scalars("validation_loss")] == [5, 10, 12]


@pytest.mark.slow
def test_exported_weights_load_and_start_a_run(llama: Path, text: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    last = checkpoints(llama / "checkpoints")[-1]
    done = shardwise("checkpoint", "export", str(last), str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    from safetensors.torch import load_file

    ours = load_file(llama / "weights.safetensors")
    theirs = model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    again = shardwise(
        "train", *LLAMA, *TINY, text, "validation.share=0.1", f"train.run_dir={tmp_path / 'run'}", "train.steps=1",
        f"model.weights={tmp_path / 'model'}", "data.attention=document", "optimizer.warmup_steps=0",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    fresh, trained = lines(llama / "metrics.jsonl")[0]["loss"], lines(tmp_path / "run" / "metrics.jsonl")[0]["loss"]
    assert trained < fresh - 0.3
    wrong = shardwise("train", *TINY, text, f"model.weights={tmp_path / 'model'}", f"train.run_dir={tmp_path / 'no'}")
    assert wrong.returncode == 2 and "model.weights" in wrong.stderr, wrong.stderr


@pytest.mark.slow
def test_plot_of_a_run(llama: Path, tmp_path: Path) -> None:
    done = shardwise("plot", str(llama), "--out", str(tmp_path / "curves.png"), "--json")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert run["steps"] == 12 and run["validation_loss"] is not None
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_sigterm_under_torchrun(tmp_path: Path, text: str) -> None:
    """torchrun passes the signal on; the ranks agree on a step, save, and end."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardwise",
        "train",
        "model.width=16", "model.layers=1", "model.heads=2", *TINY, text, "train.steps=100000",
        f"train.run_dir={tmp_path}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 60
        while (
            not (tmp_path / "metrics.jsonl").exists() or len((tmp_path / "metrics.jsonl").read_text().splitlines()) < 5
        ):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    (last,) = checkpoints(tmp_path / "checkpoints")
    done = len(lines(tmp_path / "metrics.jsonl"))
    assert last.name == f"step_{done:08d}", output
    assert f"stopped after {done} steps, with a checkpoint" in " ".join(output.split())


FROZEN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))
        for layer in self.layers[:6]:
            layer.requires_grad_(False)
    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - y).square().mean()

class Points:
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return {"x": torch.full((8,), i / 16), "y": torch.ones(8)}
"""


@pytest.mark.slow
def test_checkpoints_of_a_model_with_frozen_parameters(tmp_path: Path) -> None:
    """Ranks are processes with hash seeds of their own, and must share the work alike."""
    (tmp_path / "frozen.py").write_text(FROZEN)
    done = shardwise(
        "train", f"model.factory={tmp_path / 'frozen.py'}:Net", f"data.factory={tmp_path / 'frozen.py'}:Points",
        "data.batch_size=4",
        "train.devices=2", "train.steps=4", "checkpoint.every=2", f"train.run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert done.returncode == 0 and "not saved" not in done.stdout, done.stdout
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000002", "step_00000004"]


SCRIPT = """
import os, torch
from shardwise import Checkpoints, Mesh, OptimizerChoice, Plan, Trainer
from frozen import Net, Points
points = Points()
example = {name: torch.stack([points[i][name] for i in range(4)]) for name in points[0]}
with Trainer(Net(), OptimizerChoice("sgd", lr=1e-2), Plan.of(Mesh.of(dp=2)), example) as trainer:
    loader = trainer.loader(points)
    for number in range(3):
        with Checkpoints(trainer, f"FOLDER/{number}") as kept:
            trainer.step(next(loader))
            kept.save(loader)
    last = Checkpoints(trainer, "FOLDER/last")
    last.save(loader)  # and nobody closes it
os.chdir("/")
raise ValueError("from another folder")
"""


@pytest.mark.slow
def test_checkpoints_in_a_users_script(tmp_path: Path) -> None:
    """Several after each other, one left open, and an error after a change of folder."""
    (tmp_path / "frozen.py").write_text(FROZEN)
    (tmp_path / "script.py").write_text(SCRIPT.replace("FOLDER", str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "launch", "--ranks", "2", "--run-dir", "run", "script.py"],
        capture_output=True, text=True, timeout=100, env=ENVIRONMENT, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1 and "ValueError: from another folder" in done.stderr, done.stderr
    for name, step in (("0", 1), ("1", 2), ("2", 3), ("last", 3)):
        assert [path.name for path in checkpoints(tmp_path / name)] == [f"step_{step:08d}"], done.stdout


@pytest.mark.full
def test_a_tokenizer_goes_with_the_export(tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = tmp_path / "tokenizer.json"
    made = shardwise("tokenizer", "train", text.partition("=")[2], "--out", str(tokenizer), "--vocabulary", "300")
    assert made.returncode == 0, made.stderr
    llama = [LLAMA[0], LLAMA[1].replace("vocab_size=256", "vocab_size=512")]
    done = shardwise(
        "train", *llama, *TINY, text, f"data.tokenizer={tokenizer}", f"train.run_dir={tmp_path / 'run'}",
        "train.steps=2",
        "validation.share=0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shardwise("checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "model")).returncode == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (
        loaded.eos_token == "<|endoftext|>" and loaded.decode(loaded.encode("9 bottles of beer")) == "9 bottles of beer"
    )
