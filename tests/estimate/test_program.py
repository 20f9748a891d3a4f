"""Every instruction of real steps on the CPU: bytes before it and at its peak are, to the byte, what was predicted on meta."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from real import compiled, differences, measured, predicted

import zoo
from shardwise.core.instruction import Op
from shardwise.core.optim import OptimizerChoice
from shardwise.estimate.timeline import total
from shardwise.models import GPT
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import run_ranks
from shardwise.trace.profile import profile
from shardwise.trace.tracker import StorageTracker

KNOWN = [n for n in zoo.NAMES if n != "own tagger"]  # an LSTM is composed otherwise on meta, and said to be unknown
CASES = [("fp32", "none", 1), ("fp32", "full", 2), ("bf16", "none", 2), ("bf16", "full", 3), ("fp64", "full", 1)]
FEW = ["own gpt", "own llama", "own mlp", "own convnet", "own pairs", "bert", "mixtral", "resnet"]


@pytest.mark.parametrize(("precision", "recompute", "microbatches"), CASES)
@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.full) for n in KNOWN])
def test_every_instruction(name: str, precision: str, recompute: str, microbatches: int) -> None:
    model = zoo.make(name)
    subject = compiled(model.module, model.batch, model.loss, precision, microbatches, recompute)
    assert subject.general.opaque is None
    assert differences(subject, model.batch) == []


@pytest.mark.parametrize(("precision", "dropout"), [("fp32", 0.0), ("fp32", 0.1), ("bf16", 0.0)])
def test_torch_s_own_allocator_agrees(precision: str, dropout: float, tmp_path: Path) -> None:
    """Temporaries inside kernels, which the tracker cannot see, are nothing at the peak of a GPT: torch's profiler sees all."""
    torch.manual_seed(0)
    # Large enough that scores and masks are worked on in several pieces, of which the prediction walks the first two.
    module = GPT(vocabulary=8192, width=64, layers=2, heads=4, context=192, dropout=dropout)
    batch = {n: torch.randint(0, 8192, (4, 192)) for n in ("input_ids", "labels")}
    subject = compiled(module, batch, None, precision)

    def rank(comm: Any) -> int:
        engine = Engine(subject, comm, OptimizerChoice("adamw", lr=0.0))
        engine.step(batch, 4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            engine.step(batch, 4)
        seen.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
        return max(itertools.accumulate(size for _, size in sorted(changes, key=lambda c: c[0])))

    real = run_ranks(subject.plan.mesh, rank, timeout=60)[0]
    assert abs(predicted(subject, batch).peak_bytes - real) <= 64  # the step's scalars


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "optimizer", [OptimizerChoice("adamw"), OptimizerChoice("nadam", weight_decay=0.1)], ids=lambda c: c.name
)
def test_a_whole_step_with_model_states(optimizer: OptimizerChoice, precision: str) -> None:
    """From before the engine is made: AdamW's peak is in backward, NAdam's in the update, which copies what it may undo."""
    torch.manual_seed(0)
    module = GPT(vocabulary=512, width=64, layers=2, heads=4, context=32)
    batch = {n: torch.randint(0, 512, (4, 32)) for n in ("input_ids", "labels")}
    subject = compiled(module, batch, None, precision, 1, "full")
    ours = predicted(subject, batch, optimizer)
    assert (ours.instructions[ours.at].op is Op.STEP) == (optimizer.name == "nadam")

    def rank(comm: Any) -> tuple[int, int]:
        tracker = StorageTracker()
        with tracker:
            engine = Engine(subject, comm, optimizer)
            kept = tracker.mark()
            engine.step(batch, 4)
        return kept, tracker.peak

    kept, peak = run_ranks(subject.plan.mesh, rank, timeout=60)[0]
    assert kept == total(ours.moments[0].before) + 4  # whether steps are halted
    assert 0 <= peak - ours.peak_bytes <= 64  # the step's scalars


def test_an_op_that_meta_composes_otherwise_is_named() -> None:
    model = zoo.make("own tagger")
    subject = compiled(model.module, model.batch, model.loss)
    assert profile(subject.general, 7).units[0].unknown == ("aten.lstm.input",)
    assert differences(subject, model.batch)


def test_recomputation_and_microbatches_show_in_the_peak() -> None:
    """Not only do both sides agree: less is held where less is to be held."""
    model = zoo.make("own gpt")
    peaks = {}
    for recompute, microbatches in (("none", 1), ("none", 2), ("full", 1)):
        subject = compiled(model.module, model.batch, model.loss, "fp32", microbatches, recompute)
        ours, truth = predicted(subject, model.batch), measured(subject, model.batch)
        computing = [s.peak - truth[0].before for s in truth if s.instruction.op in (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD)]
        assert ours.peak_bytes == max(computing)
        peaks[recompute, microbatches] = total(ours.peak)
    assert peaks["full", 1] < 0.7 * peaks["none", 1] and peaks["none", 2] < 0.7 * peaks["none", 1]
