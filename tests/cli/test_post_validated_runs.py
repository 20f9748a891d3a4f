"""Post-validated updates as a user runs them: the numbers are those with a barrier, the memory is as predicted, and a
run goes on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_auto import shardwise

RUN = ["model.width=16", "model.layers=2", "model.heads=2", "data.sequence_length=16", "data.batch_size=8",
"validation.every=0",
       "parallel.pp=2", "parallel.microbatches=4", "parallel.schedule=zb-h2", "parallel.window=8", "checkpoint.every=5",
       "train.trace_steps=[6]", "train.clip_norm=1.4",
       "optimizer.schedule=constant", "optimizer.warmup_steps=0"]  # fmt: skip


@pytest.mark.full
def test_a_run_has_the_numbers_of_one_with_a_barrier(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    given = [*RUN, f"data.source={tmp_path / 'text.txt'}"]
    once, twice = tmp_path / "once", tmp_path / "twice"
    shardwise("train", *given, f"train.run_dir={once}", "train.steps=12", "parallel.norm=barrier")
    for steps in (5, 12):
        shardwise("train", *given, f"train.run_dir={twice}", f"train.steps={steps}", "parallel.norm=post-validate")
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (once, twice)]
    assert [one["step"] for one in lines[1]] == list(range(12))
    assert [(one["loss"], one["grad_norm"]) for one in lines[0]] == [
        (one["loss"], one["grad_norm"]) for one in lines[1]
    ]
    first, second = (load_file(run / "weights.safetensors") for run in (once, twice))
    assert all(bool((first[name] == second[name]).all()) for name in first)

    assert not any("repeated" in one for one in lines[0])
    again = {one["step"]: one["repeated"] for one in lines[1] if "repeated" in one}
    assert set(again) == {*range(12)} - {4, 9, 11}  # windows end at checkpoints and with the run
    assert again == {step: int(lines[0][step]["grad_norm"] > 1.4) for step in again} and 0 < sum(again.values()) < len(
        again
    )
    assert json.loads((twice / "result.json").read_text())["repeated"] == sum(again.values())

    memory = json.loads((twice / "memory.json").read_text())
    predicted, measured = memory["predicted"]["peak_bytes"], memory["measured"]["peak_bytes"]
    assert abs(predicted - measured) <= 0.05 * measured
    (simulated,) = json.loads(shardwise("simulate", *given, "parallel.norm=post-validate", "--json"))["simulations"]
    assert simulated["norm"] == "post-validate" and simulated["bubble_of_total"] < 0.01
    assert "step 6 of 2 ranks, recorded" in " ".join(shardwise("draw", str(twice)).split())
    (own,) = json.loads(shardwise("simulate", str(twice), "--json"))["simulations"]
    assert (own["norm"], own["microbatches"]) == ("post-validate", 4), "one batch of the recorded window"
    recorded = json.loads((twice / "trace" / "rank_0.jsonl").read_text().splitlines()[0])["events"]
    forwards = [event for event in recorded if event[0] == "FORWARD"]
    assert {event[3] for event in forwards} == set(range(20)), "five batches of four microbatches"
    lasting = [(event[2], event[3], event[7]) for event in forwards if event[8]]
    assert len(set(lasting)) == len(lasting)
    dropped = {event[3] // 4 for event in forwards if not event[8]}
    assert dropped == {step - 4 for step in range(5, 9) if again[step]}, "of the batches after those that were wrong"
