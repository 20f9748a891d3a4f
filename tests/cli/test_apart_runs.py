"""Parameter servers apart as a user runs them: to the end, interrupted, with processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_auto import shardwise

RUN = ["model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=16", "data.batch_size=4",
       "validation.every=0", "parallel.dp=2", "train.threads=1"]  # fmt: skip
LIMIT = 120.0


def given(tmp_path: Path, *more: str) -> list[str]:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"to be or not to be, that is question {number}. " * 60)
    return [*RUN, f"data.source={tmp_path}/*.txt", f"train.run_dir={tmp_path / 'run'}", *more]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def started(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardwise", "train", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def of_run(folder: Path, module: str, number: int) -> int:
    """The process of a server or worker of a run, by its command line."""
    wanted = f"shardwise.launch.{module} {folder} {number}".split()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().rstrip(b"\0").decode().split("\0")
        except OSError:
            continue
        if words[-3:] == wanted:
            return int(path.parent.name)
    raise AssertionError(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["async", "stale"])
def test_a_run_to_its_end(server: str, tmp_path: Path) -> None:
    more = ["parallel.staleness=1"] if server == "stale" else []
    arguments = given(tmp_path, f"parallel.server={server}", "parallel.server_ranks=2", "train.steps=60", *more,
                      "validation.every=20", "validation.share=0.3")  # fmt: skip
    shardwise("train", *arguments)
    folder = tmp_path / "run"
    steps, result = lines(folder / "metrics.jsonl"), json.loads((folder / "result.json").read_text())
    assert sorted(one["step"] for one in steps) == list(range(60)) and result["steps"] == 60
    assert {one["worker"] for one in steps} == {0, 1}
    assert result["lost_updates"] == 0 and sum(result["staleness"].values()) == 60
    assert steps[-1]["loss"] < steps[0]["loss"] and lines(folder / "evaluations.jsonl")
    found = json.loads(shardwise("evaluate", str(folder), "--json"))
    assert found["step"] == 60 and 0 < found["validation_loss"] < 2 * steps[0]["loss"]
    weights = load_file(folder / "weights.safetensors")
    assert all(bool(one.isfinite().all()) for one in weights.values()) and any("wte" in name for name in weights)
    for number in range(2):
        record = lines(folder / "servers" / str(number) / "record.jsonl")
        assert [one["version"] for one in record if one["event"] == "push"] == list(range(1, 61))
    assert shardwise("train", *arguments).count("this run has finished") == 1


CLICKS = Path(__file__).parents[2] / "examples" / "clicks" / "train.toml"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "dense"])
def test_a_run_with_tables_is_stopped_and_goes_on(kind: str, tmp_path: Path) -> None:
    """Of clicks as the example has them, with tables that are smaller; servers start again from their snapshots."""
    arguments = [
        str(CLICKS), f"train.run_dir={tmp_path / 'run'}", "model.arguments={buckets=30000, width=4}",
        "data.arguments={rows=8000, buckets=30000}", "validation.arguments={rows=2000, buckets=30000, part=1}",
        "validation.metrics=[]", "data.batch_size=64", "parallel.server=async", "parallel.server_ranks=2",
        "parallel.dp=2", "train.threads=1", "validation.every=0", f"parallel.sparse_gradients={kind}",
    ]  # fmt: skip
    folder, more = tmp_path / "run", "train.steps=120"
    process = started([*arguments, more])
    until(lambda: len(lines(folder / "metrics.jsonl")) >= 30, process)
    process.send_signal(signal.SIGINT)
    process.wait(LIMIT)
    shardwise("train", *arguments, more)
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == 120 and result["lost_updates"] == 0
    assert sorted(one["step"] for one in lines(folder / "metrics.jsonl")) == list(range(120))
    found = json.loads(
        shardwise("evaluate", str(folder), f'validation.metrics=["{CLICKS.parent}/clicks.py:auc"]', "--json")
    )
    assert found["auc"] > 0.53


@pytest.mark.slow
def test_a_push_of_several_batches_is_that_of_a_larger_one(tmp_path: Path) -> None:
    """A lone worker is as one device, so both runs end at the same weights."""
    found = []
    for name, more in (("several", ["parallel.push_every=3", "data.batch_size=2"]),
                       ("larger", ["parallel.microbatches=3", "data.batch_size=6"])):  # fmt: skip
        arguments = given(tmp_path, "parallel.server=async", "train.steps=12", *more, "parallel.dp=1")
        shardwise("train", *arguments, f"train.run_dir={tmp_path / name}", "parallel.precision=fp64")
        found.append(load_file(tmp_path / name / "weights.safetensors"))
        record = lines(tmp_path / name / "servers/0/record.jsonl")
        assert sum(one["event"] == "push" for one in record) == 12
    several, larger = found
    assert several.keys() == larger.keys() and all(torch.equal(several[one], larger[one]) for one in several)


@pytest.mark.slow
def test_lost_workers_and_servers_end_nothing(tmp_path: Path) -> None:
    slow = [
        "model.width=64",
        "model.layers=2",
        "data.sequence_length=64",
        "data.batch_size=8",
    ]  # enough to be killed in
    arguments = given(
        tmp_path, "parallel.server=async", "parallel.dp=3", "train.steps=400", "checkpoint.every=20", *slow
    )
    folder, process = tmp_path / "run", started(arguments)
    until(lambda: len(lines(folder / "metrics.jsonl")) > 40, process)
    os.kill(of_run(folder, "served_process", 1), signal.SIGKILL)
    until(lambda: len(lines(folder / "metrics.jsonl")) > 80, process)
    os.kill(of_run(folder, "server_process", 0), signal.SIGKILL)
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, told
    assert "worker 1 was lost (SIGKILL); 2 go on" in told
    assert "server 0 was lost (SIGKILL) and starts again from its last snapshot" in told
    result = json.loads((folder / "result.json").read_text())
    record = lines(folder / "servers/0/record.jsonl")
    again = [one for one in record if one["event"] == "restart"]
    assert len(again) == 1 and again[0]["version"] >= 20
    # a worker that is lost may have left no line of its last batch, which the servers have
    missing = set(range(400)) - {one["step"] for one in lines(folder / "metrics.jsonl")}
    of_lost = {one["ticket"] for one in record if one["event"] == "push" and one["worker"] == 1}
    assert result["lost_updates"] >= 0 and len(missing) <= 1 and missing <= of_lost
    last = [one["version"] for one in record if one["event"] == "push"][-1]
    assert last >= 400 - 20  # those that were lost and whose batches came again count once


@pytest.mark.slow
def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    arguments = given(tmp_path, "parallel.server=async", "train.steps=300", "model.width=64", "data.batch_size=8")
    folder, process = tmp_path / "run", started(arguments)
    until(lambda: len(lines(folder / "metrics.jsonl")) > 30, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of the group at once
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, told
    done = len(lines(folder / "metrics.jsonl"))
    assert 30 < done < 300 and not (folder / "result.json").exists()
    told = shardwise("train", *arguments)
    assert "going on from the servers' snapshots" in told
    assert sorted(one["step"] for one in lines(folder / "metrics.jsonl")) == list(range(300))


@pytest.mark.slow
def test_a_wrong_batch_ends_the_run_with_its_error(tmp_path: Path) -> None:
    arguments = given(tmp_path, "parallel.server=async", "train.steps=60", "optimizer.lr=1e30", "train.clip_norm=0")
    process = started(arguments)
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and "is not finite; nothing was pushed" in told


@pytest.mark.slow
def test_a_worker_that_joins_later(tmp_path: Path) -> None:
    more = ["model.width=64", "model.layers=2", "data.sequence_length=64", "data.batch_size=8"]
    arguments = given(tmp_path, "parallel.server=async", "parallel.dp=1", "train.steps=500", *more)
    folder, process = tmp_path / "run", started(arguments)
    until(lambda: len(lines(folder / "metrics.jsonl")) > 10, process)
    command = [sys.executable, "-m", "shardwise", "join", str(folder)]
    joined = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert joined.returncode == 0 and "worker 2 joins" in joined.stdout, joined.stdout + joined.stderr
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, told
    steps = lines(folder / "metrics.jsonl")
    assert {one["worker"] for one in steps} == {0, 2}
    assert sorted(one["step"] for one in steps) == list(range(500))
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert again.returncode == 2 and "it has no servers now" in again.stderr


def test_there_is_no_run_to_join(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "join", str(tmp_path)], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 2 and "there is no run" in done.stderr


@pytest.mark.slow
def test_a_worker_that_is_ended_does_not_finish_the_run(tmp_path: Path) -> None:
    more = ["model.width=64", "data.batch_size=8", "train.steps=3000"]
    arguments = given(tmp_path, "parallel.server=async", "parallel.dp=1", *more)
    folder, process = tmp_path / "run", started(arguments)
    until(lambda: len(lines(folder / "metrics.jsonl")) > 20, process)
    os.kill(of_run(folder, "served_process", 0), signal.SIGTERM)
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and "all workers were lost" in told
    assert not (folder / "result.json").exists()


@pytest.mark.slow
def test_a_snapshot_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    more = ["model.width=64", "data.batch_size=8", "train.steps=3000", "checkpoint.every=50"]
    arguments = given(tmp_path, "parallel.server=async", *more)
    folder, process = tmp_path / "run", started(arguments)
    until(lambda: len(lines(folder / "metrics.jsonl")) > 5, process)
    (folder / "servers/0/snapshot.safetensors").unlink()
    (folder / "servers/0/snapshot.safetensors").mkdir()
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and "server 0 cannot save its snapshot" in told, told
    assert not (folder / "result.json").exists()


@pytest.mark.slow
def test_a_server_that_is_lost_before_its_first_snapshot_falls_due(tmp_path: Path) -> None:
    """It starts again at version 0, and says what is lost; the weights are whole, whoever is left to write buffers."""
    more = ["model.width=64", "data.batch_size=8", "train.steps=300", "checkpoint.every=100000"]
    arguments = given(tmp_path, "parallel.server=async", "parallel.server_ranks=2", *more)
    folder, process = tmp_path / "run", started(arguments)
    until(lambda: len(lines(folder / "metrics.jsonl")) > 40, process)
    os.kill(of_run(folder, "server_process", 1), signal.SIGKILL)
    os.kill(of_run(folder, "served_process", 0), signal.SIGKILL)
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, told
    result = json.loads((folder / "result.json").read_text())
    assert result["steps"] == 300 and result["lost_updates"] >= 30
    weights = load_file(folder / "weights.safetensors")
    assert all(bool(one.isfinite().all()) for one in weights.values())
