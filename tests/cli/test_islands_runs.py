"""Islands that train apart as a user runs them: real processes, a checkpoint within a round, evaluations, the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_auto import shardwise

RUN = ["model.width=16", "model.layers=2", "model.heads=2", "data.sequence_length=16", "data.batch_size=8",
       "validation.every=4", "validation.share=0.2", "parallel.dp=2", "parallel.dp_replicate=2",
       "parallel.local_steps=3",
       "checkpoint.every=4", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_goes_on_within_a_round(fragments: int, tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"to be or not to be, that is question {number}. " * 40)
    given = [*RUN, f"data.source={tmp_path}/*.txt", f"parallel.local_fragments={fragments}"]
    once, twice = tmp_path / "once", tmp_path / "twice"
    shardwise("train", *given, f"train.run_dir={once}", "train.steps=8")
    for steps in (4, 8):
        shardwise("train", *given, f"train.run_dir={twice}", f"train.steps={steps}")
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (once, twice)]
    assert [(one["step"], one["loss"], one["grad_norm"]) for one in lines[0]] == [
        (one["step"], one["loss"], one["grad_norm"]) for one in lines[1]
    ]
    first, second = (load_file(run / "weights.safetensors") for run in (once, twice))
    assert all(bool((first[name] == second[name]).all()) for name in first)
    found = [json.loads(line) for line in (once / "evaluations.jsonl").read_text().splitlines()]
    assert len(found) == 2
    memory = json.loads((once / "memory.json").read_text())
    predicted, measured = memory["predicted"]["peak_bytes"], memory["measured"]["peak_bytes"]
    assert abs(predicted - measured) <= 0.05 * measured
    assert 'name = "islands"' in (once / "plan.toml").read_text()


SECOND = """
import numpy as np, torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.b(self.a(x).relu()), labels)


class Data:
    def __init__(self, rows=512):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, 8, generator=generator)
        self.y = torch.randint(4, (rows,), generator=generator)
        self.x[39] = float("nan")  # of step 4, the second island's

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}

    def order_rows(self, seed, epoch, start, stop):
        return np.arange(start, stop)
"""


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_island_ends_the_run(tmp_path: Path) -> None:
    """The others wait for it where they meet, and nothing may wait for them."""
    (tmp_path / "second.py").write_text(SECOND)
    arguments = ["model.factory=second:Net", "data.factory=second:Data", "data.batch_size=8", "validation.every=0",
                 "parallel.dp=2", "parallel.dp_replicate=2", "parallel.local_steps=10", "train.steps=40",
                 "train.max_restarts=0", f"train.run_dir={tmp_path / 'run'}"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", *arguments], capture_output=True, text=True, timeout=150,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 1 and "step 4: forward's output not finite" in done.stdout + done.stderr
