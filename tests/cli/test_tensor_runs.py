"""Tensor parallelism as a user runs it: real processes, evaluations, checkpoints that other plans go on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_auto import shardwise

from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan

RUN = ["model.width=16", "model.layers=2", "model.heads=2", "model.dropout=0.1", "data.sequence_length=16", "data.batch_size=4",
       "data.validation=0.5", "train.eval_every=2", "train.eval_batches=3", "checkpoint.every=2", "train.trace_steps=[]",
       "parallel.precision=fp64", "parallel.microbatches=2", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]  # fmt: skip


def test_a_run_goes_on_with_and_without_it(tmp_path: Path) -> None:
    """Four steps on two ranks that share each layer, two on two with ZeRO-3, two on two that share the sequence too: as on one."""
    (tmp_path / "text").mkdir()
    for name in "abcdef":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} to be or not to be, that is the question. " * 30)
    given = [*RUN, f"data.source={tmp_path / 'text'}"]
    one, many = tmp_path / "one", tmp_path / "many"
    shardwise("train", *given, "train.steps=8", "parallel.dp=1", f"train.run_dir={one}")
    for steps, keys in (
        (4, ["dp=1", "tp=2"]),
        (6, ["dp=2", "zero=3"]),
        (8, ["dp=1", "tp=2", "tensor=1d-sp"]),
    ):
        shardwise("train", *given, f"train.steps={steps}", f"train.run_dir={many}", *(f"parallel.{key}" for key in keys))
        plan = Plan.from_toml((many / "plan.toml").read_text())
        assert plan.mesh == (Mesh.of(dp=2) if "dp=2" in keys else Mesh.of(dp=1, tp=2))
    for name, keys in (("metrics", ("loss", "grad_norm")), ("evaluations", ("validation_loss",))):
        expected, found = lines(one, name), lines(many, name)
        assert [line["step"] for line in found] == [line["step"] for line in expected] != []
        for key in keys:
            assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-10, abs=0)
    first, second = (load_file(folder / "weights.safetensors") for folder in (one, many))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], rtol=0, atol=1e-10) for name in first)
    result = json.loads((many / "result.json").read_text())
    assert result["ranks"] == 2 and (many / "sample.txt").stat().st_size > 100
    assert (one / "sample.txt").read_text() == (many / "sample.txt").read_text()
    assert "over tp" in (many / "program.txt").read_text()


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
