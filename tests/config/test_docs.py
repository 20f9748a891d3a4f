"""The page of all keys, beside the rules that it describes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from shardwise.config.sections import SECTIONS, rules
from shardwise.config.toml import inline

PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")


def rows(section: str) -> dict[str, str]:
    """The rows of a section's table by key."""
    _, _, rest = PAGE.partition(f"## `[{section}]`")
    return dict(re.findall(r"^\| `(\w+)` \|(.*)$", rest.partition("\n## ")[0], re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_described_with_its_words_and_default(section: str) -> None:
    found = rows(section)
    assert found.keys() == rules(section).keys()
    for field in fields(SECTIONS[section]):
        cells = found[field.name].strip("| ").split(" | ")
        assert len(cells) == 3, field.name
        words = re.findall(r'"[\w.-]+"', rules(section)[field.name].legal)
        assert all(word in cells[2] for word in words), (field.name, words)
        if field.default is not None and not isinstance(field.default, float):
            assert inline(field.default) in cells[1].replace("`", ""), field.name
