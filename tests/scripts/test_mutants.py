"""The table of planted bugs fits the code: each changes one place, to something else that Python can read."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = script
spec.loader.exec_module(script)


def test_there_are_many_and_no_two_alike() -> None:
    found = script.mutants()
    assert len(found) >= 80 and len({(one.file, one.old, one.new) for one in found}) == len(found)


@pytest.mark.parametrize("one", script.mutants(), ids=lambda one: f"{one.file}: {one.bug}")
def test_it_can_be_planted(one: script.Mutant, tmp_path: Path) -> None:
    path = tmp_path / script.SOURCE / one.file
    path.parent.mkdir(parents=True)
    before = (ROOT / script.SOURCE / one.file).read_text()
    path.write_text(before)
    one.plant(tmp_path)
    after = path.read_text()
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))


def test_the_table_of_the_documentation_is_that_of_the_results() -> None:
    results = [script.Result(**one) for one in json.loads((ROOT / "scripts" / "mutants.json").read_text())]
    assert {(one.file, one.bug) for one in results} == {(one.file, one.bug) for one in script.mutants()}
    found = sum(one.test is not None for one in results)
    assert found >= 0.95 * len(results)
    text = (ROOT / "docs" / "tests.md").read_text()
    assert text.endswith(f"<!-- scripts/mutants.py --table -->\n{script.table(results)}\n")
    assert f"find all {found} bugs" in text and f"{sum(one.own for one in results)} of them" in text
