"""The reference of the Python interface in ``docs/python.md`` is what the docstrings say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import shardwise

SCRIPT = Path(__file__).parents[2] / "scripts" / "python_reference.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("python_reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(script: ModuleType) -> None:
    """After a change: ``python scripts/python_reference.py``."""
    assert script.PAGE.read_text(encoding="utf-8") == script.page()


@pytest.mark.parametrize("name", shardwise.__all__)
def test_every_public_name_is_there_and_documented(name: str, script: ModuleType) -> None:
    text = script.entry(name, getattr(shardwise, name), "shardwise")
    assert text.splitlines()[-1] and len(text.splitlines()) >= 5
    assert text in script.page()


def test_a_docstring_becomes_markdown(script: ModuleType) -> None:
    def thing(self: object, words: str = "a", *, number: int = 3) -> None:
        """Do it with ``words``, see :class:`Plan`.

        Args:
            words: some,
                in two lines.
            number: of them.

        Raises nothing.
        """

    text = script.entry("thing", thing, "shardwise")
    assert text.splitlines()[4:] == [
        "    thing(words='a', *, number=3)", "", "Do it with `words`, see `Plan`.", "",
        "- `words`: some,", "  in two lines.", "- `number`: of them.", "", "Raises nothing.",
    ]  # fmt: skip
