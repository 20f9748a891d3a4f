"""``shardwise checkpoint``: list, inspect, verify, export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from shardwise.checkpoint import CheckpointWriter, Piece
from shardwise.cli.checkpoint import app
from shardwise.core.layout import Box


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    writer = CheckpointWriter(tmp_path / "run" / "checkpoints", 0, 1, warn=pytest.fail)
    for step in (1, 2):
        weight = torch.full((4, 3), float(step))
        pieces = [
            Piece("model.w", (4, 3), Box((0, 0), (4, 3)), weight),
            Piece("optimizer.step", (), Box((), ()), torch.tensor(2.0)),
        ]
        writer.save(step, pieces, {"seed": 11, "config": "[train]\nsteps = 2\n", "model": {"aliases": {}}})
    writer.close()
    return tmp_path / "run"


def test_list(run_dir: Path) -> None:
    for path in (run_dir, run_dir / "checkpoints"):
        rows = json.loads(call("list", path, "--json").stdout)["checkpoints"]
        assert [(row["step"], row["tensors"], row["ranks"], row["error"]) for row in rows] == [
            (1, 2, 1, None),
            (2, 2, 1, None),
        ]
    text = call("list", run_dir).stdout
    assert "step_00000001" in text and "step_00000002" in text and text.count("ok") == 2
    (run_dir / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    found = call("list", run_dir, "--json")
    assert found.exit_code == 0 and "not a checkpoint" in json.loads(found.stdout)["checkpoints"][0]["error"]


def test_inspect(run_dir: Path) -> None:
    found = json.loads(call("inspect", run_dir / "checkpoints" / "step_00000001", "--json").stdout)
    assert found["step"] == 1 and found["meta"]["seed"] == 11
    assert found["tensors"]["model.w"] == {"shape": [4, 3], "dtype": "float32", "pieces": 1}
    text = call("inspect", run_dir).stdout
    assert "step_00000002" in "".join(text.split()) and "4×3" in text and "seed" in text and "step" in text


def test_verify_tells_which_file_is_damaged(run_dir: Path) -> None:
    good = call("verify", run_dir)
    assert good.exit_code == 0 and good.stdout.count("ok") == 2
    path = run_dir / "checkpoints" / "step_00000002" / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    bad = call("verify", run_dir, "--json")
    assert bad.exit_code == 1
    rows = json.loads(bad.stdout)["checkpoints"]
    assert rows[0]["error"] is None and rows[1]["error"].startswith(f"{path}: damaged")
    assert call("verify", path.parent).exit_code == 1
    assert call("verify", run_dir / "checkpoints" / "step_00000001").exit_code == 0


def test_export(run_dir: Path, tmp_path: Path) -> None:
    found = call("export", run_dir, tmp_path / "out", "--dtype", "bfloat16", "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["step"] == 2
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == {"w"} and torch.equal(tensors["w"], torch.full((4, 3), 2.0).bfloat16())
    again = call("export", run_dir, tmp_path / "out")
    assert again.exit_code == 2 and "exists and is not empty" in again.stderr
    assert call("export", run_dir, tmp_path / "other", "--dtype", "int4").exit_code == 2
    assert "model.safetensors" in call("export", run_dir / "checkpoints" / "step_00000001", tmp_path / "other").stdout


@pytest.mark.parametrize("command", ["list", "inspect", "verify"])
def test_where_there_is_nothing(tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        found = call(command, path)
        assert found.exit_code == 2 and str(path) in found.stderr and "Traceback" not in found.output
        assert json.loads(call(command, path, "--json").stdout)["cause"] == "config"


@pytest.mark.fresh
def test_help_needs_no_torch() -> None:
    script = "import sys, shardwise.cli.checkpoint; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
