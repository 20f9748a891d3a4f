"""The memory of a step as it is: beside what was predicted, and without a trace in the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Unseen
from shardwise.config import build_model, build_optimizer
from shardwise.core.errors import ConfigError
from shardwise.core.layout import rank_rows
from shardwise.data.loader import Batch
from shardwise.estimate.devices import GIB, Device
from shardwise.initial.initial import record
from shardwise.initial.values import Values
from shardwise.launch.forecast import Forecast
from shardwise.launch.forecast_shown import account
from shardwise.launch.measuring import StepMemory, model_states, write_memory
from shardwise.launch.subject import forecast, load_anywhere
from shardwise.lower.compiled import Compiled
from shardwise.measure.storage_tracker import StorageTracker
from shardwise.report.files import MEMORY
from shardwise.report.memory import MemoryProfile, read_memory
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks

TINY = [
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "data.sequence_length=16",
    "data.batch_size=12",
    "optimizer.lr=1e-2",
]
STEPS = 3


def plans() -> list[tuple[str, ...]]:
    found = [("parallel.dp=2", f"parallel.zero={z}", f"parallel.microbatches={m}") for z in range(4) for m in (1, 3)]
    found += [("parallel.dp=1", f"parallel.precision={p}") for p in ("fp32", "bf16", "fp16", "fp64")]
    found += [
        ("parallel.dp=3", "parallel.zero=3", "parallel.precision=bf16", f"parallel.recompute={r}")
        for r in ("selective", "full")
    ]
    found += [
        ("parallel.dp=2", "parallel.zero=3", "parallel.microbatches=2", f"parallel.gathered={g}")
        for g in ("use", "forward")
    ]
    found += [("parallel.dp=2", "parallel.zero=2", "parallel.offload=optimizer", "parallel.precision=bf16")]
    found += [("parallel.dp=4", "parallel.zero=2", "parallel.dp_replicate=2", "data.batch_size=16", "model.name=llama")]
    return found


def subject(*plan: str) -> Forecast:
    return forecast(load_anywhere(None, [*TINY, *plan]), Device("cpu", "cpu", 64 * GIB, 64 * GIB))


def real(found: Forecast) -> Compiled:
    values = Values.of_recorded(record(build_model(found.config)[0], seed=0), 0)
    return Compiled(values.module, found.plan, found.compiled.example, initial=values)


def trained(found: Forecast, measure: bool) -> list[tuple[MemoryProfile | None, dict[str, Any], list[float]]]:
    """Of each rank: the account of its second step, its parameters at the end, its losses."""
    rows = found.config.data.batch_size
    compiled, generator = real(found), torch.Generator().manual_seed(0)
    batches = [
        {k: torch.randint(0, 256, (rows, *v.shape[1:]), generator=generator) for k, v in compiled.example.items()}
        for _ in range(STEPS)
    ]

    def rank(comm: Any) -> tuple[MemoryProfile | None, dict[str, Any], list[float]]:
        tracker: list[StorageTracker] = []
        engine = Engine(compiled, Unseen(comm, tracker), build_optimizer(found.config), clip_norm=1.0)  # type: ignore[arg-type]
        own = rank_rows(rows, found.plan.microbatches, comm.mesh.size, comm.rank)
        measured, losses = None, []
        for step, batch in enumerate(batches):
            fields = {k: torch.cat([v[a:b] for a, b in own]) for k, v in batch.items()}
            if measure and step == 1:
                with StepMemory(engine, str) as memory:
                    tracker.append(memory._source)  # type: ignore[arg-type]
                    given = memory.taking(iter([Batch(fields, rows, (), ())]))
                    result = engine.step(given.fields, rows)
                tracker.clear()
                measured = memory.account()
            else:
                result = engine.step(fields, rows)
            losses.append(float(result.loss))
        return measured, engine.state_dict(), losses

    return run_ranks(found.plan.mesh, rank, timeout=60)


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("plan", plans(), ids=" ".join)
def test_a_measured_step_is_as_predicted_and_its_numbers_are_the_same(plan: tuple[str, ...]) -> None:
    found = subject(*plan)
    measured, plain = trained(found, True), trained(found, False)
    for index, ((seen, state, losses), (nothing, other, others)) in enumerate(zip(measured, plain, strict=True)):
        predicted = account(found.predict(found.plan, index))
        assert nothing is None and seen is not None and seen.rank == index
        assert seen.instructions == predicted.instructions
        for category in ("parameters", "gradients", "optimizer"):
            assert seen.between[category] == predicted.between.get(category, 0), category
        assert seen.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.005)
        assert sum(seen.peaks[predicted.at].values()) == pytest.approx(predicted.peak_bytes, rel=0.005)
        for category in ("activations", "temporary"):
            assert seen.peak[category] == pytest.approx(predicted.peak[category], abs=0.01 * predicted.peak_bytes), (
                category
            )
        assert losses == others  # bit for bit
        assert all(torch.equal(state[name], other[name]) for name in state)


def test_memory_that_buffers_share_counts_once() -> None:
    """The masters of fp32 are the parameters, and a shard lies in its bucket."""
    found = subject("parallel.dp=2", "parallel.zero=1")
    compiled = real(found)

    def rank(comm: Any) -> dict[str, int]:
        return model_states(Engine(compiled, comm, build_optimizer(found.config)), "cpu")

    sizes = run_ranks(found.plan.mesh, rank, timeout=60)[0]
    numel = sum(p.numel() for p in found.compiled.module.parameters())
    assert 4 * numel <= sizes["parameters"] <= 4 * numel * 1.02 and 4 * numel <= sizes["gradients"] <= 4 * numel * 1.02
    assert sizes["optimizer"] == pytest.approx(4 * numel, rel=0.02)  # two tensors of half the parameters


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    found = subject("parallel.dp=2")
    write_memory(tmp_path / MEMORY, found)
    values = read_memory(tmp_path)
    assert values["measured"] is None and values["budget_bytes"] == 64 * GIB and values["title"].startswith("gpt, ")
    assert values["predicted"] == account(found.predict(found.plan, 0))
    write_memory(tmp_path / MEMORY, found, values["predicted"])
    assert read_memory(tmp_path)["measured"] == values["predicted"]
    text = (tmp_path / MEMORY).read_text()
    for damage in (text[:-40], "{}", "[]", json.dumps({**json.loads(text), "measured": {"rank": 0}})):
        (tmp_path / MEMORY).write_text(damage)
        with pytest.raises(ConfigError, match=r"memory.json: damaged: .*; legal: the folder of a run"):
            read_memory(tmp_path)
    with pytest.raises(ConfigError, match="memory.json: cannot be read: No such file"):
        read_memory(tmp_path / "elsewhere")
