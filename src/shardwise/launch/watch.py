"""Watching over local ranks: which of them hangs, has been stopped or is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from shardwise.runtime.progress import LEAVING, Record, read_record, record_path

START_TIMEOUT = 300.0  # seconds for phases that may take long: imports, capture, saving
LONGEST_LOOK = 1.0  # seconds counted at most between two looks: if we were stopped ourselves, so were perhaps the ranks
STACK_SIGNAL = signal.SIGUSR2  # asks a rank for its Python stack
STACK_TIME = 2.0  # seconds that it has to answer
POLL_STACK = 0.1
STACK_LINES = 30
PEERS = 4  # ranks that wait which a message names; the report has all of them
LOADER = "shardwise/data/loader.py"
IDLE = 0.05  # share of a core below which a silent process is thought to do nothing


def stack_path(run_dir: Path, rank: int) -> Path:
    """Where rank ``rank`` writes its Python stack on :data:`STACK_SIGNAL`."""
    return record_path(run_dir, rank).with_suffix(".stack")


def _current_thread(text: str) -> list[str]:
    """From what ``faulthandler`` wrote, the frames of the thread that answered and of the one that reads batches,
    innermost first.
    """
    blocks = [block.splitlines() for block in text.split("\n\n")]
    current = next((block for block in blocks if block[0].startswith("Current thread")), blocks[0])
    reader = [block for block in blocks if block is not current and any(LOADER in line for line in block)]
    return [line for block in (current, *reader) for line in block[1 : 1 + STACK_LINES]]


@dataclass
class Watched:
    """One rank's process and what has been seen of it.

    ``quiet`` and ``stopped`` are the seconds for which its record has not changed and for which it has been stopped;
    ``busy`` are the CPU seconds that it used meanwhile.
    """

    process: psutil.Process
    record: Record | None = None
    quiet: float = 0.0
    stopped: float = 0.0
    busy: float = 0.0
    gone: bool = False
    killed: bool = False
    _cpu: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether it still has work to do."""
        return not self.gone and not (self.record is not None and self.record.done)

    @property
    def waiting(self) -> bool:
        return self.record is not None and self.record.waiting

    def look(self, read: Callable[[], Record | None], seconds: float) -> None:
        """Take in how the rank's process does and what it says, ``seconds`` after the last look."""
        try:
            status = self.process.status()
            times = self.process.cpu_times()
        except psutil.Error:
            status, times = psutil.STATUS_DEAD, None
        self.gone = self.gone or status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)
        self.stopped = self.stopped + seconds if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else 0.0
        cpu = times.user + times.system if times is not None else self._cpu
        record = read()  # after the status: a rank that is gone has written its last word
        fresh = record is not None and (self.record is None or record.writes != self.record.writes)
        self.quiet, self.busy = (0.0, 0.0) if fresh else (self.quiet + seconds, self.busy + cpu - self._cpu)
        self._cpu = cpu
        self.record = record or self.record

    def describe(self) -> str:
        """``BACKWARD u3 m1 of step 17, stopped (SIGSTOP)``."""
        if self.record is None:
            return "has not started"
        if self.gone:
            return f"is gone; it was at {self.record.place}"
        if self.record.done:
            return "has finished"
        state = f"waits {self.quiet:.0f} s for {self.record.waiting_for}, " if self.waiting else ""
        where = self.record.whereabouts if self.record.behind else f"at {self.record.place}"
        return (
            state
            + where
            + (", stopped (SIGSTOP)" if self.stopped else "" if self.waiting else f" for {self.quiet:.0f} s")
        )


@dataclass(frozen=True)
class Hang:
    """Ranks that do not go on; no culprits where all of them wait for each other."""

    culprits: tuple[int, ...]
    message: str


