"""Runs that are interrupted, killed, or out of disk: they go on from the last checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint import checkpoints
from shardwise.config import Hardware, load_config
from shardwise.launch.folder import prepare_folder

TINY = [
    "model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=16", "data.batch_size=4",
    "train.devices=2",
    "data.validation=0", "checkpoint.every=20", "model.dropout=0.1",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "COLUMNS": "80"}
ALONE = ("train.devices=1", "train.threads=1")  # where it is about files, not about ranks
STEPS = 200


class Command:
    """A ``shardwise train`` under way."""

    def __init__(self, folder: Path, text: str, *more: str, steps: int = STEPS) -> None:
        arguments = ["train", *TINY, text, f"train.steps={steps}", f"train.run_dir={folder}", *more]
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwise", *arguments], env=ENVIRONMENT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def end(self, seconds: float = 100.0) -> str:
        try:
            output, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return output

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 60
        while len(metrics(self.folder)) <= step:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def ranks(self) -> list[psutil.Process]:
        found = [p for p in psutil.Process(self.process.pid).children() if "shardwise.launch.worker" in p.cmdline()]
        return sorted(found, key=lambda p: int(p.environ()["RANK"]))

    def kill(self) -> None:
        """SIGKILL to the launcher and all ranks, as by a power cut."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        self.process.communicate()
        psutil.wait_procs(processes, timeout=10)


