"""Eight processes, which divide rows, layers and what is inside a layer, train on real text as one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_auto import shardwise

RUN = (
    "data.source=stdlib", "model.width=48", "model.layers=4", "model.heads=4", "data.sequence_length=64",
    "data.batch_size=16", "train.steps=40", "validation.every=20", "validation.batches=2", "parallel.microbatches=4",
    "parallel.precision=fp64", "train.trace_steps=[]",
)  # fmt: skip
EIGHT = ("parallel.dp=2", "parallel.pp=2", "parallel.tp=2", "parallel.zero=1")


def lines(folder: Path, name: str, key: str) -> list[float]:
    found: list[dict[str, Any]] = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [line[key] for line in found]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_curve_of_eight_lies_on_that_of_one(tmp_path: Path) -> None:
    """On the source code of Python's library; the loss falls by more than it can by chance."""
    one, eight = tmp_path / "one", tmp_path / "eight"
    shardwise("train", *RUN, "train.devices=1", f"train.run_dir={one}")
    shardwise("train", *RUN, *EIGHT, f"train.run_dir={eight}")
    assert json.loads((eight / "result.json").read_text())["ranks"] == 8
    for name, key in (("metrics", "loss"), ("metrics", "grad_norm"), ("evaluations", "validation_loss")):
        right = lines(one, name, key)
        assert lines(eight, name, key) == pytest.approx(right, rel=1e-10, abs=0)
        print(f"\n{name} {key}: {max(abs(a / b - 1) for a, b in zip(lines(eight, name, key), right, strict=True)):.1e}")
    losses = lines(one, "metrics", "loss")
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 1
