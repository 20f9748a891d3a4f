"""Where microbatches exchange, bytes held and bytes communicated are what was predicted, instruction by instruction."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from real import differences, predicted
from test_traffic import compared

from meeting import MODELS, batch, in_fp64, planned
from shardwise.core.instruction import Category
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled

KNOWN = [name for name in MODELS if name != "mixtral"]  # what meta does not know of grouped products is in fp64 alone


@functools.cache
def captured(name: str, wide: bool, rows: int) -> Compiled:
    torch.manual_seed(3)
    module, loss = MODELS[name].make(), MODELS[name].loss
    if wide:
        return Compiled(module.double(), Plan.of(precision="fp64"), in_fp64(name, rows), loss)
    return Compiled(module, Plan.of(), batch(name, rows), loss)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(
    ("dp", "rows", "microbatches", "recompute"),
    [(1, 6, 3, "none"), (1, 7, 3, "full"), (1, 6, 2, "selective"), (2, 8, 2, "none"), (2, 8, 4, "full")],
)
def test_bytes_held(name: str, dp: int, rows: int, microbatches: int, recompute: Any) -> None:
    """To the byte, also where microbatches are uneven."""
    plan = Plan.of(Mesh.of(dp=dp), microbatches=microbatches, recompute=recompute, rows="batch")
    subject = captured(name, False, rows).under(plan)
    assert differences(subject, batch(name, rows)) == []


@pytest.mark.quick(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dp", "zero", "microbatches", "tp", "recompute"),
    [(2, 0, 2, 1, "none"), (2, 3, 3, 1, "full"), (3, 0, 3, 2, "selective")],
)
def test_bytes_communicated(name: str, dp: int, zero: int, microbatches: int, tp: int, recompute: Any) -> None:
    subject = captured(name, True, 7).under(planned(dp, zero, microbatches, recompute, tp))
    assert compared(subject, in_fp64(name, 7)) > 10


@pytest.mark.slow
def test_what_all_microbatches_hold_shows_in_the_peak() -> None:
    """All wait at the exchange with what their backward needs; recomputation keeps only units' inputs."""
    peaks = {}
    for rows, recompute in (("microbatch", "none"), ("batch", "none"), ("batch", "full")):
        plan = Plan.of(microbatches=3, recompute=recompute, rows=rows)
        found = predicted(captured("norms", False, 7).under(plan), batch("norms"))
        peaks[rows, recompute] = found.peak[Category.ACTIVATIONS]
    assert peaks["batch", "none"] > 2 * peaks["microbatch", "none"]
    assert peaks["batch", "full"] < 0.8 * peaks["batch", "none"]
