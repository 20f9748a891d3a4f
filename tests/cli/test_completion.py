"""What a shell and Python complete."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import shardwise

MAIN = "import sys; sys.argv[:] = ['shardwise']; from shardwise.cli.main import main; main(); "


def completed(words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    variables = {
        "_SHARDWISE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1),
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", MAIN], env={**os.environ, **variables}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    return found.stdout.split()


@pytest.mark.slow
def test_commands_and_options_are_completed() -> None:
    assert completed("shardwise tr") == ["train"]
    assert "--json" in completed("shardwise train --j")


@pytest.mark.fresh
def test_completion_is_fast_since_it_imports_no_torch() -> None:
    code = MAIN.replace("main(); ", "print('torch' in sys.modules)")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert found.stdout.split() == ["False"]


def test_the_public_names_are_there() -> None:
    names = dir(shardwise)
    assert set(shardwise.__all__) <= set(names) and "__version__" in names
    assert not {"Any", "TYPE_CHECKING", "annotations"} & set(names)
    assert all(getattr(shardwise, name) is not None for name in shardwise.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = shardwise.Trainr
