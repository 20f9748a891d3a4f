"""Callbacks of a config: what can be called, and what is refused before a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config import Hardware, build_callbacks, check_callbacks, load_config
from shardwise.core.errors import ConfigError
from shardwise.report.observers import HOOKS

FILE = """
made = []

class Good:
    def __init__(self):
        made.append(self)
    def on_step(self, metrics): ...
    def on_end(self, values, more=1): ...

class None_:
    def on_stepp(self, metrics): ...

class Few:
    def on_step(self): ...

class Raises:
    def __init__(self):
        raise ValueError("not today")
    def on_end(self, values): ...

def good(metrics): ...
def many(metrics, more): ...
number = 3
"""


def config(tmp_path: Path, *names: str):  # noqa: ANN201
    path = tmp_path / "watch.py"
    path.write_text(FILE)
    given = ", ".join(f'"{path}:{name}"' for name in names)
    return load_config(None, [f"train.callbacks=[{given}]"], hardware=Hardware(cores=1))


def test_functions_and_classes(tmp_path: Path) -> None:
    found = config(tmp_path, "Good", "good")
    check_callbacks(found, HOOKS)
    (name, one), (_, function) = build_callbacks(found)
    assert name == "callback watch.py:Good" and hasattr(one, "on_end")
    assert function.on_step({}) is None and not hasattr(function, "on_end")


def test_a_check_makes_nothing(tmp_path: Path) -> None:
    found = config(tmp_path, "Good", "Raises")
    check_callbacks(found, HOOKS)
    with pytest.raises(ConfigError, match=r"train.callbacks = .*ValueError: not today \(.*watch.py:18, in __init__\)"):
        build_callbacks(found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("None_", "the class None_ has none of the hooks; legal: any of on_start, on_step"),
        ("Few", "Few.on_step: .*; legal: one parameter, a dict"),
        ("many", "the function: missing a required argument: 'more'; legal: one parameter, a dict"),
        ("number", "number in .* is of type int; legal: a function in"),
        ("god", 'has no god; legal: .*Did you mean "good"?'),
    ],
)
def test_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_callbacks(config(tmp_path, name), HOOKS)
