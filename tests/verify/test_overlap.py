"""Microbatches in pairs equal one device: what layers exchange is under way while another microbatch computes, with
every other parallelism.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import test_experts
import test_tensor
from test_tensor import ALONE, PLAIN, check, oracle
from torch import Tensor

from covering import covering
from shardwise.core.check import check as prove
from shardwise.core.instruction import Lane
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.context import context_parallel
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.parallel.overlap import overlapped
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel

EXPERTS = ("mixtral", "deepseek", "gpt-oss")
DENSE = ("own gpt", "own llama", "bert", "gpt2 padded", "bloom")


@functools.cache
def model(name: str) -> tuple[Compiled, list[dict[str, Tensor]], Any]:
    """A model on one device, its batches, and the module."""
    if name in EXPERTS:
        return test_experts.model(name)
    one, batches, _ = test_tensor.model(name)
    return one, batches, one.module


@functools.cache
def truth(name: str, microbatches: int) -> Any:
    one, batches, module = model(name)
    return oracle(module, one.loss, batches, PLAIN, microbatches)


def composed(
    shared: tuple[str, Any, int], data: tuple[int, int, int], pp: tuple[int, str], recompute: Any, microbatches: int
) -> Plan:
    (kind, how, size), plan = shared, ALONE.replace(microbatches=microbatches, recompute=recompute)
    if kind == "cp":
        plan = context_parallel(plan, size, how)
    elif kind == "ep":
        plan = tensor_parallel(expert_parallel(plan, size), how)
    else:
        plan = tensor_parallel(plan, size, how)
    return overlapped(pipeline(data_parallel(plan, *data), *pp), "pairs")


SHARED = (
    ("tp", "1d", 2), ("tp", "1d", 3), ("tp", "1d-sp", 2), ("tp", "1d-sp", 4), ("tp", "2d", 4), ("tp", "2.5d", 8),
    ("tp", "3d", 8), ("cp", "gathered", 2), ("cp", "ring", 2), ("cp", "heads", 3), ("ep", 1, 2), ("ep", 2, 2),
    ("ep", 1, 3),
)  # fmt: skip
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zbv", "interleaved", "dualpipe-v")
CASES = list(
    itertools.product(
        (*EXPERTS, *DENSE),
        SHARED,
        ((1, 0, 1), (2, 0, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (3, 3, 1), (4, 3, 2)),
        ((1, "1f1b"), *((2, name) for name in SCHEDULES)),
        ("none", "full", "selective"),
        (2, 3, 4),
    )
)


def fits(case: tuple[Any, ...]) -> bool:
    name, shared, data, pp, _, microbatches = case
    if pp[1] in ("zbv", "interleaved", "dualpipe-v") and microbatches == 3:
        return False
    ranks = shared[2] * (shared[1] if shared[0] == "ep" else 1) * data[0] * pp[0]
    return bool(ranks <= 16 and (shared[0] != "ep" or name in EXPERTS))


@pytest.mark.quick(1)
@pytest.mark.few(40)
@pytest.mark.parametrize("case", list(covering([case for case in CASES if fits(case)])), ids=str)
def test_together(case: tuple[Any, ...]) -> None:
    """Every pair of settings of each two axes."""
    name, *options, microbatches = case
    one, batches, _ = model(name)
    compiled = one.under(composed(*options, microbatches))
    check(compiled, batches, truth(name, microbatches), PLAIN)
    programs = compiled.programs(compiled.general, microbatches)
    prove(programs, compiled.plan.mesh)
    assert any(i.lane is Lane.MOVE for one in programs for i in one.instructions) or options[0][1] in ("ring", "heads")
