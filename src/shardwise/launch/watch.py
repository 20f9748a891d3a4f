"""Watch local ranks, and find those that hang, have been stopped or are gone."""

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

START_TIMEOUT = 300.0  # seconds that phases such as imports, capture and saving may take without progress
LONGEST_LOOK = 1.0  # the most seconds that count between looks: if this process was stopped, ranks may have been too
STACK_SIGNAL = signal.SIGUSR2  # asks a rank for its Python stack
STACK_TIME = 2.0  # seconds within which the rank has to answer
POLL_STACK = 0.1
STACK_LINES = 30
PEERS = 4  # the most waiting ranks that a message names; the report has all of them
LOADER = "shardwise/data/loader.py"
IDLE = 0.05  # the share of a core below which a silent process counts as idle


def stack_path(run_dir: Path, rank: int) -> Path:
    """Return the path of the file that rank ``rank`` writes its Python stack to on :data:`STACK_SIGNAL`."""
    return record_path(run_dir, rank).with_suffix(".stack")


def _current_thread(text: str) -> list[str]:
    """Return the frames, innermost first, that ``faulthandler`` wrote for the current thread and the data loader's."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    current = next((block for block in blocks if block[0].startswith("Current thread")), blocks[0])
    reader = [block for block in blocks if block is not current and any(LOADER in line for line in block)]
    return [line for block in (current, *reader) for line in block[1 : 1 + STACK_LINES]]


@dataclass
class Watched:
    """This holds the process of one rank and what the watcher has seen of it.

    ``quiet`` is the number of seconds since its record last changed, ``busy`` the CPU seconds used since then, and
    ``stopped`` the number of seconds for which it has been stopped.
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
        """Return whether the rank still has work to do."""
        return not self.gone and not (self.record is not None and self.record.done)

    @property
    def waiting(self) -> bool:
        return self.record is not None and self.record.waiting

    def look(self, read: Callable[[], Record | None], seconds: float) -> None:
        """Read the state of the rank's process and its record (by ``read``), ``seconds`` after the last look."""
        try:
            status = self.process.status()
            times = self.process.cpu_times()
        except psutil.Error:
            status, times = psutil.STATUS_DEAD, None
        self.gone = self.gone or status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)
        self.stopped = self.stopped + seconds if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else 0.0
        cpu = times.user + times.system if times is not None else self._cpu
        record = read()  # read after the status, so that it is the last record of a rank that is gone
        fresh = record is not None and (self.record is None or record.writes != self.record.writes)
        self.quiet, self.busy = (0.0, 0.0) if fresh else (self.quiet + seconds, self.busy + cpu - self._cpu)
        self._cpu = cpu
        self.record = record or self.record

    def describe(self) -> str:
        """Return what the rank does, such as ``at BACKWARD u3 m1 of step 17, stopped (SIGSTOP)``."""
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
    """This describes a run that cannot go on; ``culprits`` is empty if all ranks wait for each other."""

    culprits: tuple[int, ...]
    message: str


@dataclass
class Watcher:
    """This watches the ranks of one run: the children of this process that torchelastic has given ``run_id``.

    ``timeout`` is in seconds, and ``on_notice`` gets what ranks tell the user.  ``asynchronous`` says that ranks use
    GPUs: hosts go on while their devices wait, and look busy while they wait for their devices, so a rank makes
    progress if its host or its device does.
    """

    run_dir: Path
    ranks: int
    run_id: str
    timeout: float = 20.0
    asynchronous: bool = False
    start_timeout: float = START_TIMEOUT
    on_notice: Callable[[str], object] | None = None
    pipes: Path | None = None  # the folder of the pipes that ask ranks for their last collectives
    began: bool = False  # whether a rank has been seen in a step
    failed_at: float | None = None  # time.monotonic() of the first sign that a rank failed
    watched: dict[int, Watched] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)

    def look(self) -> Hang | None:
        """Look at every rank, and return a finding if the run cannot go on."""
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
        """Return the ranks that ended without having finished."""
        return sorted(rank for rank, one in self.watched.items() if one.gone and not (one.record and one.record.done))

    @property
    def leaving(self) -> bool:
        """Return whether a rank that has failed is still finishing a checkpoint together with the others."""
        return any(
            one.alive and one.record is not None and one.record.doing == LEAVING for one in self.watched.values()
        )

    @property
    def finished(self) -> bool:
        """Return whether every rank has done its work."""
        # Records are read again: some ranks may have ended before the watcher saw them.
        records = (read_record(self.run_dir, rank) for rank in range(self.ranks))
        return all(record is not None and record.done for record in records)

    def report(self) -> list[str]:
        """Return one line for each rank that says where it is."""
        return [f"{self._name(rank)}: {one.describe()}" for rank, one in sorted(self.watched.items())]

    def stack(self, rank: int) -> list[str]:
        """Ask a rank for its Python stack, and return the lines; they are empty if it does not answer."""
        one = self.watched.get(rank)
        if one is None or one.stopped or not one.alive:
            return []
        path = stack_path(self.run_dir, rank)
        with suppress(OSError, psutil.Error):
            before = path.stat().st_size  # raises without a file: the rank has no handler yet and would die of it
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
                one.process.send_signal(number)  # psutil refuses if another process has got the pid

    def kill(self) -> None:
        """Kill every rank's process, and those that it started in its process group."""
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

    # The checks for what can be wrong follow, the surest first.

    def _stopped(self) -> Hang | None:
        culprits = [rank for rank, one in self.watched.items() if one.alive and one.stopped > self.timeout]
        if not culprits:
            return None
        return self._hang(culprits, f"has been stopped (SIGSTOP) for {self.timeout:g} s")

    def _hanging(self) -> Hang | None:
        """Find ranks that make no progress without waiting, while another rank waits."""
        alive = {rank: one for rank, one in self.watched.items() if one.alive}
        if not any(one.waiting and self._overdue(one) for one in alive.values()):
            return None
        culprits = [rank for rank, one in alive.items() if not one.waiting and self._overdue(one)]
        if self.asynchronous:  # devices may wait for a rank that makes progress, or if none does, for the last of them
            moving = not all(one.waiting or self._overdue(one) for one in alive.values())
            culprits = self._last_of([rank for rank in culprits if not (moving and self._behind(rank))])
        return self._hang(culprits, "hangs") if culprits else None

    def _deadlocked(self) -> Hang | None:
        """Find out why all ranks wait: for a stopped rank, at different places, or for each other."""
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
        """Find the last ranks if no record changes and no process works; a host may look busy while it only waits for
        its device, so its CPU time does not count within a step."""
        alive = {rank: one for rank, one in self.watched.items() if one.alive}
        for one in alive.values():
            outside = one.record is not None and one.record.step < 0 and not one.record.behind
            busy = one.busy > IDLE * one.quiet and (outside or not self.asynchronous)
            if one.waiting or busy or not self._overdue(one, 1.2):
                return None
        behind = self._last_of(alive)
        return self._hang(behind, "hangs") if behind else None

    def _last_of(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that are furthest back in the run; at the same place, those whose host is there rather than
        their device, which may be waiting for others.
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
