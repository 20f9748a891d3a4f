"""The benchmark of ZeRO at a tiny size: it runs, and sees who does not train as the others do."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import zero  # noqa: E402
from alternate import Contender, ContenderFailed, alternate  # noqa: E402
from task import Task, plain  # noqa: E402

SIZES = ("--vocabulary", "64", "--width", "32", "--layers", "2", "--heads", "2", "--sequence", "16")


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What the benchmark writes about a tiny model."""
    found = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "zero.py"), *SIZES, "--rounds", "1", "--json", str(found), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(found.read_text())


@pytest.mark.full
def test_all_train_the_same_but_those_that_never_meet(tmp_path: Path) -> None:
    names = ["zero 3", "FSDP2 reshard"]
    found = run(tmp_path, "--ranks", "2", "--precision", "fp32", "--only", *names)
    by = {row["name"]: row for row in found["rows"]}
    assert list(by) == [zero.LIMIT, *names]
    assert all(by[name]["off"] <= zero.SAME["fp32"] for name in names)
    assert by[zero.LIMIT]["off"] > 10 * zero.SAME["fp32"]
    for row in by.values():
        assert len(row["losses"]) == zero.WARMUP + zero.STEPS and row["losses"][-1] < row["losses"][0]
        assert 0 < row["data"] < row["pss"] < row["peak_rss"] < 2**31
    verdicts = {(said["name"], said["against"]): said for said in found["verdicts"]}
    assert verdicts.keys() == {("zero 3", "FSDP2 reshard")}
    said = verdicts["zero 3", "FSDP2 reshard"]
    assert (
        said["faster"] == by["FSDP2 reshard"]["seconds"] / by["zero 3"]["seconds"] and said["faster_to_reach"] == 1.35
    )


def test_who_trains_otherwise_is_named() -> None:
    one = Contender("other", functools.partial(plain, task=Task()), losses=[4.0, 3.9, 3.0])
    assert zero.off(one, [4.0, 3.0]) == pytest.approx(0.3)
    assert zero.off(Contender("other", one.make, losses=[4.0, math.nan]), [4.0, 3.0]) == math.inf
    row = {"name": "other", "precision": "fp32", "ranks": 2, "losses": one.losses, "off": math.nan, "off_at_most": 1e-5}
    assert "other, fp32, 2 ranks" in zero.wrong([row])[0]
    assert zero.wrong([{**row, "off": 1e-6}, {**row, "name": zero.LIMIT}]) == []


def test_a_contender_that_fails_is_named() -> None:
    with pytest.raises(ContenderFailed, match=r"odd, rank 0: ValueError\n(.*\n)*.*width 7 is not a multiple of heads"):
        alternate([Contender("odd", functools.partial(plain, task=Task(width=7)))], rounds=0, steps=0, warmup=1)
