"""What a rank is doing, told to whoever watches: a small record in a file that both map into memory.

Each rank owns one record and writes it before every instruction and around every blocking wait; a write is one
``struct.pack_into``.  The byte after the record is the watcher's: not zero asks the rank to stop.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.core.instruction import Instruction

RUN_DIR = "SHARDWISE_RUN_DIR"  # environment variable: where the launcher of a user's script looks for records
RECORD = struct.Struct("<Qqi???d48s96s200s240sQ")  # the fields of Record but for the rank, and once more the number of writes
TIMELINE = 32  # phases that are remembered: those of the start
TORN_READS = 20  # times that a record is read again because it is being written
TORN_WAIT = 0.5e-3  # seconds in between


@dataclass(frozen=True)
class Record:
    """The state of one rank.

    ``waiting``: it is blocked in a communication, ``waiting_for``; ``patient``: it is in a phase that may take long (the start,
    saving); ``done``: it has finished its work.  ``time`` is that of the last write, in seconds since the epoch; ``step`` is -1
    outside of steps.  ``role`` is what it has of a pipeline (``stage 1``).  ``notice`` is the last thing that it had to tell the user: here,
    as a full disk takes no log.
    """

    rank: int
    writes: int
    step: int
    position: int
    waiting: bool
    patient: bool
    done: bool
    time: float
    role: str
    doing: str
    waiting_for: str
    notice: str = ""

    @property
    def name(self) -> str:
        """``rank 1``, or ``rank 1 (stage 1)``."""
        return f"rank {self.rank} ({self.role})" if self.role else f"rank {self.rank}"

    @property
    def place(self) -> str:
        """``BACKWARD u3 m1 of step 17``."""
        return f"{self.doing} of step {self.step}" if self.step >= 0 else self.doing

    @property
    def at(self) -> tuple[int, int]:
        """Where in the run it is, for comparing ranks."""
        return self.step, self.position


class Progress:
    """A rank's side of its record.  Methods are called by one thread at a time and cost about a microsecond."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.write(bytes(RECORD.size + 1))  # not truncate: a write into a hole of a full disk would kill the process
            file.flush()
            self._memory = mmap.mmap(file.fileno(), RECORD.size + 1)
        self._texts: dict[int, tuple[Instruction, bytes]] = {}  # by identity: hashing an instruction takes longer
        self._writes, self._step, self._position = 0, -1, -1
        self._patient = self._done = False
        self._role = self._doing = self._waiting_for = self._notice = b""
        self.timeline: list[tuple[str, float]] = []  # phases and when they began (time.time()), for logs
        self.phase("starting")

    @staticmethod
    def from_environment() -> Progress | None:
        """The record of this rank, if a launcher watches it."""
        run_dir, rank = os.environ.get(RUN_DIR), os.environ.get("RANK")
        return Progress(record_path(Path(run_dir), int(rank))) if run_dir and rank else None

    def phase(self, text: str, *, patient: bool = True) -> None:
        """Work outside of a step; ``patient``: it may take long."""
        if len(self.timeline) < TIMELINE:
            self.timeline.append((text, time.time()))
        self._step, self._position, self._patient = -1, -1, patient
        self._doing, self._waiting_for = text.encode(), b""
        self._write()

    @property
    def asked_to_stop(self) -> bool:
        """Whether whoever watches has asked this rank to stop (:func:`ask_to_stop`)."""
        return self._memory[RECORD.size] != 0

    def begin(self, step: int, *, patient: bool = False) -> None:
        """A step begins, with reading its batch; ``patient``: it may take long, as on a device that has not ended one yet."""
        self._step, self._position, self._patient = step, -1, patient
        self._doing, self._waiting_for = b"reading the batch", b""
        self._write()

    def instruction(self, position: int, one: Instruction) -> None:
        """An instruction of the step begins."""
        known = self._texts.get(id(one))
        if known is None:
            known = self._texts[id(one)] = (one, str(replace(one, waits=())).encode())
        self._position, self._doing = position, known[1]
        self._write()

    def wait(self, what: str | None) -> None:
        """A blocking wait for ``what`` begins, or (None) ends."""
        self._waiting_for = what.encode() if what else b""
        self._write()

    def tell(self, notice: str) -> None:
        """Something that the user has to know."""
        self._notice = notice.encode()
        self._write()

    def take(self, role: str) -> None:
        """What this rank has of a pipeline."""
        self._role = role.encode()
        self._write()

    def finish(self) -> None:
        """The rank has done all its work."""
        self._done = True
        self.phase("finished")

    def _write(self) -> None:
        self._writes += 1
        RECORD.pack_into(
            self._memory, 0, self._writes, self._step, self._position, self._waiting_for != b"", self._patient, self._done,
            time.time(), self._role, self._doing, self._waiting_for, self._notice, self._writes,
        )  # fmt: skip


def record_path(run_dir: Path, rank: int) -> Path:
    """Where rank ``rank`` keeps its record."""
    return run_dir / "monitor" / f"rank_{rank}"


def ask_to_stop(run_dir: Path, rank: int) -> None:
    """Ask a rank to stop after its step; nothing happens while it has no record."""
    try:
        with record_path(run_dir, rank).open("r+b") as file:
            file.seek(RECORD.size)
            file.write(b"\1")
    except OSError:
        return


def read_record(run_dir: Path, rank: int) -> Record | None:
    """The record of a rank, or None while it has none (or its writer has been interrupted for long, half-way)."""
    path = record_path(run_dir, rank)
    for _ in range(TORN_READS):
        try:
            found = path.read_bytes()
        except OSError:
            return None
        if len(found) != RECORD.size + 1:
            return None
        *numbers, role, doing, waiting_for, notice, writes = RECORD.unpack(found[:-1])
        if writes and writes == numbers[0]:  # a write begins with zeros and ends with the last field
            texts = (text.rstrip(b"\0").decode(errors="replace") for text in (role, doing, waiting_for, notice))
            return Record(rank, *numbers, *texts)
        time.sleep(TORN_WAIT)
    return None
