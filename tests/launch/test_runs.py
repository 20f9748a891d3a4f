"""What a run tells, and whom: callbacks, loggers, samples, speed; one rank in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import Config, Hardware, build_data, load_config
from shardwise.data.order import sample_order
from shardwise.launch.begin import begun, stage
from shardwise.launch.folder import look
from shardwise.launch.ready import Surroundings
from shardwise.launch.training import train
from shardwise.runtime.progress import Progress, record_path
from shardwise.train.errors import NonFiniteError

WATCH = """
import json
from pathlib import Path

class Watch:
    def __init__(self):
        self.file = Path(__file__).with_name("seen.jsonl").open("w")
    def note(self, hook, values):
        self.file.write(json.dumps([hook, values]) + "\\n")
        self.file.flush()
    def on_start(self, values): self.note("on_start", values)
    def on_step(self, values): self.note("on_step", values)
    def on_evaluation(self, values): self.note("on_evaluation", values)
    def on_sample(self, values): self.note("on_sample", values)
    def on_checkpoint(self, values): self.note("on_checkpoint", values)
    def on_end(self, values): self.note("on_end", values)

def fails(metrics):
    if metrics["step"] == 1:
        raise RuntimeError("enough")
"""
IMAGES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
    def forward(self, image, label):
        x = torch.relu(self.conv(image)).mean((2, 3))
        return nn.functional.cross_entropy(self.last(x), label)

class Data:
    def __init__(self, bad=-1):
        self.bad = bad
    def __len__(self):
        return 10
    def __getitem__(self, index):
        value = float("inf") if index == self.bad else index / 10
        return {"image": torch.full((3, 5, 5), value), "label": torch.tensor(index % 2)}
"""


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Training sets threads and float32 kernels of the process."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def run(folder: Path, *overrides: str, told: list[str] | None = None) -> Config:
    """One rank that trains in ``folder``, as `shardwise train` would prepare it."""
    config = load_config(None, ["train.devices=1", f"train.run_dir={folder}", *overrides], hardware=Hardware(cores=1))
    if config.train.epochs is not None:
        config = config.for_samples(len(build_data(config).train))
    folder.mkdir(exist_ok=True)
    stage(folder, config.resolved(), anew=look(config).checkpoint is None)
    warn = print if told is None else told.append
    train(config, Surroundings(Progress(record_path(folder, 0)), warn=warn))
    return config


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def images(tmp_path: Path) -> list[str]:
    (tmp_path / "images.py").write_text(IMAGES)
    return [f"model.factory={tmp_path}/images.py:Net", f"data.factory={tmp_path}/images.py:Data", "data.batch_size=4"]


@pytest.mark.slow
def test_callbacks_see_everything_and_one_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(1, 256)) * 16)
    (tmp_path / "watch.py").write_text(WATCH)
    folder, told = tmp_path / "run", list[str]()
    run(
        folder, "model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=8", "data.batch_size=4",
        f"data.source={tmp_path / 'text.txt'}", "validation.share=0", "train.steps=4", "checkpoint.every=2",
        "train.sample_every=2", 'train.sample_prompt="To be"', "train.loggers=['tensorboard']",
        f"train.callbacks=['{tmp_path}/watch.py:fails', '{tmp_path}/watch.py:Watch']", told=told,
    )  # fmt: skip
    seen = lines(tmp_path / "seen.jsonl")
    hooks = [hook for hook, _ in seen]
    assert hooks[0] == "on_start" and hooks[-1] == "on_end" and hooks.count("on_checkpoint") == 2
    start, end = seen[0][1], seen[-1][1]
    assert (start["steps"], start["first_step"], start["ranks"]) == (4, 0, 1) and start["config"]["model"][
        "width"
    ] == 16
    metrics = lines(folder / "metrics.jsonl")
    assert [values for hook, values in seen if hook == "on_step"] == metrics and len(metrics) == 4
    assert [values["step"] for hook, values in seen if hook == "on_checkpoint"] == [2, 4]
    assert end["status"] == "finished" and end["loss_last"] == metrics[-1]["loss"]
    (failure,) = [line for line in told if "watch.py:fails" in line]
    assert "RuntimeError: enough (" in failure and "watch.py:20, in fails); it is not called again" in failure
    assert [values["text"][:5] for hook, values in seen if hook == "on_sample"] == ["To be"]
    assert (folder / "sample.txt").read_text().startswith("To be")
    assert len(list((folder / "tensorboard").glob("events*"))) == 1


def test_data_that_is_no_text_has_samples_and_epochs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = run(folder, *images(tmp_path), "train.epochs=2")
    assert config.train.steps == 6  # of 4, 4 and 2 rows
    metrics = lines(folder / "metrics.jsonl")
    assert len(metrics) == 6 and not any("tokens_per_second" in one for one in metrics)
    rows = [one["samples_per_second"] * one["step_seconds"] for one in metrics]
    assert rows == pytest.approx([4, 4, 2, 4, 4, 2])
    forward = 2 * (3 * 9 * 4 * 9 + 4 * 2)  # multiply-adds of the convolution and the linear layer, for a row
    least, most = 2 * forward / 1e12, 3 * forward / 1e12  # images need no gradient
    for one, count in zip(metrics, rows, strict=True):
        assert least < one["tflops_per_second"] * one["step_seconds"] / count <= most * (1 + 1e-9)
        assert 0 < one["mfu"] < 1
    result = json.loads((folder / "result.json").read_text())
    assert result["samples_per_second"] > 0 and result["steps"] == 6 and 0 < result["mfu"] < 1
    assert look(config).finished


def test_a_first_step_that_fails_leaves_an_earlier_run_whole(tmp_path: Path) -> None:
    """What a run writes before that is in a folder of its own, the weights of a step that is not finite among it."""
    folder = tmp_path / "run"
    given = [*images(tmp_path), "train.steps=2"]
    run(folder, *given)
    names = ("metrics.jsonl", "weights.safetensors", "result.json", "config.toml", "plan.toml", "about.json")
    before = {name: (folder / name).read_bytes() for name in names}
    (tmp_path / "watch.py").write_text(WATCH)
    bad = sample_order(0, 0, 0, 4, 10)[0]  # in the first batch
    with pytest.raises(NonFiniteError):
        run(
            folder, *given, f"data.arguments={{bad={bad}}}", "train.resume=never",
            f"train.callbacks=['{tmp_path}/watch.py:Watch']",
        )  # fmt: skip
    assert {name: (folder / name).read_bytes() for name in names} == before and not begun(folder)
    assert (folder / "starting" / "weights.safetensors").exists() and not (tmp_path / "run-1").exists()
    seen = lines(tmp_path / "seen.jsonl")
    assert [hook for hook, _ in seen] == ["on_end"] and seen[0][1]["status"] == "failed"
    assert "step 0" in seen[0][1]["error"]
