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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint import checkpoints
from shardwise.config import Hardware, load_config
from shardwise.launch.begin import begun, settle, stage
from shardwise.launch.folder import FoundRun, look
from shardwise.report.files import current, logs
from shardwise.runtime.progress import read_record

TINY = [
    "model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=16", "data.batch_size=4",
    "train.devices=2",
    "validation.share=0", "checkpoint.every=20", "model.dropout=0.1",
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.full
def test_kills_at_random_moments(tmp_path: Path, text: str, whole: Path) -> None:
    kills(tmp_path / "run", text, whole, 2, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_fifty_kills_at_random_moments(tmp_path: Path, text: str) -> None:
    command = Command(tmp_path / "whole", text, steps=1200)
    output = command.end()
    assert command.process.returncode == 0, output
    kills(tmp_path / "run", text, tmp_path / "whole", 50, seed=2, steps=1200)


@pytest.mark.slow
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
            deadline = time.monotonic() + 60
            while "was not saved" not in told(folder):  # full until a checkpoint was tried, however slow the machine is
                assert command.process.poll() is None, command.process.communicate()[0]
                assert time.monotonic() < deadline
                with suppress(OSError):
                    while file.write(bytes(4096)):
                        pass
                time.sleep(0.005)
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


def left(folder: Path) -> dict[str, bytes]:
    """What a run has left in its folder, but for logs, which only grow, and what belongs to whoever runs there."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {str(path.relative_to(folder)): path for path in files}
    ours = (".lock", ".ranks", "monitor/", "starting/", "logs/")
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(ours)}


@pytest.mark.slow
def test_a_finished_run_says_so(tmp_path: Path, text: str, short: Path) -> None:
    """The same command shows its result and exits with 0, at once; more steps go on; another config is refused, with
    how to go on; "never" sets the run aside once the new one has begun.
    """
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    before = left(folder)
    again = Command(folder, text, *ALONE, steps=4)
    output = " ".join(again.end().split())
    assert again.process.returncode == 0 and f"this run has finished: 4 steps, in {folder}" in output, output
    assert "result" in output and "train.resume=never" in output and "starting" not in output
    machine = Command(folder, text, *ALONE, "train.hang_timeout=5", "--json", steps=4)  # changes no result
    found = json.loads(machine.end())
    assert found["already_finished"] and found["loss_last"] == json.loads(before["result.json"])["loss_last"]
    for change, words in (("optimizer.lr=0.1", "optimizer.lr: 0.003 → 0.1"), ("train.steps=3", "train.steps: 4 → 3")):
        other = Command(folder, text, *ALONE, change, steps=4)
        output = " ".join(other.end().split())
        assert other.process.returncode == 2 and "a finished run of another configuration is there" in output, output
        assert f"({words})" in output and "another train.run_dir" in output and 'train.resume = "never"' in output
    assert left(folder) == before and not (folder / "starting").exists()
    longer = Command(folder, text, *ALONE, steps=8)
    assert "going on from step 4" in longer.end() and len(metrics(folder)) == 8
    assert json.loads((folder / "result.json").read_text())["steps"] == 8
    (folder / "result.json").unlink()  # as if it had been cut off
    other = Command(folder, text, *ALONE, "model.width=32", steps=12)
    output = " ".join(other.end().split())
    assert other.process.returncode == 2 and "model.width: 16 → 32" in output and "train.resume" in output, output
    before = left(folder)
    anew = Command(folder, text, *ALONE, "model.width=32", "train.resume=never", steps=4)
    assert "the earlier run is now in" in anew.end() and len(metrics(folder)) == 4
    assert left(tmp_path / "run-1") == before and (tmp_path / "run-1" / "logs" / "rank_0.log").exists()
    log = (folder / "logs" / "rank_0.log").read_text()
    assert log.count("ready after") == 1 and not (folder / "starting").exists()
    assert load_config(folder / "config.toml").model.width == 32


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("more", [("train.resume=never", "model.width=32"), ("train.steps=9",)], ids=["anew", "longer"])
def test_a_start_that_fails_leaves_the_earlier_run_whole(
    tmp_path: Path, text: str, short: Path, more: tuple[str, ...]
) -> None:
    """In the ranks, by an error, by a kill, and by Ctrl-C; a start that succeeds then finds what was there."""
    folder = tmp_path / "run"
    shutil.copytree(short, folder)
    before, log = left(folder), (folder / "logs" / "rank_0.log").read_text()
    refused = Command(folder, text, *ALONE, *more, "train.memory_gib=1e-6", steps=4)
    output = refused.end()
    assert refused.process.returncode == 2 and "memory" in output, output
    assert left(folder) == before and not (tmp_path / "run-1").exists()
    building(folder, text, *more).kill()
    assert left(folder) == before and not (tmp_path / "run-1").exists()
    stopped = building(folder, text, *more)
    stopped.process.send_signal(signal.SIGINT)
    output = " ".join(stopped.end().split())
    assert stopped.process.returncode == 130 and f"{folder} is as it was" in output, output
    assert left(folder) == before and not (tmp_path / "run-1").exists()
    assert (folder / "logs" / "rank_0.log").read_text().startswith(log)
    again = Command(folder, text, *ALONE, steps=4)
    assert "this run has finished" in again.end()


def building(folder: Path, text: str, *more: str) -> Command:
    """A run whose rank builds its model."""
    (folder / "monitor" / "rank_0").unlink(missing_ok=True)  # what an earlier rank did
    command = Command(folder, text, *ALONE, *more, steps=4)
    wait_for(lambda: doing(folder) == "building the model", command)
    return command


def doing(folder: Path) -> str:
    record = read_record(folder, 0)
    return "" if record is None else record.doing


def told(folder: Path) -> str:
    """What the ranks have last told the user, which takes no room on the disk."""
    records = [read_record(folder, rank) for rank in range(2)]
    return " ".join(one.notice for one in records if one is not None)


def wait_for(happens: Callable[[], bool], command: Command, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert command.process.poll() is None, command.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


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


@pytest.mark.slow
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
    (folder / "logs").mkdir()
    monkeypatch.chdir(folder)
    for number in (1, 2):
        config = load_config(None, ["train.run_dir=."], hardware=Hardware(cores=2))
        (folder / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        assert look(config) == FoundRun()
        stage(Path(), config.resolved(), anew=True)
        assert (folder / "metrics.jsonl").exists() and (folder / "starting" / "config.toml").exists()
        assert logs(folder) == folder / "starting" / "logs" and not begun(folder)
        assert settle(Path(), 0) == [f"the earlier run is now in {tmp_path}/run-{number}"]
        assert (tmp_path / f"run-{number}" / "metrics.jsonl").read_text() == f'{{"step": {number}}}\n'
        assert (folder / "config.toml").exists() and logs(folder) == folder / "logs" and (folder / "logs").is_dir()
    stage(Path(), config.resolved(), anew=True)
    assert settle(Path(), 0) == [] and not (tmp_path / "run-3").exists()  # nothing there is worth keeping


def test_a_run_that_goes_on_cuts_its_records_only_when_it_has_begun(tmp_path: Path) -> None:
    for name, count in (("metrics.jsonl", 5), ("evaluations.jsonl", 5)):
        (tmp_path / name).write_text("".join(f'{{"step": {step}}}\n' for step in range(count)))
    (tmp_path / "result.json").write_text("{}")
    stage(tmp_path, "", anew=False)
    assert logs(tmp_path) == tmp_path / "logs" and current(tmp_path, "plan.toml") == tmp_path / "starting" / "plan.toml"
    assert len(metrics(tmp_path)) == 5 and (tmp_path / "result.json").exists()
    current(tmp_path, "plan.toml").write_text("new")
    assert settle(tmp_path, 3) == [] and len(metrics(tmp_path)) == 3
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 4  # of the weights after a step
    assert (tmp_path / "plan.toml").read_text() == "new" and not (tmp_path / "result.json").exists()
    assert not (tmp_path / "starting").exists() and begun(tmp_path)
