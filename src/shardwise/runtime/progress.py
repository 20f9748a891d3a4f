"""Each rank tells its watcher what it is doing in a small record: a file that the rank maps into memory.

The rank writes its record before every instruction and around every blocking wait; a write is one
``struct.pack_into``.  The byte after the record is the watcher's: a nonzero value asks the rank to stop.  Behind it is
a second record of how far the rank's device has come, written by a thread of its own: a GPU runs behind its host.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.core.instruction import Instruction

if TYPE_CHECKING:
    import torch

    from shardwise.runtime.marks import Mark, Marks

RUN_DIR = "SHARDWISE_RUN_DIR"  # the environment variable that names the folder in which the launcher looks for records
# RECORD has the fields of Record from ``writes`` to ``notice`` and ends with ``writes`` again; DEVICE begins and ends
# with ``passed``.  A reader that finds two different numbers has read while the rank was writing.
RECORD = struct.Struct("<Qqi???dQQ48s96s200s240sQ")
DEVICE = struct.Struct("<Qqi240sQ")
SIZE = RECORD.size + 1 + DEVICE.size
LEAVING = "finishing the checkpoint under way, after an error"
NEVER = 2**63  # larger than the number of any mark
TIMELINE = 32  # the most phases that are remembered: those of the start
TORN_READS = 20  # how often a record that is being written is read again
TORN_WAIT = 0.5e-3  # seconds between two of these reads


@dataclass(frozen=True)
class Record:
    """A record is the state of one rank.

    ``waiting``: it is blocked in the communication ``waiting_for``; ``patient``: it is in a phase that may take long
    (the start, saving); ``done``: it has finished its work.  ``time`` is that of the last write, in seconds since the
    epoch; ``step`` is -1 outside of steps.  ``role`` is the rank's part of a pipeline (``stage 1``).  ``notice`` is the
    last message for the user: it is kept here because a full disk takes no log.

    For a rank whose device runs behind the host, ``issued`` is the number of the last mark in the device's work, and
    ``passed`` that of the last mark that the device has passed: there, at ``device_at`` (step, position), it began
    ``device_doing``.  Work that the device does for the first time may take long; it ends at the mark ``until``, and
    until the device has passed that, the rank is ``patient``.
    """

    rank: int
    writes: int
    step: int
    position: int
    waiting: bool
    patient: bool
    done: bool
    time: float
    issued: int
    until: int
    role: str
    doing: str
    waiting_for: str
    notice: str = ""
    passed: int = 0
    device_at: tuple[int, int] = (-1, -1)
    device_doing: str = ""

    @property
    def name(self) -> str:
        """Return ``rank 1``, or ``rank 1 (stage 1)`` in a pipeline."""
        return f"rank {self.rank} ({self.role})" if self.role else f"rank {self.rank}"

    @property
    def place(self) -> str:
        """Return where the host is, as in ``BACKWARD u3 m1 of step 17``."""
        return _place(self.doing, self.step)

    @property
    def behind(self) -> bool:
        """Return whether the device has not yet done all that the host has issued."""
        return self.passed < self.issued

    @property
    def whereabouts(self) -> str:
        """Return :attr:`place`, or ``device at FORWARD u3 m0 of step 17, host at the end of step 18`` where the device
        is behind.
        """
        if not self.behind:
            return self.place
        device = _place(self.device_doing, self.device_at[0]) if self.passed else "its start"
        return f"device at {device}, host at {self.place}"

    @property
    def at(self) -> tuple[int, int]:
        """Return (step, position) of the rank, or of its device where that is behind, for comparing ranks."""
        return self.device_at if self.behind else (self.step, self.position)


class Progress:
    """This writes a rank's record.  One thread at a time calls its methods, which cost about a microsecond each."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.write(bytes(SIZE))  # truncate() would leave a hole: to write into it on a full disk kills the process
            file.flush()
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._texts: dict[int, tuple[Instruction, bytes, bytes]] = {}  # by id(): hashing an instruction takes longer
        self._marks: Marks | None = None
        self._issued = self._until = 0
        self._sizes: set[int] = set()
        self._issuing: dict[int, str] = {}  # the text of the instruction at each position, for a device
        self._writes, self._step, self._position = 0, -1, -1
        self._patient = self._done = False
        self._role = self._doing = self._waiting_for = self._notice = b""
        self.timeline: list[tuple[str, float]] = []  # (phase, time.time() at its start), for logs
        self.phase("starting")

    @staticmethod
    def from_environment() -> Progress | None:
        """Return the writer of this rank's record, or None if no launcher watches the rank."""
        run_dir, rank = os.environ.get(RUN_DIR), os.environ.get("RANK")
        return Progress(record_path(Path(run_dir), int(rank))) if run_dir and rank else None

    def phase(self, text: str, *, patient: bool = True) -> None:
        """Note that work outside of a step begins; ``patient`` says that it may take long."""
        if len(self.timeline) < TIMELINE:
            self.timeline.append((text, time.time()))
        self._step, self._position, self._patient = -1, -1, patient
        self._doing, self._waiting_for = text.encode(), b""
        self._settle()
        self._write()

    def follow(self, device: torch.device) -> None:
        """From now on also record how far ``device`` has come, if it runs behind the host.

        An instruction, or a batch size, that is new to the device may take long: kernels are compiled and chosen, and
        memory is allocated.
        """
        from shardwise.backend import Backend  # imports torch
        from shardwise.runtime.marks import Marks

        backend = Backend.of(device)
        if backend.asynchronous:
            self.leave()
            self._marks = Marks(lambda: backend.event(device), self._passed)

    def leave(self) -> None:
        """Stop following the device: from now on only the host's progress counts."""
        if self._marks is not None:
            self._marks.close()
            self._marks, self._issued, self._until = None, 0, 0
            self._write()

    @property
    def asked_to_stop(self) -> bool:
        """Return whether the watcher has asked this rank to stop (:func:`ask_to_stop`)."""
        return self._memory[RECORD.size] != 0

    def begin(self, step: int) -> None:
        """Note that a step begins: it begins with reading its batch."""
        self._step, self._position, self._patient = step, -1, False
        self._doing, self._waiting_for = b"reading the batch", b""
        self._settle()
        self._write()

    def batch(self, rows: int) -> None:
        """Note that the step's batch has been read."""
        if self._marks is not None and rows not in self._sizes:
            self._sizes.add(rows)
            self._until = NEVER
            self._write()

    def instruction(self, position: int, one: Instruction) -> None:
        """Note that an instruction of the step begins."""
        known = self._texts.get(id(one))
        if known is None:
            known = self._new(position, one)
        self._position, self._doing = position, known[1]
        if self._marks is not None:
            self._issued = self._marks.put(self._step, position, known[2])
        self._write()

    def wait(self, what: str | None) -> None:
        """Note that a blocking wait for ``what`` begins, or, with None, that it ends."""
        self._waiting_for = what.encode() if what else b""
        self._write()

    def notify(self, notice: str) -> None:
        """Record something that the user has to know."""
        self._notice = notice.encode()
        self._write()

    def set_role(self, role: str) -> None:
        """Record this rank's part of a pipeline."""
        self._role = role.encode()
        self._write()

    def finish(self) -> None:
        """Note that the rank has done all its work."""
        self.leave()
        self._done = True
        self.phase("finished")

    def _write(self) -> None:
        self._writes += 1
        RECORD.pack_into(
            self._memory, 0, self._writes, self._step, self._position, self._waiting_for != b"", self._patient,
            self._done,
            time.time(), self._issued, self._until, self._role, self._doing, self._waiting_for, self._notice,
            self._writes,
        )  # fmt: skip

    def _new(self, position: int, one: Instruction) -> tuple[Instruction, bytes, bytes]:
        """Remember and return the text of an instruction that has not run before; the text for a device also says what
        the instruction waits for, as the device does the waiting.
        """
        text = str(replace(one, waits=()))
        device = text
        if self._marks is not None:
            self._until = NEVER
            self._issuing[position] = text
            awaited = [self._issuing[at] for at in one.waits if at in self._issuing]
            device += f", which waits for {' and '.join(awaited)}," if awaited else ""
        known = self._texts[id(one)] = (one, text.encode(), device.encode())
        return known

    def _settle(self) -> None:
        """Put a mark behind what is new to the device: once it is passed, nothing may take long any more."""
        if self._marks is not None:
            self._issued = self._marks.put(self._step, self._position, self._doing)
            self._until = self._issued if self._until == NEVER else self._until

    def _passed(self, mark: Mark) -> None:
        """Write the second record; only the thread that follows the device calls this."""
        DEVICE.pack_into(self._memory, RECORD.size + 1, mark.number, mark.step, mark.position, mark.doing, mark.number)


