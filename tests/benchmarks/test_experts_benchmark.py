"""The benchmark of experts at a tiny size: its peers, distributed by transformers, train as an ordinary loop does."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(HERE)]

from beside import with_experts_beside  # noqa: E402

from alternate import Contender, alternate  # noqa: E402
from task import Task  # noqa: E402
from zero import SAME  # noqa: E402

TINY = Task(family="mixtral", experts=4, vocabulary=64, width=32, layers=2, heads=4, sequence=16)
PATHS = os.pathsep.join([str(HERE), str(BENCHMARKS.parent / "src")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        pytest.param(2, {}),
        pytest.param(2, {"ep": 2}),
        pytest.param(4, {}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 4}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 2}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 4, "tp": 2}, marks=pytest.mark.full),
    ],
)
def test_with_experts_divided_it_trains_as_an_ordinary_loop(ranks: int, sizes: dict[str, int]) -> None:
    make = functools.partial(with_experts_beside, task=TINY, **sizes)
    one = Contender("transformers", make, ranks, environment={"PYTHONPATH": PATHS})
    alternate([one], rounds=0, steps=0, warmup=3)
    assert len(one.losses) == 3 and all(difference <= 1e-4 for difference in one.losses)


@pytest.mark.full
def test_all_have_the_same_losses(tmp_path: Path) -> None:
    sizes = ("--vocabulary", "64", "--width", "32", "--layers", "2", "--heads", "4", "--sequence", "16")
    found, names = tmp_path / "found.json", ("transformers EP", "transformers EP + DDP", "ep")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "experts.py"), *sizes, "--rounds", "1", "--experts", "4",
         "--json", str(found), "--only", *names],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(found.read_text())["rows"]
    assert [row["name"] for row in rows] == ["DDP", *names]
    assert all(row["off"] <= SAME["fp32"] and row["faster"] == rows[0]["seconds"] / row["seconds"] for row in rows)
