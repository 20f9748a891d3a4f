"""``shardwise init``: what it writes is what stands in ``examples/``, trains, and overwrites nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardwise.cli import main
from shardwise.cli.init import CONFIG, TEMPLATES, commands, contents
from shardwise.config import Hardware, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(TEMPLATES)


def init(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, ["init", *arguments])


@pytest.mark.parametrize("name", NAMES)
def test_what_it_writes_stands_in_examples(name: str, tmp_path: Path) -> None:
    result = init(name, str(tmp_path / "mine"))
    assert result.exit_code == 0, result.output
    written = {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()}
    assert written == contents(name) and CONFIG in written
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."], cwd=EXAMPLES / name,
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert {file: (EXAMPLES / name / file).read_text() for file in tracked.stdout.split()} == written
    for command in commands(name, tmp_path / "mine"):
        assert command in result.stdout


def test_the_folder_has_the_name_of_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = init("gpt", "--json")
    assert json.loads(result.stdout) == {
        "written": ["gpt/train.toml"],
        "commands": ["shardwise train gpt/train.toml"],
        "missing": [],
    }
    assert Path("gpt/train.toml").is_file()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text("mine")
    refused = init("factory", str(tmp_path))
    assert refused.exit_code == 2
    assert "my_data.py: is there, and init overwrites nothing; legal: another folder" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["my_data.py"], "nothing else is written either"
    assert (tmp_path / "my_data.py").read_text() == "mine"
    (tmp_path / "other.txt").touch()
    assert init("gpt", str(tmp_path)).exit_code == 0, "other files do not matter"


def test_wrong_arguments(tmp_path: Path) -> None:
    refused = init("fintune")
    assert refused.exit_code == 2 and 'legal: "gpt"' in refused.stderr and 'Did you mean "finetune"?' in refused.stderr
    (tmp_path / "file").touch()
    refused = init("gpt", str(tmp_path / "file"))
    assert refused.exit_code == 2 and "cannot be written" in refused.stderr and "legal: a folder" in refused.stderr


def test_help_names_all_templates() -> None:
    text = " ".join(init("--help").stdout.split())
    assert "|".join(TEMPLATES) in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "factory" else pytest.mark.full) for n in NAMES])
def test_it_trains_as_it_is(name: str, tmp_path: Path) -> None:
    """One of them by default, all with ``full``."""
    assert init(name, str(tmp_path / name)).exit_code == 0
    for command in commands(name, Path(name)):
        program, *arguments = shlex.split(command)
        module = ["-m", "shardwise"] if program == "shardwise" else []
        subprocess.run(
            [sys.executable, *module, *arguments, *(["--json"] if module else [])], cwd=tmp_path, timeout=250,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True,
        )  # fmt: skip
    metrics = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    config = load_config(tmp_path / name / CONFIG, hardware=Hardware(cores=2))
    assert len(metrics) == config.train.steps
    losses = [one["loss"] for one in metrics]
    assert sum(losses[-20:]) / 20 < 0.85 * losses[0]
