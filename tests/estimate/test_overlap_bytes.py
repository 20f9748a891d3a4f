"""Microbatches in pairs: the bytes of every instruction, and what each communicates, are what was predicted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from real import differences
from test_program_bytes import made
from test_traffic import compared

from covering import covering
from shardwise.core.instruction import Lane

torch.set_num_threads(1)

CASES = list(
    itertools.product(
        ("own gpt", "own llama", "bert", "mixtral"),
        (("1d", 2), ("1d-sp", 2), ("1d-sp", 3)),
        ("none", "full", "selective"),
        ((1, 0), (2, 1), (2, 3)),
        ("fp32", "bf16"),
        (2, 3),
    )
)


def fits(case: Any) -> bool:
    """In bf16, what an odd number of ranks has of a weight is multiplied in pieces, which are not foreseen."""
    return bool(case[1][1] == 2 or case[4] == "fp32")


@pytest.mark.slow
@pytest.mark.few(8)
@pytest.mark.parametrize("case", list(covering([case for case in CASES if fits(case)])), ids=str)
def test_every_instruction(case: Any) -> None:
    name, (kind, tp), recompute, (ranks, zero), precision, number = case
    plan = {
        "tensor": kind, "tp": tp, "recompute": recompute, "ranks": ranks, "zero": zero, "precision": precision,
        "microbatches": number, "overlap": "pairs",
    }  # fmt: skip
    subject, batch = made(name, plan)
    assert any(one.lane is Lane.MOVE for one in subject.programs(subject.general, number)[0].instructions)
    assert not differences(subject, batch)
    assert compared(subject, batch) > 20
