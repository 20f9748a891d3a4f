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
from shardwise.core.tensor_options import tensor_axes
from shardwise.parallel.tensor import tensor_parallel

RUN = ["model.width=16", "model.layers=2", "model.heads=2", "model.dropout=0.1", "data.sequence_length=16",
"data.batch_size=4",
       "validation.share=0.5", "validation.every=2", "validation.batches=3", "checkpoint.every=2",
       "train.trace_steps=[]",
       "parallel.precision=fp64", "parallel.microbatches=2", "optimizer.schedule=constant",
       "optimizer.warmup_steps=0"]  # fmt: skip


Legs = list[tuple[int, dict[str, str]]]
"""Of a run in turn: the step at which each part of it ends, and its keys under ``parallel``."""


@pytest.mark.full
def test_a_run_goes_on_with_and_without_it(tmp_path: Path) -> None:
    """Four steps on two ranks with ZeRO-3, four on two that share each layer and the sequence: as on one."""
    goes_on(tmp_path, [(4, {"dp": "2", "zero": "3"}), (8, {"tp": "2", "tensor": "1d-sp"})])


@pytest.mark.full
@pytest.mark.parametrize("legs", [
    [(4, {"tp": "2"}), (6, {"dp": "2", "zero": "3"}), (8, {"tp": "2", "tensor": "1d-sp"})],
    [(4, {"tp": "4", "tensor": "2d"}), (6, {"tp": "2"}), (8, {"tp": "4", "tensor": "2d"})],
    [(4, {"tp": "8", "tensor": "3d"}), (8, {"dp": "2", "zero": "2"})],
    [(4, {"tp": "8", "tensor": "2.5d"}), (8, {"tp": "4", "tensor": "2d"})],
    [(4, {"tp": "2", "tensor_plan": "auto"}), (6, {"tp": "4", "tensor": "2d", "tensor_plan": "auto"}),
    (8, {"dp": "2"})],
],
ids=lambda legs: "-".join(one.get("tensor_plan", "") + one.get("tensor", "1d" if "tp" in one else "dp") for _,
one in legs))  # fmt: skip
def test_every_recipe_goes_on_as_another(tmp_path: Path, legs: Legs) -> None:
    goes_on(tmp_path, legs)


def goes_on(tmp_path: Path, legs: Legs) -> None:
    """A run in several parts, each on ranks of its own, is one on a single rank: losses, evaluations, weights and what
    it writes.
    """
    (tmp_path / "text").mkdir()
    for name in "abcdef":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} to be or not to be, that is the question. " * 30)
    given = [*RUN, f"data.source={tmp_path / 'text'}"]
    one, many = tmp_path / "one", tmp_path / "many"
    shardwise("train", *given, f"train.steps={legs[-1][0]}", "parallel.dp=1", f"train.run_dir={one}")
    for steps, keys in legs:
        told = {"dp": "1", **keys}
        shardwise(
            "train",
            *given,
            f"train.steps={steps}",
            f"train.run_dir={many}",
            *(f"parallel.{k}={v}" for k, v in told.items()),
        )
        plan = Plan.from_toml((many / "plan.toml").read_text())
        assert plan.mesh == tensor_parallel(
            Plan.of(Mesh.of(dp=int(told["dp"]))), int(told.get("tp", 1)),
            told.get("tensor", "1d")  # type: ignore[arg-type]
        ).mesh  # fmt: skip
    for name, compared in (("metrics", ("loss", "grad_norm")), ("evaluations", ("validation_loss",))):
        expected, found = lines(one, name), lines(many, name)
        assert [line["step"] for line in found] == [line["step"] for line in expected] != []
        for key in compared:
            assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-10, abs=0)
    first, second = (load_file(folder / "weights.safetensors") for folder in (one, many))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], rtol=0, atol=1e-10) for name in first)
    result = json.loads((many / "result.json").read_text())
    assert result["ranks"] == plan.mesh.size and (many / "sample.txt").stat().st_size > 100
    assert (one / "sample.txt").read_text() == (many / "sample.txt").read_text()
    program = (many / "program.txt").read_text()
    axes = tensor_axes(plan.mesh)
    assert not axes or any(f"over {axis}" in program for axis in axes)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
