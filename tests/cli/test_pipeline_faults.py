"""Stages of a pipeline that die or hang, in a real `shardwise train`: the others end, and who was it is said."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

GPT = ["model.width=16", "model.layers=2", "model.heads=2", "data.sequence_length=16"]
TINY = [
    "data.batch_size=8", "validation.share=0", "checkpoint.every=0", "train.steps=1000000", "parallel.microbatches=4",
    "train.hang_timeout=3",
]  # fmt: skip
Start = Callable[..., "Training"]
STEPS = 3  # that a run takes before something happens
AN_INSTRUCTION = r"[A-Z_]+( [umb]\d+)*( (to|from) pp[+-]\d)?( over [a-z,]+)?"


class Training:
    """A ``shardwise train`` under way, and its ranks."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder, self.ranks = folder, list[psutil.Process]()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwise", "train", *TINY, f"train.run_dir={folder}", *arguments],
            env={**os.environ, "COLUMNS": "400"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def wait_for_steps(self) -> None:
        deadline, path = time.monotonic() + 90, self.folder / "metrics.jsonl"
        while not path.exists() or len(path.read_bytes().splitlines()) < STEPS:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        found = [p for p in psutil.Process(self.process.pid).children() if "shardwise.launch.worker" in p.cmdline()]
        self.ranks = sorted(found, key=lambda p: int(p.environ()["RANK"]))

    def end(self, seconds: float) -> str:
        """What it printed until its end, which has to come in so many seconds; no rank is left then."""
        output = self.process.communicate(timeout=seconds)[0]
        assert not [p for p in self.ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return " ".join(output.split())

    def clean(self) -> None:
        for one in [*self.ranks, psutil.Process(self.process.pid)] if self.process.poll() is None else self.ranks:
            if one.is_running():
                one.kill()  # also ends what is stopped
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path, text: str) -> Iterator[Start]:
    """Starts a training in a folder of its own; ends it after the test, whatever happened."""
    started: list[Training] = []

    def begin(*arguments: str) -> Training:
        data = [] if any(one.startswith("data.factory") for one in arguments) else [*GPT, text]
        started.append(Training(tmp_path / "run", *data, *arguments))
        return started[-1]

    yield begin
    for one in started:
        one.clean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "schedule", "victim", "name"),
    [
        (2, "1f1b", 1, "rank 1 (stage 1)"),
        pytest.param(2, "zbv", 0, "rank 0 (stages 0, 3)", marks=pytest.mark.full),
        pytest.param(4, "zb-h1", 2, "rank 2 (stage 2)", marks=pytest.mark.full),
    ],
)
def test_a_stage_that_dies_ends_the_others(start: Start, pp: int, schedule: str, victim: int, name: str) -> None:
    training = start(f"parallel.pp={pp}", f"parallel.schedule={schedule}", "train.max_restarts=0")
    training.wait_for_steps()
    assert len(training.ranks) == pp
    training.ranks[victim].kill()
    output = training.end(30)
    assert training.process.returncode == 1
    assert re.search(re.escape(f"{name} was killed (SIGKILL, by the system if memory ran out) at "), output), output
    assert "Traceback" not in output


@pytest.mark.full
def test_a_stage_that_dies_is_started_again_with_the_others(start: Start) -> None:
    training = start("parallel.pp=2", "train.steps=60", "checkpoint.every=1")
    training.wait_for_steps()
    training.ranks[0].kill()
    output = training.end(90)
    assert training.process.returncode == 0, output
    assert "rank 0 (stage 0) was killed (SIGKILL" in output and "starting again from step_" in output
    metrics = [json.loads(line)["step"] for line in (training.folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics == list(range(60))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "victim"), [(2, 0), pytest.param(2, 1, marks=pytest.mark.full), pytest.param(4, 1, marks=pytest.mark.full)]
)
def test_a_stage_that_is_stopped_is_named_and_who_waits_for_it(start: Start, pp: int, victim: int) -> None:
    training = start(f"parallel.pp={pp}", "train.max_restarts=0")
    training.wait_for_steps()
    training.ranks[victim].send_signal(signal.SIGSTOP)
    output = training.end(60)
    assert training.process.returncode == 1
    said = output.partition("error: ")[2]
    stopped = (
        rf"rank {victim} \(stage {victim}\) (has been|is) stopped \(SIGSTOP\)( for 3 s)? at "
        rf"({AN_INSTRUCTION}|reading the batch)"
    )
    assert re.match(stopped, said), output
    others = set(range(pp)) - {victim}
    neighbours = {
        victim - 1,
        victim + 1,
    } & others  # at least one of them needs something of it soon, and the rest of that one
    waits = rf"rank (\d) \(stage \1\) waits \d+ s for \w+ of .*?, at {AN_INSTRUCTION} of step \d+"
    waiting = {int(found[1]) for found in re.finditer(waits, said.partition("train.hang_timeout")[0])}
    assert waiting & neighbours, output


TROUBLED = Path(__file__).parent / "troubled.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pp", "op", "stage"), [(2, "BACKWARD", 1), pytest.param(4, "FORWARD", 2, marks=pytest.mark.full)]
)
def test_a_stage_that_hangs_is_named_with_its_instruction(start: Start, pp: int, op: str, stage: int) -> None:
    """It sleeps inside of an op of its units: two forwards and two backwards of it are a step."""
    call = 4 * 6 + {"FORWARD": 1, "BACKWARD": 4}[op]
    training = start(
        f"parallel.pp={pp}", "train.max_restarts=0", f"model.factory={TROUBLED}:stages",
        f"data.factory={TROUBLED}:points",
        f"model.arguments={{block={2 * stage}, blocks={2 * pp}, call={call}}}", "data.batch_size=4",
        "parallel.microbatches=2",
    )  # fmt: skip
    output = training.end(120)
    assert training.process.returncode == 1
    said = output.partition("error: ")[2]
    assert re.match(rf"rank {stage} \(stage {stage}\) hangs at {op} u\d+ m\d of step 6; ", said), output
    message = said.partition("train.hang_timeout")[0]
    late = stage - 1 if op == "BACKWARD" else (stage + 1) % pp
    assert re.search(rf"rank {late} \(stage {late}\) waits \d+ s for .*?, at {AN_INSTRUCTION} of step 6", message), (
        output
    )
    assert "is here (most recent call first):" in output and "troubled.py" in output  # its Python stack
