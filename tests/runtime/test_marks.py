"""How far a device has come, told while the host runs ahead of it; the device here is a list of what it was given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.backend import Backend
from shardwise.core.instruction import Buffer, Instruction, Op
from shardwise.core.mesh import Mesh
from shardwise.runtime.connect import connect
from shardwise.runtime.marks import MOST, DeviceEvent, Mark, Marks
from shardwise.runtime.progress import Progress, Record, read_record, record_path


class Device:
    """Passes as many events as it is told to, in the order in which they were recorded; knows how many were made."""

    def __init__(self) -> None:
        self.recorded, self.passed, self.made = 0, 0, 0
        self.broken = False

    def event(self) -> DeviceEvent:
        self.made += 1
        return _Event(self)


class _Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.record()

    def record(self) -> None:
        self._device.recorded += 1
        self._at = self._device.recorded

    def query(self) -> bool:
        if self._device.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self._at <= self._device.passed


def settled(marks: Marks) -> None:
    """Let its thread look at least once, from the beginning."""
    time.sleep(0.06)


@pytest.fixture
def device() -> Device:
    return Device()


def test_the_latest_mark_passed_is_told_and_events_are_used_again(device: Device) -> None:
    told: list[Mark] = []
    marks = Marks(device.event, told.append, poll=0.01)
    try:
        for step in range(50):
            assert [marks.put(step, at, b"x") for at in range(4)] == [step * 4 + at + 1 for at in range(4)]
            device.passed = device.recorded - 1
            deadline = time.monotonic() + 5
            while (not told or told[-1].number < step * 4 + 3) and time.monotonic() < deadline:
                time.sleep(0.002)
            assert (told[-1].step, told[-1].position) == (step, 2)
    finally:
        marks.close()
    assert device.made <= 9  # those of one step, and of the last mark before it; not 200
    assert [one.number for one in told] == sorted({one.number for one in told})


def test_a_device_that_stands_still_costs_no_more_memory(device: Device) -> None:
    marks = Marks(device.event, lambda mark: None, poll=60.0)
    numbers = [marks.put(0, 0, b"") for _ in range(MOST + 10)]
    marks.close()
    assert numbers[-1] == MOST == device.made


def test_a_broken_device_ends_the_looking_alone(device: Device) -> None:
    told: list[Mark] = []
    marks = Marks(device.event, told.append, poll=0.01)
    marks.put(0, 0, b"")
    device.broken = True
    settled(marks)
    device.broken, device.passed = False, 1
    settled(marks)
    assert told == []
    marks.put(0, 1, b"")
    marks.close()


GATHER = Instruction(Op.GATHER, bucket=3, writes=(Buffer("slot", 3),))
FORWARD = Instruction(Op.FORWARD, unit=3, microbatch=0, waits=(0,))


class Watched:
    """A rank's record, with a device that works when it is told to."""

    def __init__(self, folder: Path, device: Device) -> None:
        self.folder, self.device = folder, device
        self.progress = Progress(record_path(folder, 0))
        self.progress.follow(torch.device("cuda", 0))

    def step(self, number: int, rows: int = 8) -> None:
        self.progress.begin(number)
        self.progress.batch(rows)
        self.progress.instruction(0, GATHER)
        self.progress.instruction(1, FORWARD)

    def read(self, passed: int | None = None) -> Record:
        """Let the device pass so many marks, by default all, and read the record."""
        self.device.passed = self.device.recorded if passed is None else passed
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            found = read_record(self.folder, 0)
            assert found is not None
            if found.passed == self.device.passed:
                break
            time.sleep(0.01)
        return found


