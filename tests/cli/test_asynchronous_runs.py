"""Asynchronous pipelines as a user runs them: real processes, windows between checkpoints, going on, memory, a recorded
window.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_auto import shardwise

RUN = ["model.width=16", "model.layers=2", "model.heads=2", "data.sequence_length=16", "data.batch_size=8",
"validation.every=0",
       "parallel.pp=2", "parallel.microbatches=2", "parallel.schedule=pipedream-2bw", "parallel.window=8",
       "checkpoint.every=5",
       "train.trace_steps=[6]", "optimizer.schedule=constant", "optimizer.warmup_steps=0"]  # fmt: skip


@pytest.mark.full
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    given = [*RUN, f"data.source={tmp_path / 'text.txt'}"]
    once, twice = tmp_path / "once", tmp_path / "twice"
    shardwise("train", *given, f"train.run_dir={once}", "train.steps=12")
    for steps in (5, 12):
        shardwise("train", *given, f"train.run_dir={twice}", f"train.steps={steps}")
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (once, twice)]
    assert [one["step"] for one in lines[0]] == list(range(12))
    assert [(one["step"], one["loss"], one["grad_norm"]) for one in lines[0]] == [
        (one["step"], one["loss"], one["grad_norm"]) for one in lines[1]
    ]
    first, second = (load_file(run / "weights.safetensors") for run in (once, twice))
    assert all(bool((first[name] == second[name]).all()) for name in first)

    seconds = [one["step_seconds"] for one in lines[0][1:]]
    assert min(seconds) > 0.1 * max(seconds), "each step has its own time, though results come late and together"

    memory = json.loads((once / "memory.json").read_text())
    predicted, measured = memory["predicted"]["peak_bytes"], memory["measured"]["peak_bytes"]
    assert abs(predicted - measured) <= 0.05 * measured
    drawn = " ".join(shardwise("draw", str(once)).split())
    assert "step 6 of 2 ranks, recorded" in drawn
    recorded = json.loads((once / "trace" / "rank_0.jsonl").read_text().splitlines()[0])
    assert {event[3] for event in recorded["events"] if event[0] == "FORWARD"} == set(range(10)), (
        "five batches of two microbatches"
    )
