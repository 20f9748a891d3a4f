"""The reference of all keys: the page, the command, and what it says beside the rules that it describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.cli.main import _with_keys_to_explain
from shardwise.config.reference import Key, find, page, reference
from shardwise.config.sections import rules
from shardwise.core.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
KEYS = [key for keys in reference().values() for key in keys]


def test_the_page_is_what_the_command_writes() -> None:
    """After a change: ``shardwise config --reference > docs/config.md``."""
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_says_what_it_does_what_holds_without_it_and_what_is_legal(key: Key) -> None:
    section, _, name = key.name.partition(".")
    assert key.does and key.default and key.legal and "None" not in key.default
    words = re.findall(r'"[\w.-]+"', rules(section)[name].legal)
    assert all(word in key.legal for word in words), words


def test_a_key_is_found_by_its_name_and_a_section_by_its() -> None:
    (zero,) = find("parallel.zero")
    assert find("zero") == [zero] and zero in find("parallel")
    assert zero.text().splitlines()[0] == "parallel.zero" and "`" not in zero.text()
    with pytest.raises(ConfigError, match="zer0: no key and no section.*zero"):
        find("zer0")


def test_help_of_a_key() -> None:
    assert _with_keys_to_explain(["train", "my.toml", "--help", "parallel.zero"]) == ["config", "parallel.zero"]
    for others in (["train", "--help"], ["launch", "script.py", "--help", "me"], ["train", "my.toml"], []):
        assert _with_keys_to_explain(others) == others
