"""The benchmark of pipelines at a tiny size: torch's pipelines, its peers, train as an ordinary loop does."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(HERE)]

from beside import beside  # noqa: E402

from alternate import Contender, alternate  # noqa: E402
from stages import KINDS, Kind, Pipeline  # noqa: E402
from task import Task  # noqa: E402

TINY = Task(vocabulary=64, width=32, layers=8, heads=2, sequence=16, clip_norm=0.5)
PATHS = os.pathsep.join([str(HERE), str(BENCHMARKS.parent / "src")])


def apart(kind: Kind, ranks: int, **options: bool) -> list[float]:
    """How far torch's ranks are from an ordinary loop after each of three steps, on average over the ranks."""
    make = functools.partial(beside, pipeline=Pipeline(TINY, kind, ranks, kind.microbatches(4, ranks)), **options)
    one = Contender(f"torch {kind.name}", make, ranks, environment={"PYTHONPATH": PATHS})
    alternate([one], rounds=0, steps=0, warmup=3)
    return one.losses


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.torch], ids=lambda kind: kind.name)
def test_torch_trains_as_an_ordinary_loop(kind: Kind, ranks: int) -> None:
    found = apart(kind, ranks)
    assert len(found) == 3 and all(difference <= 1e-10 for difference in found)


def test_the_embedding_of_both_ends_needs_the_sum() -> None:
    assert apart(KINDS["1f1b"], 2, summed=False)[0] > 1e-5


def test_stages_are_as_even_as_blocks_allow() -> None:
    task = Task()
    cuts = {stages: Pipeline(task, KINDS["1f1b"], stages, 8).cut() for stages in (1, 2, 4, 8)}
    assert {stages: [len(blocks) for blocks in cut] for stages, cut in cuts.items()} == {
        1: [8], 2: [5, 3], 4: [2, 2, 3, 1], 8: [1] * 8,
    }  # fmt: skip
    assert all([i for blocks in cut for i in blocks] == list(range(8)) for cut in cuts.values())
    with pytest.raises(ValueError, match="9 stages of 8 blocks"):
        Pipeline(task, KINDS["1f1b"], 9, 9).cut()
