"""The examples: an ordinary PyTorch script, and what it takes to run it on many devices."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN, OURS = (ROOT / "examples" / f"{name}_script.py" for name in ("plain", "train"))
MOST_CHANGES = 5


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def changes(before: list[str], after: list[str]) -> int:
    """Lines changed: one that is replaced by another counts once, as one that is added or removed does."""
    opcodes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in opcodes if tag != "equal")


def losses(tmp_path: Path, *arguments: str) -> list[float]:
    """What a command prints after each tenth step."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == [10, 20, 30, 40, 50]
    return [float(loss) for _, loss in found]


def test_changes_are_counted() -> None:
    assert changes(list("abcd"), list("abcd")) == 0
    assert changes(list("abcd"), list("axcd")) == 1
    assert changes(list("abcd"), list("acdyz")) == 3
    assert changes(list("abcd"), list("axyzd")) == 3


def test_few_lines_change() -> None:
    assert 1 <= changes(lines(PLAIN), lines(OURS)) <= MOST_CHANGES
    assert not any("shardwise" in line for line in lines(PLAIN) if line.startswith(("import", "from")))


def test_the_readme_shows_them() -> None:
    diff = [
        line
        for line in difflib.unified_diff(lines(PLAIN), lines(OURS), n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    readme = lines(ROOT / "README.md")
    assert [line for line in diff if len(line) > 1 and line not in readme] == []


@pytest.mark.slow
def test_both_learn_the_same(tmp_path: Path) -> None:
    plain = losses(tmp_path, str(PLAIN))
    ours = losses(tmp_path, "-m", "shardwise", "launch", "--ranks", "2", str(OURS))
    assert ours == pytest.approx(plain, rel=1e-4)
    assert plain[-1] < plain[0] - 0.5
