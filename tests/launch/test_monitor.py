"""Records of progress, errors, and which of them is the cause."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.instruction import Instruction, Op
from shardwise.launch.monitor import RankError, first_cause, read_errors
from shardwise.runtime.call import CommunicationTimeout
from shardwise.runtime.progress import Progress, read_record, record_path

BACKWARD = Instruction(Op.BACKWARD, unit=3, microbatch=1, waits=(4, 9))


@pytest.fixture
def progress(tmp_path: Path) -> Progress:
    return Progress(record_path(tmp_path, 0))


def test_record_follows_the_rank(tmp_path: Path, progress: Progress) -> None:
    start = read_record(tmp_path, 0)
    assert start is not None and (start.place, start.patient, start.waiting, start.done) == (
        "starting",
        True,
        False,
        False,
    )
    progress.begin(17)
    reading = read_record(tmp_path, 0)
    assert reading is not None and (reading.place, reading.patient) == ("reading the batch of step 17", False)
    progress.instruction(5, BACKWARD)
    backward = read_record(tmp_path, 0)
    assert backward is not None and backward.place == "BACKWARD u3 m1 of step 17"
    assert backward.at == (17, 5) and backward.writes == reading.writes + 1
    assert abs(backward.time - time.time()) < 5
    progress.wait("all_reduce of gradient bucket 0")
    waiting = read_record(tmp_path, 0)
    assert waiting is not None and waiting.waiting and waiting.waiting_for == "all_reduce of gradient bucket 0"
    assert waiting.at == (17, 5) and waiting.place == backward.place
    progress.wait(None)
    after = read_record(tmp_path, 0)
    assert after is not None and (after.waiting, after.waiting_for) == (False, "")
    progress.finish()
    end = read_record(tmp_path, 0)
    assert end is not None and end.done and end.place == "finished"


def test_equal_instructions_of_two_programs_are_told_apart(tmp_path: Path, progress: Progress) -> None:
    for unit in range(50):  # freed at once: a later one may get the address of an earlier one
        progress.instruction(0, Instruction(Op.FORWARD, unit=unit, microbatch=0))
        record = read_record(tmp_path, 0)
        assert record is not None and record.doing == f"FORWARD u{unit} m0"


def test_texts_that_are_too_long_are_cut(tmp_path: Path, progress: Progress) -> None:
    progress.wait("é" * 500)
    record = read_record(tmp_path, 0)
    assert record is not None and record.waiting_for.startswith("é" * 90) and len(record.waiting_for) <= 101
    assert record.doing == "starting"


def test_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path, 3) is None
    record_path(tmp_path, 3).parent.mkdir()
    record_path(tmp_path, 3).write_bytes(b"part")
    assert read_record(tmp_path, 3) is None


def test_record_is_never_half_of_two(tmp_path: Path, progress: Progress) -> None:
    """A reader sees texts and numbers of the same write."""
    stop = threading.Event()

    def write() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            progress.begin(step)
            progress.phase(f"phase after {step}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = 0
        for _ in range(2000):
            record = read_record(tmp_path, 0)
            if record is None:
                continue  # the writer was interrupted
            seen += 1
            assert (record.step >= 0) == (record.doing == "reading the batch")
            assert record.patient == (record.step < 0)
    finally:
        stop.set()
        writer.join()
    assert seen > 1000


def test_a_write_takes_microseconds(progress: Progress) -> None:
    start = time.process_time()
    for position in range(20_000):
        progress.instruction(position, BACKWARD)
    assert (time.process_time() - start) / 20_000 < 20e-6


def test_first_cause_is_no_consequence(tmp_path: Path) -> None:
    record_path(tmp_path, 0).parent.mkdir()
    lost = CommunicationTimeout("no end after 5 s", rank=0, operation="all_reduce", missing=(2,))
    for rank, error in enumerate((lost, ShardwiseError("second"), ConfigError("first"))):
        found = RankError.of(rank, error, "FORWARD u0 m0 of step 1", str(error))
        RankError(rank, 100.0 - rank if rank else 1.0, found.kind, found.message, found.place).save(tmp_path)
    errors = read_errors(tmp_path)
    assert [error.rank for error in errors] == [0, 2, 1]
    assert [error.kind for error in errors] == ["communication", "config", "shardwise"]
    cause = first_cause(errors)
    assert cause is not None and (cause.rank, cause.message) == (2, "first")
    assert first_cause(errors[:1]) is None
