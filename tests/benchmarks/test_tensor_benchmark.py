"""The benchmark of tensor parallelism at a tiny size: parallelized GPTs, its peers, train as an ordinary loop does."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(HERE)]

from beside import in_shards_beside  # noqa: E402

from alternate import Contender, alternate  # noqa: E402
from task import Task, plain  # noqa: E402
from torch_tensor import heads_major, shares  # noqa: E402
from zero import LIMIT, SAME, STEPS, WARMUP, verdicts  # noqa: E402

TINY = Task(vocabulary=64, width=32, layers=2, heads=4, sequence=16)
PATHS = os.pathsep.join([str(HERE), str(BENCHMARKS.parent / "src")])


def apart(ranks: int, **options: bool) -> list[float]:
    """How far a parallelized GPT is from an ordinary loop after each of three steps, on average over the ranks."""
    make = functools.partial(in_shards_beside, task=TINY, **options)
    one = Contender("DTensor", make, ranks, environment={"PYTHONPATH": PATHS})
    alternate([one], rounds=0, steps=0, warmup=3)
    return one.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sequence", "split_loss"),
    [
        pytest.param(*one, marks=() if one in ((2, False, False), (2, True, True)) else pytest.mark.full)
        for one in itertools.product((2, 4), (False, True), (False, True))
    ],
)
def test_in_shards_it_trains_as_an_ordinary_loop(ranks: int, sequence: bool, split_loss: bool) -> None:
    found = apart(ranks, sequence=sequence, split_loss=split_loss)
    assert len(found) == 3 and all(difference <= 1e-10 for difference in found)


@pytest.mark.slow
def test_embedding_and_head_are_made_one_again() -> None:
    assert apart(2, tied=False)[0] > 1e-5


def test_the_order_of_heads_changes_nothing_but_the_order() -> None:
    batch = TINY.batch([0])
    torch.testing.assert_close(heads_major(TINY.model())(**batch), TINY.model()(**batch))


@pytest.mark.parametrize("sequence", [False, True])
def test_the_limit_of_one_rank_is_an_ordinary_loop(sequence: bool) -> None:
    limit, loop = shares(0, 1, task=TINY, sequence=sequence), plain(0, 1, task=TINY, rows_of=1)
    for _ in range(2):
        assert float(limit()) == pytest.approx(float(loop()), rel=1e-6)


@pytest.mark.parametrize("sequence", [False, True])
def test_the_limit_computes_with_a_share_of_everything(sequence: bool) -> None:
    model = TINY.model()
    step = shares(1, 2, task=TINY, sequence=sequence, model=model)
    block, width, share = model.blocks[0], TINY.width, TINY.width // 2
    matrices = (block.attention.qkv, block.attention.proj, block.mlp.up, block.mlp.proj, model.wte, model.lm_head)
    assert [tuple(one.weight.shape) for one in matrices] == [
        (3 * share, width), (width, share), (4 * share, width), (width, 4 * share),
        (TINY.vocabulary // 2, width), (TINY.vocabulary // 2, width),
    ]  # fmt: skip
    normed = []
    block.norm2.register_forward_hook(lambda _, given, out: normed.append(out.shape[1]))
    first = float(step())
    assert float(step()) < first and normed == [TINY.sequence // (2 if sequence else 1)] * 2


def run(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What the benchmark writes about a tiny model on two ranks in fp32, and what it says meanwhile."""
    sizes = ("--vocabulary", "64", "--width", "32", "--layers", "2", "--heads", "4", "--sequence", "16")
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "tensor.py"), *sizes, "--rounds", "1", "--ranks", "2", "--precision", "fp32",
         "--json", str(found), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(found.read_text()), done.stderr


@pytest.mark.slow
def test_the_peers_by_themselves(tmp_path: Path) -> None:
    found, said = run(tmp_path, "--only", "DTensor SP + loss_parallel")
    expected = [("1d-sp", LIMIT), ("1d-sp", "DTensor SP + loss_parallel")]
    assert [(row["tensor"], row["name"]) for row in found["rows"]] == expected
    for row in found["rows"]:
        assert len(row["losses"]) == WARMUP + STEPS and row["losses"][-1] < row["losses"][0]
        assert (row["off"] <= SAME["fp32"]) == (row["name"] != LIMIT)
        assert 0 < row["data"] < row["pss"] < row["peak_rss"] < 2**31
    assert found["verdicts"] == [] and "run 1 of 1: limit, DTensor SP + loss_parallel" in said


def test_ours_is_judged_by_the_best_of_its_peers() -> None:
    figures = {"data": 8.0, "pss": 8.0, "peak_rss": 8.0}
    rows = [{"name": name, "seconds": seconds, **figures} for name, seconds in (("1d", 2.0), ("a", 3.0), ("b", 2.5))]
    said = list(verdicts(rows, {"1d": ("a", "b")}, {("1d", ("a", "b")): (1.0, 1.0)}))
    assert [(one["against"], one["faster"], one["faster_to_reach"]) for one in said] == [
        ("a", 1.5, None), ("b", 1.25, None), ("best of a and b", 1.25, 1.0),
    ]  # fmt: skip


def test_sizes_that_have_no_equal_shares_are_refused() -> None:
    command = [sys.executable, str(BENCHMARKS / "tensor.py"), "--ranks", "2", "--heads", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2 and "--heads 3 is not legal; legal: multiples of the 2 ranks" in done.stderr
