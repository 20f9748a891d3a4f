"""Which rank hangs, found from records and processes; the processes here do nothing but write a record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwise.launch.watch import Hang, Watcher
from shardwise.runtime.progress import record_path

RUN = "run-of-this-test"
RANK = """
import sys, time
from pathlib import Path
from shardwise.core.instruction import Instruction, Op
from shardwise.runtime.progress import Progress
progress = Progress(Path(sys.argv[1]))
def at(step, position, op=Op.FORWARD):
    progress.begin(step)
    progress.instruction(position, Instruction(op, unit=position, microbatch=0))
def spin():
    while True: pass
sleep = lambda: time.sleep(60)
"""

Start = Callable[..., Watcher]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts ranks, each running some lines, and gives a watcher over them."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*ranks: str, run_id: str = RUN, **options: float) -> Watcher:
        for rank, lines in enumerate(ranks):
            variables = {**os.environ, "TORCHELASTIC_RUN_ID": run_id, "RANK": str(rank)}
            command = [sys.executable, "-c", f"{RANK}\n{lines}", str(record_path(tmp_path, rank))]
            started.append(subprocess.Popen(command, env=variables, start_new_session=True))
        watcher = Watcher(tmp_path, len(ranks), RUN, **options)  # type: ignore[arg-type]
        deadline = time.monotonic() + 30
        while run_id == RUN and not all(record_path(tmp_path, r).exists() for r in range(len(ranks))):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return watcher

    yield begin
    for process in started:
        process.kill()
        process.wait()


def look(watcher: Watcher, seconds: float) -> Hang | None:
    """Look for so long, or until there is a finding."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = watcher.look()
        if found is not None:
            return found
        time.sleep(0.05)
    return None


def test_a_rank_that_others_wait_for_hangs(start: Start) -> None:
    watcher = start(
        "at(3, 7, Op.REDUCE); progress.wait('all_reduce of loss'); sleep()",
        "at(3, 2, Op.BACKWARD); sleep()",
        timeout=0.6,
    )
    found = look(watcher, 10)
    assert found is not None and found.culprits == (1,)
    assert "rank 1 hangs at BACKWARD u2 m0 of step 3" in found.message and "train.hang_timeout" in found.message
    report = watcher.report()
    assert (
        "waits" in report[0]
        and "all_reduce of loss" in report[0]
        and report[1].startswith("rank 1: at BACKWARD u2 m0 of step 3")
    )


def test_stages_are_named_and_who_waits_for_them(start: Start) -> None:
    waits = "progress.set_role('stages 0, 3'); at(3, 7, Op.RECEIVE); "
    waits += "progress.wait('receive of h among ranks [1, 0]'); sleep()"
    ranks = ("progress.set_role('stages 1, 2'); at(3, 2, Op.BACKWARD); sleep()", *[waits] * 5)
    found = look(start(*ranks, timeout=0.6), 20)
    assert found is not None and found.culprits == (0,)
    assert found.message.startswith(
        "rank 0 (stages 1, 2) hangs at BACKWARD u2 m0 of step 3; rank 1 (stages 0, 3) waits "
    )
    assert "for receive of h among ranks [1, 0], at RECEIVE u7 m0 of step 3; rank 2" in found.message
    assert (
        "rank 4 (stages 0, 3)" in found.message
        and "rank 5" not in found.message
        and "; 1 more rank waits (" in found.message
    )


def test_also_a_busy_one(start: Start) -> None:
    found = look(start("at(3, 7); progress.wait('all_reduce'); sleep()", "at(3, 2); spin()", timeout=0.6), 10)
    assert found is not None and found.culprits == (1,)


@pytest.mark.slow
def test_progress_is_no_hang(start: Start) -> None:
    moving = (
        "at(3, 2)\nfor n in range(1000): progress.instruction(n, Instruction(Op.FORWARD, unit=0)); time.sleep(0.05)"
    )
    assert look(start("at(3, 7); progress.wait('all_reduce'); sleep()", moving, timeout=0.4), 2.5) is None