@dataclass
class Watcher:
    """Looks at the ranks of one run: children of this process that torchelastic has given ``run_id``.

    ``timeout`` is in seconds; ``on_notice`` gets what ranks have to tell the user; ``asynchronous``: ranks on GPUs,
    whose hosts go on while their devices wait and seem to be busy when they wait for their device.  What counts is that
    host or device get on.
    """

    run_dir: Path
    ranks: int
    run_id: str
    timeout: float = 20.0
    asynchronous: bool = False
    start_timeout: float = START_TIMEOUT
    on_notice: Callable[[str], object] | None = None
    pipes: Path | None = None  # where ranks are asked for their last collectives
    began: bool = False  # whether a rank has been seen in a step
    failed_at: float | None = None  # time.monotonic() of the first sign that a rank failed
    watched: dict[int, Watched] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)

    def look(self) -> Hang | None:
        """Look at every rank; a finding if the run cannot go on."""
        now = time.monotonic()
        seconds, self._last = min(now - self._last, LONGEST_LOOK), now
        self.find()
        for rank, one in self.watched.items():
            told = one.record.notice if one.record is not None else ""
            one.look(partial(read_record, self.run_dir, rank), seconds)
            self.began = self.began or (one.record is not None and one.record.step >= 0)
            if self.on_notice is not None and one.record is not None and one.record.notice not in ("", told):
                self.on_notice(one.record.notice)
        return self._stopped() or self._hanging() or self._deadlocked() or self._silent()

    def find(self) -> None:
        """Find the processes of ranks that are not known yet."""
        if len(self.watched) == self.ranks:
            return
        with suppress(psutil.Error):
            for child in psutil.Process().children():
                with suppress(psutil.Error, ValueError):
                    variables = child.environ()
                    if variables.get("TORCHELASTIC_RUN_ID") == self.run_id:
                        self.watched.setdefault(int(variables["RANK"]), Watched(child))

    @property
    def lost(self) -> list[int]:
        """Ranks that ended without having finished."""
        return sorted(rank for rank, one in self.watched.items() if one.gone and not (one.record and one.record.done))

    @property
    def leaving(self) -> bool:
        """Whether a rank that has failed finishes what it does together with the others first."""
        return any(
            one.alive and one.record is not None and one.record.doing == LEAVING for one in self.watched.values()
        )

    @property
    def finished(self) -> bool:
        """Whether every rank has done its work."""
        records = (
            read_record(self.run_dir, rank) for rank in range(self.ranks)
        )  # also of those that ended before they were seen
        return all(record is not None and record.done for record in records)

    def report(self) -> list[str]:
        """One line a rank: where it is."""
        return [f"{self._name(rank)}: {one.describe()}" for rank, one in sorted(self.watched.items())]

    def stack(self, rank: int) -> list[str]:
        """Where a rank's Python code is, as its main thread says when asked; nothing if it does not answer."""
        one = self.watched.get(rank)
        if one is None or one.stopped or not one.alive:
            return []
        path = stack_path(self.run_dir, rank)
        with suppress(OSError, psutil.Error):
            before = path.stat().st_size  # no file: the rank would die of the signal
            one.process.send_signal(STACK_SIGNAL)
            deadline = time.monotonic() + STACK_TIME
            while time.monotonic() < deadline:
                time.sleep(POLL_STACK)
                text = path.read_bytes()[before:].decode(errors="replace")
                if text.endswith("\n"):
                    return _current_thread(text)
        return []

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank's process, as a terminal would."""
        self.find()
        for one in self.watched.values():
            with suppress(psutil.Error):
                one.process.send_signal(number)  # psutil refuses where the pid has been given to another process

    def kill(self) -> None:
        """End every rank's process at once, and what it started in its session."""
        self.find()
        for one in self.watched.values():
            with suppress(psutil.Error, ProcessLookupError):
                if not one.process.is_running() or one.process.status() == psutil.STATUS_ZOMBIE:
                    continue
                one.killed = True
                if os.getpgid(one.process.pid) == one.process.pid:
                    os.killpg(one.process.pid, signal.SIGKILL)
                else:
                    one.process.kill()

    # what can be wrong, the surest first

    def _stopped(self) -> Hang | None:
        culprits = [rank for rank, one in self.watched.items() if one.alive and one.stopped > self.timeout]
        if not culprits:
            return None
        return self._hang(culprits, f"has been stopped (SIGSTOP) for {self.timeout:g} s")

    def _hanging(self) -> Hang | None:
        """A rank waits for others, and one that does not wait makes no progress."""
        alive = {rank: one for rank, one in self.watched.items() if one.alive}
        if not any(one.waiting and self._overdue(one) for one in alive.values()):
            return None
        culprits = [rank for rank, one in alive.items() if not one.waiting and self._overdue(one)]
        if self.asynchronous:  # devices may wait for a rank that gets on, and where none does for the last of them
            moving = not all(one.waiting or self._overdue(one) for one in alive.values())
            culprits = self._last_of([rank for rank in culprits if not (moving and self._behind(rank))])
        return self._hang(culprits, "hangs") if culprits else None

    def _deadlocked(self) -> Hang | None:
        """All wait: for each other, or for one that is stopped or that has left, or not at the same place."""
        alive = {rank: one for rank, one in self.watched.items() if one.alive and one.record is not None}
        if not alive or not all(one.waiting and self._overdue(one, 1.5) for one in alive.values()):
            return None
        places = {rank: one.record.at for rank, one in alive.items() if one.record is not None}
        behind = [rank for rank, place in places.items() if place == min(places.values())]
        stopped = [rank for rank, one in alive.items() if one.stopped]
        culprits = stopped or (behind if len(behind) < len(places) else [])
        if culprits:
            return self._hang(culprits, "is stopped (SIGSTOP)" if stopped else "is behind the others and waits")
        return Hang((), f"all ranks wait for each other ({self._limit()})")

    def _silent(self) -> Hang | None:
        """No rank says anything; nor does any do anything where that can be told: not while a host may be waiting for
        its device.
        """
        alive = {rank: one for rank, one in self.watched.items() if one.alive}
        for one in alive.values():
            outside = one.record is not None and one.record.step < 0 and not one.record.behind
            busy = one.busy > IDLE * one.quiet and (outside or not self.asynchronous)
            if one.waiting or busy or not self._overdue(one, 1.2):
                return None
        behind = self._last_of(alive)
        return self._hang(behind, "hangs") if behind else None

    def _last_of(self, ranks: Iterable[int]) -> list[int]:
        """Those that are furthest back in the run; at one place those whose host is there, for devices may wait for
        others.
        """
        records = {rank: self.watched[rank].record for rank in ranks}
        places = {rank: (*one.at, one.behind) for rank, one in records.items() if one is not None}
        return [rank for rank, place in places.items() if place == min(places.values())]

    def _behind(self, rank: int) -> bool:
        record = self.watched[rank].record
        return record is not None and record.behind

    def _overdue(self, one: Watched, times: float = 1.0) -> bool:
        patient = one.record is None or one.record.patient
        return one.quiet > times * (max(self.timeout, self.start_timeout) if patient else self.timeout)

    def _hang(self, culprits: list[int], what: str) -> Hang:
        parts = []
        for rank in sorted(culprits):
            record = self.watched[rank].record
            place = f" at {record.place if record else 'its start'}"
            parts.append(
                f"{self._name(rank)} {what}" + (f": {record.whereabouts}" if record and record.behind else place)
            )
        others = [(rank, one) for rank, one in sorted(self.watched.items()) if rank not in culprits and one.alive]
        peers = [rank for rank, one in others if one.waiting or (self._behind(rank) and self._overdue(one, 0.5))]
        parts += [f"{self._name(rank)} {self.watched[rank].describe()}" for rank in peers[:PEERS]]
        more = len(peers) - PEERS
        parts += [f"{more} more rank{'s wait' if more > 1 else ' waits'}"] if more > 0 else []
        return Hang(tuple(sorted(culprits)), f"{'; '.join(parts)} ({self._limit()})")

    def _name(self, rank: int) -> str:
        record = self.watched[rank].record
        return record.name if record else f"rank {rank}"

    def _limit(self) -> str:
        return f"train.hang_timeout = {self.timeout:g} s"
