"""shardwise bench scaling: what it measures, writes and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.report.scaling import USES, Scaling

LIMIT = 150.0  # seconds
SMALL = (
    "model.width=16", "model.layers=1", "model.heads=2", "data.batch_size=4", "data.sequence_length=16",
    "train.hang_timeout=60",
)  # fmt: skip


def scaling(*arguments: object, code: int = 0, python: tuple[str, ...] = (), cwd: Path) -> str:
    command = [sys.executable, *(python or ("-m", "shardwise")), "bench", "scaling", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_one_and_two_ranks(tmp_path: Path, text: str) -> None:
    """Two rounds: what is printed is what is written, and nothing is left behind."""
    (tmp_path / "run.toml").write_text('[train]\nloggers = ["tensorboard"]\ncallbacks = ["nobody:Watches"]\n')
    out, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    told = scaling(
        "run.toml", *SMALL, text, "--ranks", 1, "--ranks", 2, "--kind", "weak", "--steps", 3, "--warmup", 1,
        "--rounds", 2, "--out", out, "--picture", picture, "--json", cwd=tmp_path,
    )  # fmt: skip
    values: dict[str, Any] = json.loads(told)
    assert json.loads(out.read_text()) == values and picture.read_bytes().startswith(b"\x89PNG")
    assert {one.name for one in tmp_path.iterdir()} == {"run.toml", "scaling.json", "scaling.png"}
    cases = [(1, 4), (2, 8)]
    assert [(one["ranks"], one["batch_size"], one["round"], one["step"]) for one in values["measured"]] == [
        (*case, round, step) for round in (0, 1) for case in cases for step in (1, 2, 3)
    ]
    for one in values["measured"]:
        assert 0 < one["seconds"] < 30 and sum(one[use] for use in USES) == pytest.approx(1)
        assert one["computing"] > 0 and (one["ranks"] > 1) == (one["exposed"] + one["waiting"] > 0)
    assert [(one["kind"], one["ranks"], one["batch_size"]) for one in values["points"]] == [
        ("weak", 1, 4), ("weak", 2, 8)
    ]  # fmt: skip
    for one in values["points"]:
        assert one["efficiency"] + sum(one["lost"].values()) == pytest.approx(1) and one["steps"] == 6
        assert one["tokens_per_second"] == pytest.approx(16 * one["rows_per_second"])
    assert len(values["digest"]) == 16 and values["config"]["model.width"] == 16
    about = values["about"]
    assert [one["ranks"] for one in about] == [1, 2] and all(one["torch"] and one["threads"] == 1 for one in about)
    assert Scaling.of_json(out.read_text(), "x").first == (1, 1, 4)


@pytest.mark.slow
def test_under_torchrun_beside_an_earlier_one(tmp_path: Path, text: str) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    few = ("--steps", 2, "--warmup", 1, "--rounds", 1)
    scaling(*SMALL, text, "--ranks", 1, *few, "--out", one, cwd=tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardwise")
    told = scaling(*SMALL, text, *few, "--with", one, "--out", two, "--kind", "weak", cwd=tmp_path, python=launcher)
    assert "weak scaling over dp" in told and "exposed communication" in told
    assert max(map(len, told.splitlines())) <= 80
    found = Scaling.of_json(two.read_text(), "x")
    assert [(p.kind, p.ranks, p.batch_size) for p in found.points if p.kind == "weak"] == [
        ("weak", 1, 4),
        ("weak", 2, 8),
    ]
    assert "--ranks 1: --with has 1 rank with 4 rows a batch already" in scaling(
        *SMALL, text, "--ranks", 1, "--with", one, code=2, cwd=tmp_path
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        ("--axis", "tp", "--ranks", 2),  # it communicates inside of units
        ("--axis", "pp", "--ranks", 2, "parallel.microbatches=2", "model.layers=2", "train.clip_norm=0",
         "parallel.schedule=pipedream-2bw", "parallel.window=2"),  # its steps overlap
    ],
)  # fmt: skip
def test_other_axes(plan: tuple[object, ...], tmp_path: Path, text: str) -> None:
    told = scaling(*SMALL, text, *plan, "--kind", "strong", "--steps", 4, "--rounds", 1, "--json", cwd=tmp_path)
    (point,) = json.loads(told)["points"]
    assert point["ranks"] == 2 and point["steps"] == 4 and point["shares"]["exposed"] + point["shares"]["waiting"] > 0


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["bench", "scaling", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    return " ".join(done.stderr.split())


def test_refused(tmp_path: Path, text: str) -> None:
    small = (*SMALL, text)
    assert "--ranks 3: data.batch_size = 4" in refused(*small, "--ranks", 1, "--ranks", 3)
    assert "scaling.gif: .gif is not legal" in refused(*small, "--picture", tmp_path / "scaling.gif")
    (tmp_path / "there.json").write_text("{}")
    assert "there.json: is there already" in refused(*small, "--out", tmp_path / "there.json")
    assert "there.json: no measured scaling" in refused(*small, "--with", tmp_path / "there.json")
    assert "none.json: cannot be read" in refused(*small, "--with", tmp_path / "none.json")
    assert "cannot be written" in refused(*small, "--out", tmp_path / "there.json" / "a.json")
    assert "unknown key" in refused(*small, "model.widht=3")
    for option, value in (("--axis", "xp"), ("--kind", "odd"), ("--steps", 0), ("--rounds", 0), ("--ranks", 0)):
        assert option in refused(*small, option, value)