@pytest.fixture
def rank(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(Backend, "event", lambda self, at, *, timing=False: device.event())
    watched = Watched(tmp_path, device)
    yield watched
    watched.progress.leave()


def test_the_record_has_the_places_of_host_and_device(rank: Watched) -> None:
    for step in (17, 18):
        rank.step(step)
    rank.progress.phase("the end of step 18")
    found = rank.read(3)
    assert found.behind and found.device_at == (17, 1) == found.at
    assert (
        found.whereabouts
        == "device at FORWARD u3 m0, which waits for GATHER b3, of step 17, host at the end of step 18"
    )
    assert found.place == "the end of step 18"
    found = rank.read()
    assert not found.behind and found.whereabouts == "the end of step 18" and found.at == (-1, -1)


def test_what_the_device_does_is_progress(rank: Watched) -> None:
    rank.step(0)
    seen = [rank.read(passed).writes for passed in (0, 1, 2, 3)]
    assert len(set(seen)) == 4
    assert rank.read(3).writes == seen[-1]


def test_the_first_step_may_take_long_until_the_device_has_ended_it(rank: Watched) -> None:
    rank.step(0)
    assert rank.read().patient  # it has begun all that was issued, and nothing says that it is through
    rank.step(1)
    assert rank.read(3).patient  # at the last instruction of step 0
    assert not rank.read(4).patient  # at the begin of step 1
    rank.step(2)
    assert not rank.read(4).patient and not rank.read().patient


def test_so_may_another_program_and_a_batch_of_another_size(rank: Watched) -> None:
    for step in (0, 1):
        rank.step(step)
    assert not rank.read().patient
    rank.progress.begin(2)
    rank.progress.instruction(0, Instruction(Op.FORWARD, unit=3, microbatch=0))
    assert rank.read().patient
    rank.step(3)
    assert not rank.read().patient
    rank.step(4, rows=5)
    assert rank.read().patient
    rank.step(5)
    assert not rank.read().patient
    rank.step(6, rows=5)
    assert not rank.read().patient


def test_a_phase_is_patient_whatever_the_device_does(rank: Watched) -> None:
    for step in (0, 1):
        rank.step(step)
    rank.progress.phase("saving a checkpoint")
    assert rank.read().patient
    rank.progress.phase("waiting for the last step", patient=False)
    assert not rank.read().patient


def test_a_rank_that_has_ended_follows_no_more(rank: Watched) -> None:
    rank.step(0)
    rank.progress.finish()
    assert not any(one.name == "shardwise-device" and one.is_alive() for one in threading.enumerate())
    found = rank.read(0)
    assert found.done


def test_a_device_that_is_followed_no_more_is_not_behind(rank: Watched) -> None:
    """Whatever it had still to do when its trainer was closed: the script may go on without it."""
    rank.step(0)
    rank.progress.phase("the end of step 0", patient=False)
    rank.progress.leave()
    found = read_record(rank.folder, 0)
    assert found is not None and not found.behind and not found.patient
    assert found.whereabouts == "the end of step 0"


def test_on_a_cpu_nothing_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "event", lambda *_, **__: pytest.fail("an event on a CPU"))
    progress = Progress(record_path(tmp_path, 0))
    progress.follow(torch.device("cpu"))
    progress.begin(0)
    progress.batch(4)
    progress.instruction(0, GATHER)
    found = read_record(tmp_path, 0)
    assert found is not None and not found.patient and not found.behind and found.whereabouts == "GATHER b3 of step 0"
    assert not any(one.name == "shardwise-device" for one in threading.enumerate())


def test_events_are_of_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the thread's current one, in whose stream torch records where no other is given; a lone rank selects its
    own.
    """
    recorded: list[object] = []
    selected: list[torch.device] = []
    second = torch.device("cuda", 1)
    event = SimpleNamespace(record=lambda stream=None: recorded.append(stream))
    monkeypatch.setattr(torch, "Event", lambda **_: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"of {device}")
    Backend.of(second).event(second)
    assert recorded == ["of cuda:1"]
    monkeypatch.setattr(Backend, "select", lambda self, device: selected.append(device))
    connect(Mesh.of(dp=1), second)
    assert selected == [second]
