"""Runs with validation data of their own, metrics, a best checkpoint and early stopping."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.checkpoint.folder import checkpoints, step_of
from shardwise.checkpoint.weights import read_weights
from shardwise.config import build_data, load_config
from shardwise.config.hardware import Hardware
from shardwise.core.errors import ConfigError
from shardwise.core.metrics import Watch
from shardwise.data.split import split
from shardwise.launch.validation import Validation

TIMEOUT = 120


def shardwise(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == code, done.stderr + done.stdout
    return done


SCRIPT = """
import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def data(size=45, seed=0):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=made)
    return [{"x": x[i], "labels": x[i, :3].argmax()} for i in range(size)]


def other():
    return [{"y": torch.zeros(4)}]


def margin(outputs, batch):
    top = outputs.logits.topk(2).values
    return {"margin": ((top[:, 0] - top[:, 1]).sum(), len(top))}


def accuracy_of_torchmetrics():
    import torchmetrics

    return torchmetrics.Accuracy(task="multiclass", num_classes=3)


def number():
    return 3


def broken(outputs, batch):
    raise ValueError("broken metric")
"""
WATCH = """
import json
from pathlib import Path


class Watch:
    def on_evaluation(self, values):
        with (Path(__file__).parent / "seen.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\\n")
"""


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(SCRIPT)
    return [
        f"model.factory={tmp_path / 'mine.py'}:Net", f"data.factory={tmp_path / 'mine.py'}:data", "data.batch_size=8",
        "train.devices=2", "train.threads=1", f"train.run_dir={tmp_path / 'run'}", "optimizer.lr=0.05",
        "optimizer.schedule=constant", "train.trace_steps=[]",
    ]  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [True, False])
def test_evaluations_are_of_the_average_unless_they_are_not(base: list[str], tmp_path: Path, averaged: bool) -> None:
    """The last evaluation is the loss of what an export with or without --ema has."""
    mine, run = tmp_path / "mine.py", tmp_path / "run"
    shardwise(
        "train", *base, f"validation.factory={mine}:data", "validation.arguments={size = 11, seed = 3}",
        "train.steps=6", "parallel.zero=1", "optimizer.ema=0.8", *([] if averaged else ["validation.ema=false"]),
    )  # fmt: skip
    shardwise("checkpoint", "export", str(run), str(tmp_path / "out"), *(["--ema"] if averaged else []))
    weights = read_weights(tmp_path / "out")
    made: dict[str, Any] = {}
    exec(SCRIPT, made)
    net = made["Net"]()
    net.load_state_dict({name: weights.read(name) for name in weights.names})
    samples = made["data"](11, 3)
    batch = {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) for name in samples[0]}
    found = lines(run / "evaluations.jsonl")[-1]
    assert found["step"] == 6
    assert found["validation_loss"] == pytest.approx(net(**batch)["loss"].item(), rel=1e-5)


@pytest.mark.slow
def test_the_best_checkpoint_stays_and_training_stops_early(base: list[str], tmp_path: Path) -> None:
    """The margin grows while the model learns: less of it is best early, and then never again."""
    mine = tmp_path / "mine.py"
    metrics = f'["accuracy", "f1", "{mine}:margin", "{mine}:accuracy_of_torchmetrics"]'
    pytest.importorskip("torchmetrics")
    command = [
        "train", *base, f"validation.factory={mine}:data", "validation.arguments={size = 11, seed = 3}",
        f"validation.metrics={metrics}", "validation.every=3", "train.steps=60", "checkpoint.best=margin",
        "checkpoint.goal=min", "checkpoint.every=3", "checkpoint.keep_last=1", "validation.patience=4",
        "validation.goal=min", "--json",
    ]  # fmt: skip
    result = json.loads(shardwise(*command).stdout)
    run = tmp_path / "run"
    found = lines(run / "evaluations.jsonl")
    margins = [one["margin"] for one in found]
    at = margins.index(min(margins))
    best_step, last = 3 * at + 3, 3 * at + 15
    assert [one["step"] for one in found] == [*range(3, last + 1, 3)]
    assert all(one["rows"] == 11 for one in found)
    assert all(abs(one["accuracy"] - one["accuracy_of_torchmetrics"]) < 1e-6 for one in found)
    assert result["stopped_early"] == {
        "metric": "margin", "best": margins[at], "best_step": best_step, "step": last, "evaluations": 4,
    }  # fmt: skip
    best = json.loads((run / "best.json").read_text())
    assert best == result["best"]
    assert (best["step"], best["metric"], best["value"]) == (best_step, "margin", margins[at])
    assert [step_of(path) for path in checkpoints(run / "checkpoints")] == [best_step, last]
    assert (run / best["checkpoint"] / "manifest.json").exists()

    # The weights after the last step give the numbers of the last evaluation.
    again = json.loads(shardwise("evaluate", str(run), "--json").stdout)
    assert again["step"] == last
    assert abs(again["margin"] - found[-1]["margin"]) < 1e-6
    first = json.loads(shardwise("evaluate", str(run), "--checkpoint", "best", "train.devices=1", "--json").stdout)
    assert first["step"] == best_step
    assert abs(first["margin"] - margins[at]) < 1e-6
    whole = shardwise("evaluate", str(run), "validation.arguments={size = 5}", 'validation.metrics=["top-2"]')
    assert "top-2" in whole.stdout
    assert "5 rows" in whole.stdout

    # The same command shows the result of a run that has stopped early.
    same = json.loads(shardwise(*command).stdout)
    assert same["already_finished"] and same["stopped_early"] == result["stopped_early"]
    assert [step_of(path) for path in checkpoints(run / "checkpoints")] == [best_step, last]
    told = shardwise(*command[:-1]).stdout
    assert "A greater validation.patience goes on from there" in " ".join(told.split())
    assert "stopped early" in told

    # With more patience the finished run goes on, and remembers its evaluations; a kill before it had written down the
    # checkpoint of the best one, after which the one before is removed, does no harm.
    (run / "best.json").write_text(json.dumps({**best, "step": 3, "checkpoint": "checkpoints/step_00000003"}))
    more = [word.replace("patience=4", "patience=6") for word in command]
    result = json.loads(shardwise(*more).stdout)
    assert result["stopped_early"]["step"] == last + 6
    assert [one["step"] for one in lines(run / "evaluations.jsonl")] == [*range(3, last + 7, 3)]
    assert [step_of(path) for path in checkpoints(run / "checkpoints")] == [best_step, last + 6]
    assert json.loads((run / "best.json").read_text()) == best == result["best"]


@pytest.mark.slow
def test_another_run_in_the_folder_leaves_nothing_to_the_next(base: list[str], tmp_path: Path) -> None:
    """Neither its evaluations, of which the best would end the new run at once, nor its best checkpoint."""
    mine, run = tmp_path / "mine.py", tmp_path / "run"
    (tmp_path / "watch.py").write_text(WATCH)
    command = [
        "train", *base, f"validation.factory={mine}:data", "validation.every=2", "validation.patience=2",
        "checkpoint.best=accuracy", 'validation.metrics=["accuracy"]', "train.steps=4", "checkpoint.every=0", "--json",
    ]  # fmt: skip
    shardwise(*command)
    before = json.loads((run / "best.json").read_text())
    evaluations = (run / "evaluations.jsonl").read_text()
    again = [*command, "train.resume=never", "train.seed=5", f'train.callbacks=["{tmp_path / "watch.py"}:Watch"]']
    failed = shardwise(*again, f'validation.metrics=["accuracy", "{mine}:broken"]', code=1)
    assert "broken metric" in failed.stdout
    assert json.loads((run / "best.json").read_text()) == before
    assert (run / "evaluations.jsonl").read_text() == evaluations
    result = json.loads(shardwise(*again).stdout)
    assert json.loads((tmp_path / "run-1" / "best.json").read_text()) == before
    found = lines(run / "evaluations.jsonl")
    assert [one["step"] for one in found] == [2, 4]
    assert result["best"]["step"] in (2, 4)
    assert result["evaluation"] == found[-1]
    seen = lines(tmp_path / "seen.jsonl")
    assert seen == found  # all metrics, as the file has them


def test_a_share_of_a_dataset(base: list[str]) -> None:
    config = load_config(None, [*base, "validation.share=0.2"], hardware=Hardware(cores=2))
    data = build_data(config)
    assert config.validation.every == 60
    assert (len(data.train), len(data.validation)) == (36, 9)
    rows = torch.stack(
        [one["x"] for part in (data.train, data.validation) for one in (part[i] for i in range(len(part)))]
    )
    assert len({tuple(row.tolist()) for row in rows}) == 45
    again = build_data(load_config(None, [*base, "validation.share=0.2", "train.seed=5"], hardware=Hardware(cores=2)))
    assert all(torch.equal(data.validation[i]["x"], again.validation[i]["x"]) for i in range(9))
    assert data.digest != build_data(load_config(None, base, hardware=Hardware(cores=2))).digest


def test_a_share_is_a_permutation() -> None:
    class Numbers(list[Any]):
        def read_rows(self, indices: Any) -> Any:
            return {"x": torch.tensor([self[i]["x"] for i in indices])}

    numbers = Numbers({"x": i} for i in range(1000))
    train, apart = split(numbers, 0.25)
    each = apart.read_rows(range(250))["x"].tolist()  # type: ignore[attr-defined]
    assert each == [apart[i]["x"] for i in range(250)]
    assert sorted(each + [train[i]["x"] for i in range(750)]) == list(range(1000))
    assert abs(sum(each) / 250 - 499.5) < 60  # drawn from everywhere
    with pytest.raises(IndexError):
        apart[250]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("validation.share=0.001", "of 45 samples it leaves none to evaluate on; legal: from 0.022"),
        ("validation.share=0.999", "it leaves none to train on"),
        (
            "validation.factory=MINE:other",
            "validation: its samples have the fields y; legal: those of the training data",
        ),
        ("validation.factory=MINE:nothing", "has no nothing"),
        ("validation.factory=MINE:number", "it returned an object of type int"),
    ],
)
def test_wrong_data_is_refused(base: list[str], tmp_path: Path, override: str, words: str) -> None:
    config = load_config(None, [*base, override.replace("MINE", str(tmp_path / "mine.py"))], hardware=Hardware(cores=2))
    with pytest.raises(ConfigError) as caught:
        build_data(config)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "words"),
    [("nothing", "has no nothing"), ("number", "it returned an object of type int; legal: an object")],
)
def test_wrong_metrics_are_refused_before_anything_starts(
    base: list[str], tmp_path: Path, metric: str, words: str
) -> None:
    mine = tmp_path / "mine.py"
    done = shardwise(
        "train", *base, f"validation.factory={mine}:data", f'validation.metrics=["{mine}:{metric}"]', code=2
    )
    assert words in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_name_that_no_metric_has(base: list[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    done = shardwise(
        "train", *base, f"validation.factory={mine}:data", f'validation.metrics=["{mine}:margin"]',
        "checkpoint.best=marg", "train.steps=4", code=2,
    )  # fmt: skip
    assert 'checkpoint.best = "marg": no evaluation has it; legal: validation_loss, margin' in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not lines(tmp_path / "run" / "metrics.jsonl")


def test_which_evaluation_is_best() -> None:
    more, less = Watch("a", "max"), Watch("a", "min")
    history = [{"a": None}, {"a": 2.0}, {"a": 3.0}, {}, {"a": 3.0}, {"a": 1.0}]
    assert (more.best(history), less.best(history)) == (2, 5)
    assert (more.without_gain(history), less.without_gain(history)) == (3, 0)
    assert more.best([{}, {"a": None}]) is None
    assert more.without_gain([{}, {"a": None}]) == 2


def test_the_best_on_disk_stays_until_a_better_one_is_there(tmp_path: Path) -> None:
    """A save may fail, on a full disk."""
    kept: list[set[int]] = []
    run: Any = SimpleNamespace(folder=tmp_path, trainer=SimpleNamespace(comm=SimpleNamespace(rank=0)))
    saving: Any = SimpleNamespace(keep=lambda *steps: kept.append(set(steps) - {-1}))
    validation = Validation(run, [], Watch("a", "min"), None)

    def evaluated(step: int, value: float, on_disk: bool) -> bool:
        validation.history.append({"step": step, "a": value})
        better = validation.bettered(saving)
        if on_disk:
            folder = tmp_path / "checkpoints" / f"step_{step:08d}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
            validation.saved(step)
        return better

    assert evaluated(3, 1.0, on_disk=True) and kept[-1] == {3}
    assert evaluated(6, 0.5, on_disk=False) and kept[-1] == {3, 6}
    assert not evaluated(9, 0.7, on_disk=True) and kept[-1] == {3, 6}
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 3
    assert evaluated(12, 0.2, on_disk=True) and kept[-1] == {3, 12}
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 12
    assert not evaluated(15, 0.3, on_disk=True) and kept[-1] == {12}
