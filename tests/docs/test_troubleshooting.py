"""Every error text that ``docs/troubleshooting.md`` quotes stands in the sources."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^### `(.*)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
GAP = "…"  # what differs from case to case
BETWEEN = rf"{GAP}|;? ?\blegal: |; "  # messages are put together from what is wrong, where, and what is legal
SHORTEST = 4  # characters that say something


@cache
def texts() -> str:
    """Return all texts of the sources, each on a line of its own; what an f-string puts in is a gap."""
    found = []
    for file in (ROOT / "src" / "shardwise").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def missing(quoted: str) -> list[str]:
    """Return the parts that no text of the sources has."""
    parts = [part.strip() for part in re.split(BETWEEN, quoted)]
    return [part for part in parts if len(part) >= SHORTEST and part not in texts()]


@pytest.mark.slow
@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_error_stands_in_the_sources(quoted: str) -> None:
    assert missing(quoted) == [] and max(map(len, quoted.split(GAP))) >= SHORTEST


def test_the_page_quotes_many_and_other_words_are_found_out() -> None:
    assert len(QUOTED) == len(set(QUOTED)) >= 35
    assert missing("no error says … this in words") == ["no error says", "this in words"]
