"""The bytes of steps whose activations are offloaded: on a CPU "the host" is what the tracker does not see."""

from __future__ import annotations

from typing import Any

import pytest
from real import STILL, differences, measured, predicted
from test_program_bytes import case, made
from torch import Tensor

from shardwise.core.instruction import Category
from shardwise.core.memory_options import MemoryOptions
from shardwise.estimate.predict import predict
from shardwise.graph.torch_private import without_modes
from shardwise.measure import unit_work
from shardwise.measure.unit_memory import profile
from shardwise.runtime import gathered

PLANS: list[dict[str, Any]] = [
    {"recompute": "none"},
    {"recompute": "none", "precision": "bf16", "microbatches": 2},
    {"recompute": "full", "ranks": 2, "zero": 3, "microbatches": 2},
    {"recompute": "selective", "precision": "bf16"},
    {"recompute": "none", "ranks": 2, "zero": 3, "precision": "bf16", "microbatches": 2},
    {"recompute": "none", "tp": 2, "tensor": "1d-sp"},
    {"recompute": "none", "pp": 2, "schedule": "zb-h1", "microbatches": 3},
]


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offload tensors of any size on a CPU; return the bytes of the copies on the host."""
    copied: list[int] = []
    original = gathered.Gathered._offloaded

    def unseen(self: Any, value: Tensor) -> Any:
        with without_modes():
            kept = original(self, value)
        if isinstance(kept, gathered.Offloaded):
            copied.append(kept.host.untyped_storage().nbytes())
        return kept

    for module in (gathered, unit_work):
        monkeypatch.setattr(module, "LEAST_OFFLOAD", 64)
    monkeypatch.setattr(gathered.Gathered, "_offloaded", unseen)
    monkeypatch.setattr(MemoryOptions, "check_device", lambda *_: None)
    return copied


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize("one", PLANS, ids=case)
@pytest.mark.parametrize("name", ["own gpt", "own llama", "bert", "mixtral balanced"])
def test_every_instruction(name: str, one: dict[str, Any], everything: list[int]) -> None:
    subject, batch = made(name, one | {"offload": "activations"})
    assert differences(subject, batch) == []
    assert sum(everything) > 1000


@pytest.mark.slow
def test_the_device_holds_less_and_the_host_what_was_copied(everything: list[int]) -> None:
    """One microbatch: between its forward and its backward the host has all of it."""
    subject, batch = made("own gpt", {"recompute": "none", "offload": "activations"})
    plain, there = (predicted(one, batch) for one in (made("own gpt", {"recompute": "none"})[0], subject))
    assert there.peak_bytes < 0.8 * plain.peak_bytes
    rows = len(next(iter(batch.values())))
    units = profile(subject.trace_of(subject.masks, rows, rows), rows, offload=True).units
    measured(subject, batch)
    assert sum(one.none.hosted for one in units) == sum(everything) // 2  # of two steps


@pytest.mark.slow
def test_on_a_gpu_the_host_has_them() -> None:
    subject, batch = made("own gpt", {"recompute": "none", "microbatches": 2, "offload": "all", "precision": "bf16"})
    rows = len(next(iter(batch.values()))) * 4096
    found = predict(lambda n: subject.trace_of((), n, rows), subject.plan, STILL, rows=rows, device="gpu")
    plan = subject.plan.replace(offload="optimizer")
    plain = predict(lambda n: subject.trace_of((), n, rows), plan, STILL, rows=rows, device="gpu")
    moved = plain.peak[Category.ACTIVATIONS] - found.peak[Category.ACTIVATIONS]
    # One microbatch is on its way at a time; several may have copies of one tensor, whose sizes are rounded up.
    assert 0 < moved < found.host[Category.ACTIVATIONS] < 6 * moved
    assert plain.host[Category.ACTIVATIONS] == 0 and found.host_bytes > plain.host_bytes > 0
