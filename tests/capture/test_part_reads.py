"""What a microbatch reads follows from what the whole batch reads, or is refused."""

from __future__ import annotations

import pytest
import torch

from shardwise.capture.part_reads import apart
from shardwise.capture.reads import Operand, Read


def reads(*answers: object) -> list[Read]:
    return [Read(torch.Tensor.item, (Operand(),), one, " (model.py:7)") for one in answers]


@pytest.mark.parametrize(
    ("whole", "parts", "legal"),
    [
        ([4, 5, 6], [[4, 5], [6]], True),
        ([4, 5, 6], [[4, 5], [5]], False),
        ([4, 5, 6], [[4, 5]], False),
        ([4, 5, 6], [[4], None], True),
        ([4, 5, 6], [None, [6]], True),
        ([4, 5, 6], [None, [5]], False),
        ([4, 5, 6], [[4], None, [6]], True),
        ([4, 4, 4], [None, [4], [4]], True),
        ([9], [[9], [9]], True),
        ([9], [[4], [5]], True),
        ([9], [[4], [6]], False),
        ([9], [[4], None], True),
        ([9], [None, [10]], False),
        ([True], [[True], [False]], False),
        ([True], [[True], [True]], True),
        ([4, 5, 6, 7, 8, 9], [[4, 5, 7, 8], [6, 9]], True),  # two calls
        ([4, 5, 6, 7, 8, 9], [[4, 5, 7, 8], [7, 9]], False),
        ([4, 5, 6, 7, 8, 9], [[4, 7], None], True),
        ([4, 5, 6, 7, 8, 9], [None, [6, 8]], False),
    ],
)
def test_parts_of_a_batch(whole: list[object], parts: list[list[object] | None], legal: bool) -> None:
    given = [None if one is None else reads(*one) for one in parts]
    assert apart(reads(*whole), given) == (None if legal else " (model.py:7)")
