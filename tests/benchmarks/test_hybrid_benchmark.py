"""The benchmark of two axes at a tiny size: its peers, built of torch's own parts, train as an ordinary loop does."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(HERE)]

from beside import in_shards_beside, shared_stages_beside  # noqa: E402

from alternate import Contender, StepMaker, alternate  # noqa: E402
from hybrid import PAIRS, Race, task_for  # noqa: E402
from stages import KINDS, Pipeline  # noqa: E402
from task import Task  # noqa: E402
from zero import SAME  # noqa: E402

TINY = Task(vocabulary=64, width=32, layers=4, heads=4, sequence=16)
PATHS = os.pathsep.join([str(HERE), str(BENCHMARKS.parent / "src")])


def apart(make: StepMaker) -> list[float]:
    """How far four ranks are from an ordinary loop after each of three steps, on average over the ranks."""
    one = Contender("torch", make, 4, environment={"PYTHONPATH": PATHS})
    alternate([one], rounds=0, steps=0, warmup=3)
    return one.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param({"dp": 2, "zero": 3}, {}),
        pytest.param({"dp": 2}, {}, marks=pytest.mark.full),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.full),
        pytest.param({"tp": 2}, {"split_loss": True}, marks=pytest.mark.full),
    ],
)
def test_shared_stages_train_as_an_ordinary_loop(sizes: dict[str, Any], options: dict[str, bool]) -> None:
    pipeline = Pipeline(TINY, KINDS["1f1b"], 2, 4, **sizes)
    found = apart(functools.partial(shared_stages_beside, pipeline=pipeline, **options))
    assert len(found) == 3 and all(difference <= 1e-8 for difference in found)


@pytest.mark.full
@pytest.mark.parametrize("split_loss", [False, True])
def test_shards_of_shards_train_as_an_ordinary_loop(split_loss: bool) -> None:
    found = apart(functools.partial(in_shards_beside, task=TINY, dp=2, split_loss=split_loss))
    assert len(found) == 3 and all(difference <= 1e-10 for difference in found)


def test_each_pair_has_something_to_be_compared_with() -> None:
    found = {pair: list(Race(pair, task_for(pair, TINY), "1f1b", 4).peers()) for pair in PAIRS}
    assert found["zero-3 × pp"] == ["FSDP2 × pipelining"] and found["pp × ep"] == ["pp alone", "ep alone"]
    assert all(found.values())


@pytest.mark.full
def test_all_have_the_same_losses(tmp_path: Path) -> None:
    sizes = ("--vocabulary", "64", "--width", "32", "--layers", "4", "--heads", "4", "--sequence", "16")
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "hybrid.py"), *sizes, "--rounds", "1", "--json", str(found),
         "--only", "zero-3 × pp"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(found.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "FSDP2 × pipelining", "zero-3 × pp over gloo", "zero-3 × pp in common memory",
    ]  # fmt: skip
    assert all(row["off"] <= SAME["fp32"] and row["faster"] == rows[0]["seconds"] / row["seconds"] for row in rows)
