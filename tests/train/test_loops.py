"""Ten ordinary loops, with at most three lines changed, have the losses of the plain ones, on one rank and on two."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from processes import run_processes

LOOPS = Path(__file__).parents[2] / "examples" / "loops"
NAMES = sorted(path.stem for path in LOOPS.glob("*.py") if not path.stem.startswith("plain_"))
CHANGED = 3  # lines, an empty one that sets an import apart included

RUN = """
import importlib, json, sys
import torch

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
found = []
for name in (f"plain_{sys.argv[2]}", sys.argv[2]):
    logged = []
    importlib.import_module(name).main(logged.append)
    found.append(logged)
print(json.dumps(found), flush=True)
"""


def test_all_ten_are_there() -> None:
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_no_more_than_three_lines_differ(name: str) -> None:
    plain, ours = ((LOOPS / f"{prefix}{name}.py").read_text().splitlines() for prefix in ("plain_", ""))
    changes = [line for line in difflib.ndiff(plain, ours) if line[:2] in ("+ ", "- ")]
    assert 0 < len(changes) <= CHANGED, changes


@pytest.mark.slow
@pytest.mark.few(5)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_losses_of_the_plain_loop(tmp_path: Path, name: str, ranks: int) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    for output in run_processes(ranks, [str(script), str(LOOPS), name], 240):
        expected, found = json.loads(output.splitlines()[-1])
        assert len(found) == len(expected) > 3
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-10)