@pytest.mark.slow
def test_a_busy_rank_that_nobody_waits_for_does_not_hang(start: Start) -> None:
    assert look(start("at(3, 2); spin()", timeout=0.3), 2) is None


def test_an_idle_rank_that_nobody_waits_for_hangs(start: Start) -> None:
    found = look(start("at(3, 2); sleep()", timeout=0.5), 10)
    assert found is not None and found.culprits == (0,) and "rank 0 hangs at FORWARD u2 m0 of step 3" in found.message


@pytest.mark.slow
def test_the_start_may_take_longer(start: Start) -> None:
    ranks = (
        "progress.phase('connecting'); progress.wait('barrier of the start'); sleep()",
        "progress.phase('building'); sleep()",
    )
    watcher = start(*ranks, timeout=0.2, start_timeout=2.5)
    assert look(watcher, 1.5) is None
    found = look(watcher, 10)
    assert found is not None and found.culprits == (1,) and "at building" in found.message


@pytest.mark.slow
def test_gpu_ranks_do_not_say_that_they_wait(start: Start) -> None:
    ranks = ("at(4, 9); spin()", "at(4, 2); sleep()")
    assert look(start(*ranks, timeout=0.4), 2) is None


def test_gpu_rank_that_is_behind_hangs(start: Start) -> None:
    found = look(start("at(4, 9); spin()", "at(4, 2); sleep()", timeout=0.4, asynchronous=True), 10)
    assert found is not None and found.culprits == (1,) and "FORWARD u2 m0 of step 4" in found.message


def test_a_stopped_rank(start: Start) -> None:
    waiting = "at(5, 6, Op.NORM); progress.wait('all_reduce of loss'); sleep()"
    watcher = start(waiting, waiting, timeout=0.6)
    watcher.look()
    watcher.watched[1].process.send_signal(signal.SIGSTOP)
    found = look(watcher, 10)
    assert found is not None and found.culprits == (1,)
    assert "rank 1 has been stopped (SIGSTOP)" in found.message and "NORM u6 m0 of step 5" in found.message
    watcher.kill()  # also ends what is stopped
    watcher.watched[1].process.wait(5)


def test_all_wait_for_each_other(start: Start) -> None:
    waiting = "at(5, 6); progress.wait('all_reduce'); sleep()"
    found = look(start(waiting, waiting, timeout=0.4), 10)
    assert found is not None and found.culprits == () and "all ranks wait for each other" in found.message


def test_a_waiting_rank_that_is_behind(start: Start) -> None:
    ranks = (
        "at(5, 6); progress.wait('all_reduce of a'); sleep()",
        "at(5, 4); progress.wait('all_reduce of b'); sleep()",
    )
    found = look(start(*ranks, timeout=0.4), 10)
    assert found is not None and found.culprits == (1,) and "behind" in found.message


@pytest.mark.slow
def test_finished_ranks_are_left_alone(start: Start) -> None:
    watcher = start("progress.finish(); sleep()", "progress.finish()", timeout=0.3)
    assert look(watcher, 1.5) is None
    assert watcher.finished and watcher.lost == []


@pytest.mark.slow
def test_a_rank_that_is_gone_is_lost(start: Start) -> None:
    watcher = start("at(1, 1); sleep()", "at(1, 1); time.sleep(1); import os; os._exit(3)", timeout=60)
    watcher.look()
    assert watcher.lost == []
    look(watcher, 2.5)
    assert watcher.lost == [1] and not watcher.finished


def test_processes_of_others_are_left_alone(start: Start) -> None:
    watcher = start("sleep()", run_id="another run", timeout=0.2)
    time.sleep(0.5)
    watcher.kill()
    assert watcher.watched == {}


@pytest.mark.slow
def test_time_in_which_nobody_looked_does_not_count(start: Start) -> None:
    """After Ctrl-Z and fg all ranks seem to have been silent for long."""
    watcher = start("at(3, 7); progress.wait('all_reduce'); sleep()", "at(3, 2); sleep()", timeout=2.5)
    watcher.look()
    watcher.look()
    time.sleep(4)
    assert watcher.look() is None
