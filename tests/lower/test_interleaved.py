"""The order in which two tasks of a pair run."""

from __future__ import annotations

import random

import pytest

from shardwise.core.instruction import Instruction, Lane, Op
from shardwise.lower.compute import Turn, interleaved


def task(words: str, microbatch: int) -> list[Turn]:
    """Make the turns of a task: ``|`` begins another, ``m`` is a move and another letter computes."""
    lanes = {"m": Lane.MOVE}
    return [
        [Instruction(Op.FORWARD, unit=ord(c), microbatch=microbatch, lane=lanes.get(c, Lane.COMPUTE)) for c in turn]
        for turn in words.split("|")
    ]


def text(turns: list[Turn]) -> str:
    """Return the letters of the turns, those of microbatch 1 in capitals."""
    letters = [[chr(one.unit).upper() if one.microbatch else chr(one.unit) for one in turn] for turn in turns]
    return "|".join("".join(turn) for turn in letters)


@pytest.mark.parametrize(("first", "second", "both"), [
    ("am", "am", "amAM"),
    ("amb", "amb", "amAMbB"),
    ("amb|cmd", "amb|cmd", "amAMb|cmBCMdD"),  # what ends a block does not wait before the next one begins
    ("ammb", "amb", "ammAMbB"),
    ("a|b|c", "amb", "a|b|cAMB"),
    ("am", "amb|cmd|e", "amAMB|CMD|E"),
    ("", "am|b", "AM|B"),
])  # fmt: skip
def test_each_goes_on_with_what_the_other_has_posted(first: str, second: str, both: str) -> None:
    assert text(interleaved(task(first, 0), task(second, 1))) == both


@pytest.mark.parametrize("seed", range(20))
def test_any_two_tasks_keep_their_order(seed: int) -> None:
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcm|", k=draw.randint(1, 30))).strip("|").replace("||", "|") for _ in range(2)]
    both = text(interleaved(task(words[0], 0), task(words[1], 1))).replace("|", "")
    assert "".join(c for c in both if c.islower()) == words[0].replace("|", "")
    assert "".join(c for c in both if c.isupper()).lower() == words[1].replace("|", "")
