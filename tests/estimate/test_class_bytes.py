"""Losses of scores in pieces of their classes: what ranks send, and what a step takes, is what was predicted, to the
byte.
"""

from __future__ import annotations

from typing import Any

import pytest
from real import differences
from test_traffic import compared

import classes
from shardwise.core.mesh import Mesh
from shardwise.core.plan import CHOICES, Plan
from shardwise.lower.compiled import Compiled

LAYOUTS = [
    {"mesh": Mesh.of(tp=2), "tensor": "1d", "recompute": "none"},
    {"mesh": Mesh.of(tp=3), "tensor": "1d-sp", "recompute": "selective", "microbatches": 2},
    {"mesh": Mesh.of(dp=2, tp=2), "tensor": "1d", "recompute": "full", "precision": "bf16"},
    {"mesh": Mesh.of(tp_i=2, tp_j=2), "tensor": "2d", "recompute": "selective"},
]  # fmt: skip
FEW = ("weights", "none", "probabilities, all", "nll, none")


def cases() -> list[Any]:
    return [
        pytest.param(name, layout, id=f"{name}-{i}",
        marks=() if name in FEW and FEW.index(name) % 4 == i else pytest.mark.full)
        for name in classes.HOW if name != "nll, wider"
        for i, layout in enumerate(LAYOUTS)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), cases())
def test_bytes(name: str, layout: dict[str, Any]) -> None:
    assert layout["recompute"] in CHOICES["recompute"]
    module, batch = classes.made(name, 31)
    subject = Compiled(module, Plan.of(**layout), batch)
    compared(subject, batch)
    assert differences(subject, batch) == []
