"""Schedule ``auto`` as a user runs it: real processes, measured, told, trained, simulated, and gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.core.plan import Plan
from shardwise.core.schedules import SCHEDULES
from shardwise.report.timetable import milliseconds

RUN = ["model.width=16", "model.layers=2", "model.heads=2", "data.sequence_length=16", "data.batch_size=8",
"validation.every=0",
       "parallel.pp=2", "parallel.microbatches=4", "parallel.schedule=auto", "train.trace_steps=[1]"]  # fmt: skip


def shardwise(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *arguments], capture_output=True, text=True, timeout=150, check=False,
        env={**os.environ, "COLUMNS": "1000"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_finds_its_order_and_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    folder = tmp_path / "run"
    given = [*RUN, f"data.source={tmp_path / 'text.txt'}", f"train.run_dir={folder}"]
    told = shardwise("train", *given, "train.steps=3")
    plan = Plan.from_toml((folder / "plan.toml").read_text())
    options = plan.pipeline
    assert options.schedule == "auto" and len(options.timetable) == 2 and sum(options.stages) == 4
    note = " ".join(told.split()).partition('note: parallel.schedule = "auto": ')[2]
    assert f"{options.stages_per_rank} stage" in note and f"of {list(options.stages)} units" in note
    assert "search" in note

    chosen, ran = json.loads(shardwise("simulate", str(folder), "--json"))["simulations"]
    assert (
        f" {milliseconds(chosen['step_seconds'])} a step simulated, bubble {chosen['bubble_of_total']:.2%} of total"
        in note
    )
    assert "as it ran" in ran["title"]
    (again,) = json.loads(shardwise("simulate", str(folder), "--schedule", "auto", "--json"))["simulations"]
    assert again["step_seconds"] == chosen["step_seconds"]
    others = [
        name
        for name in SCHEDULES
        if SCHEDULES[name].takes(plan.pipeline.stages_per_rank) and name in ("gpipe", "1f1b", "zb-h1", "zbv")
    ]
    known = json.loads(shardwise("simulate", str(folder), *(f"--schedule={name}" for name in others), "--json"))[
        "simulations"
    ]
    assert len(known) == len(others) and all(
        one["step_seconds"] >= chosen["step_seconds"] * (1 - 1e-8) for one in known
    )
    assert list(dict.fromkeys(_tasks(folder))) == [
        word.replace("I", "B") for word in plan.pipeline.timetable[0].split() if word[0] != "W"
    ]

    more = shardwise("train", *given, "train.steps=5")
    assert Plan.from_toml((folder / "plan.toml").read_text()) == plan
    assert 'note: parallel.schedule = "auto": the order of' in " ".join(more.split())
    losses = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in losses] == list(range(5)), "nothing was written while units were measured"
    assert losses[0]["loss"] == pytest.approx(5.5, abs=0.3) and losses[-1]["loss"] < losses[0]["loss"]


@pytest.mark.slow
def test_an_order_of_ones_own() -> None:
    """Is simulated as it is, and verified."""
    texts = ["F0.0 F0.1 B0.0 I0.1 W0.1", "F1.0 B1.0 F1.1 I1.1 W1.1"]
    given = [
        *RUN[:6],
        "parallel.pp=2",
        "parallel.schedule=auto",
        "parallel.microbatches=2",
        f"parallel.timetable={json.dumps(texts)}",
    ]
    (found,) = json.loads(shardwise("simulate", *given, "--times", "1,1,1,0", "--json"))["simulations"]
    assert found["title"].startswith("auto: the config's") and found["step_seconds"] == pytest.approx(8e-3)
    shardwise("verify", *given)  # ends with 0 only if all errors are at most 1e-10


def _tasks(folder: Path) -> Iterator[str]:
    """Of the first rank in the recorded step, I as B."""
    (line,) = (folder / "trace" / "rank_0.jsonl").read_text().splitlines()
    kinds = {"FORWARD": "F", "BACKWARD": "B", "BACKWARD_INPUT": "B"}
    for op, _, stage, microbatch, *_ in json.loads(line)["events"]:
        if op in kinds and stage >= 0:
            yield f"{kinds[op]}{stage}.{microbatch}"
