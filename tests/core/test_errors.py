"""Errors in the user's input: their text, its parts, and what a pickle keeps of them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardwise.checkpoint.strict import FileError
from shardwise.core.errors import ConfigError, ShardwiseError, check_choice
from shardwise.shard.solver.solve import TooFew


def test_parts() -> None:
    """The parts of an error make up its text; one that is a text has none."""
    with pytest.raises(ConfigError) as found:
        check_choice("norm", "barier", ("barrier", "post-validate"))
    error = found.value
    assert str(error) == """norm: 'barier' is not legal; legal: "barrier", "post-validate". Did you mean "barrier"?"""
    assert (error.field, error.wrong, error.hint) == ("norm", "'barier' is not legal", ' Did you mean "barrier"?')
    assert error.legal == '"barrier", "post-validate".'
    assert str(ConfigError.on("timetable", "none", "once.", part="rank 1")) == "timetable, rank 1: none; legal: once."
    assert ConfigError("plain").field == ConfigError("plain").legal == ""
    assert ConfigError.cause == "config" and ShardwiseError.cause == "shardwise"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("plain"),
        ConfigError.on("tp", "3 is not legal", "4.", " Or 8.", part="rank 2"),
        FileError(Path("a/b"), "is gone"),
        TooFew(3, 4),
    ],
)
def test_pickled(error: ConfigError) -> None:
    """A pickle keeps the type, the text and all attributes, whatever the arguments that the error was made with."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