def metrics(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(one["step"], one["loss"], one["grad_norm"]) for one in metrics(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    command = Command(folder, text)
    output = command.end()
    assert command.process.returncode == 0, output
    steps = STEPS - 20, STEPS
    assert [path.name for path in checkpoints(folder / "checkpoints")] == [f"step_{step:08d}" for step in steps]
    return folder


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """A finished run of four steps on one rank, to be copied."""
    folder = tmp_path_factory.mktemp("short") / "run"
    command = Command(folder, text, *ALONE, steps=4)
    output = command.end()
    assert command.process.returncode == 0 and (folder / "weights.safetensors").exists(), output
    return folder


def same(folder: Path, whole: Path) -> None:
    """Every step once, with the losses of the undisturbed run: no gap, no repeat; the weights bit for bit."""
    assert curve(folder) == curve(whole)
    ours, theirs = (load_file(path / "weights.safetensors") for path in (folder, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint(tmp_path: Path, text: str, whole: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    command = Command(folder, text)
    command.wait_for_step(30)
    command.process.send_signal(number)
    output = command.end()
    assert command.process.returncode == 130, output
    last = checkpoints(folder / "checkpoints")[-1]
    done = len(metrics(folder))
    assert last.name == f"step_{done:08d}" and 30 < done < STEPS
    assert f"stopped after {done} steps, with a checkpoint" in " ".join(output.split())
    again = Command(folder, text)
    output = again.end()
    assert again.process.returncode == 0 and f"going on from step {done}" in " ".join(output.split()), output
    same(folder, whole)


def test_a_killed_rank_costs_seconds(tmp_path: Path, text: str, whole: Path) -> None:
    folder = tmp_path / "run"
    command = Command(folder, text)
    command.wait_for_step(50)
    victim = command.ranks()[1]
    victim.kill()
    killed = time.time()
    output = " ".join(command.end().split())
    assert command.process.returncode == 0, output
    assert "rank 1 was killed (SIGKILL" in output and "starting again from step_000000" in output
    same(folder, whole)
    log = (folder / "logs" / "launcher.log").read_text()
    assert "rank 1 was killed" in log and "restart 1 of 3" in log and log.count("starting the ranks") == 2
    ready = (folder / "logs" / "rank_0.log").read_text().split("ready after ")
    assert len(ready) == 3 and "capturing the model" in ready[2]  # every phase timed
    about = folder / "about.json"
    seconds = about.stat().st_mtime - killed
    assert seconds < 20, f"training again {seconds:.1f} s after the kill"  # 10 where other tests do not take the cores


def test_restarts_end(tmp_path: Path, text: str) -> None:
    """A rank that is lost again and again without any new checkpoint."""
    folder = tmp_path / "run"
    command = Command(folder, text, "train.max_restarts=1", "checkpoint.every=0", steps=100000)
    for times in range(2):
        command.wait_for_step(3)
        command.ranks()[times].kill()
        time.sleep(1)
        deadline = time.monotonic() + 30
        while command.process.poll() is None and len(metrics(folder)) > 3 and time.monotonic() < deadline:
            time.sleep(0.02)  # the second attempt begins a new file
    output = command.end()
    assert command.process.returncode == 1
    assert output.count("starting again from the beginning") == 1 and "rank 1 was killed" in output, output


def kills(folder: Path, text: str, whole: Path, count: int, seed: int, steps: int = STEPS) -> None:
    """Kill everything at random moments, saves included, until the run ends; then it must be as if nobody had."""
    moments = random.Random(seed)
    best = -1
    for _ in range(count):
        command = Command(folder, text, "checkpoint.every=1", steps=steps)
        try:
            command.wait_for_step(max(best, 0) + moments.randrange(4))
            time.sleep(moments.random() * 0.05)
        finally:
            command.kill()
        found = checkpoints(folder / "checkpoints")
        last = int(found[-1].name.removeprefix("step_")) if found else 0
        assert last >= best, f"step {best} was saved, and now only step {last} is there"
        best = last
    command = Command(folder, text, "checkpoint.every=100", steps=steps)
    output = command.end()
    assert command.process.returncode == 0, output
    same(folder, whole)


def test_kills_at_random_moments(tmp_path: Path, text: str, whole: Path) -> None:
    kills(tmp_path / "run", text, whole, 2, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_fifty_kills_at_random_moments(tmp_path: Path, text: str) -> None:
    command = Command(tmp_path / "whole", text, steps=1200)
    output = command.end()
    assert command.process.returncode == 0, output
    kills(tmp_path / "run", text, tmp_path / "whole", 50, seed=2, steps=1200)


def test_a_full_disk_costs_a_checkpoint_not_the_run(tmp_path: Path, text: str, whole: Path) -> None:
    """A mount of a few hundred KiB, filled while the run goes on and freed again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        folder = disk / "run"
        command = Command(folder, text)
        command.wait_for_step(45)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        time.sleep(0.5)
        before = len(checkpoints(folder / "checkpoints"))
        filler.unlink()
        output = command.end()
        assert before >= 1 and command.process.returncode == 0, output
        words = " ".join(output.split())
        assert "was not saved: " in words and "the last good one is" in words, output
        ours, theirs = (load_file(path / "weights.safetensors") for path in (folder, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def test_what_is_in_the_folder(tmp_path: Path, text: str, short: Path) -> None:
    """A finished run is set aside or gets more steps; an unfinished one of another configuration is refused; "never"
    sets it aside.
    """
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    first = Command(folder, text, *ALONE, steps=4)
    assert "the earlier run is now in" in first.end() and (tmp_path / "run-1" / "weights.safetensors").exists()
    unfinished = Command(folder, text, *ALONE, steps=8)  # longer than the last checkpoint: it goes on
    assert "going on from step 4" in unfinished.end() and len(metrics(folder)) == 8
    (folder / "result.json").unlink()  # as if it had been cut off
    other = Command(folder, text, *ALONE, "model.width=32", steps=12)
    output = " ".join(other.end().split())
    assert other.process.returncode == 2 and "model.width: 16 → 32" in output and "train.resume" in output, output
    anew = Command(folder, text, *ALONE, "model.width=32", "train.resume=never", steps=4)
    assert "the earlier run is now in" in anew.end() and len(metrics(folder)) == 4
    assert len(metrics(tmp_path / "run-2")) == 8


@pytest.mark.full
def test_sigterm_to_all_processes(tmp_path: Path, text: str, whole: Path) -> None:
    """As service managers and schedulers send it: launcher and ranks at once."""
    folder = tmp_path / "run"
    command = Command(folder, text)
    command.wait_for_step(30)
    for process in (psutil.Process(command.process.pid), *command.ranks()):
        process.send_signal(signal.SIGTERM)
    output = command.end()
    assert command.process.returncode == 130 and "with a checkpoint; the same command" in " ".join(output.split()), (
        output
    )
    assert "starting again" not in output
    assert checkpoints(folder / "checkpoints")[-1].name == f"step_{len(metrics(folder)):08d}"


def test_cut_between_the_last_checkpoint_and_the_result(tmp_path: Path, text: str, short: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    for name in ("result.json", "weights.safetensors"):
        (folder / name).unlink()
    before = (folder / "metrics.jsonl").read_text()
    fewer = Command(folder, text, *ALONE, steps=3)
    assert "is at step 4 already" in " ".join(fewer.end().split()) and fewer.process.returncode == 2
    again = Command(folder, text, *ALONE, steps=4)
    output = again.end()
    assert again.process.returncode == 0 and "going on from step 4" in output, output
    assert (folder / "metrics.jsonl").read_text() == before and (folder / "weights.safetensors").exists()
    assert not (tmp_path / "run-1").exists()


@pytest.mark.full
def test_a_disk_that_stays_full(tmp_path: Path, text: str) -> None:
    """The run ends with the reason, and is not started again in vain."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        command = Command(disk / "run", text)
        command.wait_for_step(45)
        with (disk / "filler").open("wb", buffering=0) as file:
            while command.process.poll() is None:  # what old checkpoints leave is taken at once
                with suppress(OSError):
                    while file.write(bytes(1024)):
                        pass
                time.sleep(0.005)
        output = " ".join(command.end().split())
        assert command.process.returncode == 1, output
        assert "No space left on device" in output.partition("error: ")[2] and "starting again" not in output, output
        assert len(checkpoints(disk / "run" / "checkpoints")) >= 1
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def test_setting_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    monkeypatch.chdir(folder)
    for number in (1, 2):
        config = load_config(None, ["train.run_dir=."], hardware=Hardware(cores=2))
        (folder / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        assert prepare_folder(config).notices == [f"the earlier run is now in {tmp_path}/run-{number}"]
        assert (tmp_path / f"run-{number}" / "metrics.jsonl").read_text() == f'{{"step": {number}}}\n'
    assert prepare_folder(config).notices == []