def _place(doing: str, step: int) -> str:
    return f"{doing} of step {step}" if step >= 0 else doing


def record_path(run_dir: Path, rank: int) -> Path:
    """Return the path of the record of rank ``rank``."""
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
    """Return the record of a rank, or None while it has none (or its writer is interrupted for long in a write)."""
    path = record_path(run_dir, rank)
    for _ in range(TORN_READS):
        try:
            found = path.read_bytes()
        except OSError:
            return None
        if len(found) != SIZE:
            return None
        *numbers, role, doing, waiting_for, notice, writes = RECORD.unpack(found[: RECORD.size])
        passed, step, position, device, again = DEVICE.unpack(found[RECORD.size + 1 :])
        if writes and writes == numbers[0] and passed == again:  # pack_into zeroes all, then writes in order
            texts = (_text(one) for one in (role, doing, waiting_for, notice))
            host = Record(rank, *numbers, *texts)
            # The device's progress counts too, and what is new to the device may take long.
            return replace(
                host, writes=writes + passed, patient=host.patient or passed < host.until,
                passed=passed, device_at=(step, position), device_doing=_text(device),
            )  # fmt: skip
        time.sleep(TORN_WAIT)
    return None


def _text(found: bytes) -> str:
    return found.rstrip(b"\0").decode(errors="replace")
