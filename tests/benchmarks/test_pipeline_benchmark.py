"""The benchmark of pipelines at a tiny size: torch's pipelines, its peers, train as an ordinary loop does."""

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

from beside import beside  # noqa: E402

from alternate import Contender, alternate  # noqa: E402
from stages import KINDS, REST, Alone, Kind, Pipeline, costs, simulated  # noqa: E402
from task import Task  # noqa: E402
from zero import LIMIT, SAME  # noqa: E402

TINY = Task(vocabulary=64, width=32, layers=8, heads=2, sequence=16, clip_norm=0.5)
PATHS = os.pathsep.join([str(HERE), str(BENCHMARKS.parent / "src")])


def apart(kind: Kind, ranks: int, **options: bool) -> list[float]:
    """How far torch's ranks are from an ordinary loop after each of three steps, on average over the ranks."""
    make = functools.partial(beside, pipeline=Pipeline(TINY, kind, ranks, kind.microbatches(4, ranks)), **options)
    one = Contender(f"torch {kind.name}", make, ranks, environment={"PYTHONPATH": PATHS})
    alternate([one], rounds=0, steps=0, warmup=3)
    return one.losses


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(
            kind.name, ranks, marks=() if (kind.name, ranks) in (("1f1b", 2), ("zbv", 2)) else pytest.mark.full
        )
        for kind in KINDS.values()
        for ranks in (2, 4)
        if kind.torch
    ],
)
def test_torch_trains_as_an_ordinary_loop(name: str, ranks: int) -> None:
    found = apart(KINDS[name], ranks)
    assert len(found) == 3 and all(difference <= 1e-10 for difference in found)


@pytest.mark.slow
def test_the_embedding_of_both_ends_needs_the_sum() -> None:
    assert apart(KINDS["1f1b"], 2, summed=False)[0] > 1e-5


def test_stages_are_as_even_as_blocks_allow() -> None:
    cuts = {stages: Pipeline(Task(), KINDS["1f1b"], stages, 8).cut() for stages in (1, 2, 4, 8)}
    assert {stages: [len(units) for units in cut] for stages, cut in cuts.items()} == {
        1: [10], 2: [6, 4], 4: [3, 2, 3, 2], 8: [2, 1, 1, 1, 1, 1, 2, 1],
    }  # fmt: skip
    assert all([i for units in cut for i in units] == list(range(10)) for cut in cuts.values())


def run(tmp_path: Path, *only: str) -> dict[str, Any]:
    """What the benchmark writes about a tiny model on two ranks in fp32."""
    sizes = ("--vocabulary", "64", "--width", "32", "--heads", "2", "--sequence", "16")
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "pipeline.py"), *sizes, "--rounds", "1", "--json", str(found),
         "--ranks", "2", "--precision", "fp32", "--only", *only],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(found.read_text())


@pytest.mark.full
def test_both_train_the_same(tmp_path: Path) -> None:
    found = run(tmp_path, "1f1b", "torch 1f1b")
    limit, mine, peer = found["rows"]
    assert [row["name"] for row in found["rows"]] == [LIMIT, "1f1b", "torch 1f1b"]
    for row in (mine, peer):
        assert row["off"] <= SAME["fp32"] and row["microbatches"] == 4 and row["stages"] == [5, 5]
        assert row["of_ideal"] == limit["seconds"] / row["seconds"]
        model = simulated(Pipeline(TINY, KINDS["1f1b"], 2, 4), limit["costs"])
        assert row["of_simulated"] == pytest.approx(model / row["seconds"])
    assert [set(each) for each in limit["costs"]] == [{REST, "F0", "B0"}, {REST, "F1", "B1"}]
    (said,) = found["verdicts"]
    assert said["faster"] == peer["seconds"] / mine["seconds"] and said["of_simulated_to_reach"] == 0.97
    assert said["peak_rss"] == mine["peak_rss"] / peer["peak_rss"]


@pytest.mark.full
def test_torch_by_itself(tmp_path: Path) -> None:
    found = run(tmp_path, "torch 1f1b", "torch zbv")
    assert [(row["name"], row["microbatches"]) for row in found["rows"]] == [("torch 1f1b", 4), ("torch zbv", 4)]
    assert all(row["off"] <= SAME["fp32"] and row["of_ideal"] is None for row in found["rows"])


def test_the_simulated_step() -> None:
    """Of two stages that take 3 s for each of 4 microbatches: the second begins with the first's end; then the slower
    rest.
    """
    one = Pipeline(TINY, KINDS["1f1b"], 2, 4)
    assert simulated(one, [{"F0": 1.0, "B0": 2.0, REST: 0.5}, {"F1": 1.0, "B1": 2.0, REST: 0.25}]) == 15.5
    assert costs([[{"F0": 1.0}, {"F0": 3.0}, {"F0": 2.0}]]) == [{"F0": 2.0}]


def test_a_whole_backward_beside_an_input_backward_is_part_of_it() -> None:
    one = Alone(None, None)
    one.spent.update(
        {None: 1.0, ("F", 0, 0): 2.0, ("F", 0, 1): 4.0, ("I", 0, 0): 5.0, ("B", 0, 0): 1.0, ("B", 0, 1): 9.0}
    )
    assert one._means() == {REST: 1.0, "F0": 3.0, "I0": 6.0, "B0": 9.0}
