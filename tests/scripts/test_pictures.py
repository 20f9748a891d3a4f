"""The pictures of the docs are made by a script, and those that are not measured are byte for byte what it makes."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_it_makes_every_picture_that_the_docs_show() -> None:
    kept = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".png", ".svg")}
    assert kept == set(script.PICTURES)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {Path(name).name for page in pages for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())}
    assert shown <= kept
    for name, commands in script.PICTURES.items():
        assert f"docs/{name}" in commands[-1].split()


@pytest.mark.parametrize("name", ["step.svg", "schedules.svg"])
def test_pictures_that_are_not_measured_are_up_to_date(name: str, tmp_path: Path) -> None:
    """`scripts/pictures.py step.svg schedules.svg` makes them anew."""
    (command,) = script.PICTURES[name]
    done = CliRunner().invoke(app, shlex.split(command.replace(f"docs/{name}", str(tmp_path / name))))
    assert done.exit_code == 0, done.output
    assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()


def test_a_list_runs_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pictures.py", "--list"])
    monkeypatch.setattr(script.subprocess, "run", None)
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len({command for commands in script.PICTURES.values() for command in commands})
    monkeypatch.setattr("sys.argv", ["pictures.py", "nothing.png"])
    with pytest.raises(SystemExit):
        script.main()


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script.subprocess, "run", lambda found, cwd, stderr: ran.append(found) or _Done())
    command = "train train.run_dir=runs/pictures/train"
    script.make(command)
    (tmp_path / "runs/pictures/train").mkdir(parents=True)
    (tmp_path / "runs/pictures/train/result.json").write_text("{}")
    script.make(command)
    script.make(command, again=True)
    assert [found[2:] for found in ran] == [["shardwise", "train", "train.run_dir=runs/pictures/train"]] * 2
    _Done.returncode = 3
    with pytest.raises(SystemExit, match="failed with code 3"):
        script.make("plot a")


class _Done:
    returncode = 0
