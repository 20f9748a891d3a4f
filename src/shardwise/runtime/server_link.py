"""A worker's link to one parameter server: a thread that does jobs in order, on one connection after another."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardwise.core.frames import FrameError, Header, Kind, Outcome, bits_of
from shardwise.runtime.server_connection import Connection, Endpoint, Refused, ServerLost, Wakeup, refused
from shardwise.runtime.staging import Part
from shardwise.runtime.wire import bare, holding

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""The seconds before a second try to connect, and between tries at most; they double from one to the next."""
REFUSALS = 5
"""After so many connections in a row that a server has closed before its WELCOME, the secret or run must be wrong."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Ack:
    """This is what a server has made of a push at which of the worker's clocks, and the server's version after it."""

    outcome: Outcome
    clock: int
    version: int


@dataclass
class _Job:
    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class ServerLink:
    """This is a worker's link to the server at ``end``.

    :meth:`post`, :meth:`wake` and :meth:`close` are for any thread; the other methods are jobs, for the link's own.
    Where a job is interrupted, because the connection breaks, it is done again on the next one, so each job may be done
    again at any point: parts of a push that has not been answered are kept and sent again, and a server applies a push
    of the same clock once.
    """

    def __init__(self, end: Endpoint, log: Callable[[str], None]) -> None:
        self.end, self._log = end, log
        self.clock, self.joined, self.ticket = 0, False, -1
        self._seen, self._start = 0, 0  # the last version seen, and of which start of the server
        self._have = -1, 0  # the version of the parameters that are here, and of which start
        self._parts: list[Part] = []  # of the push that has not been answered
        self._sent = 0  # how many of them this connection has been given
        self._committing: int | None = None  # the clock of the COMMIT that has not been answered
        self._connection: Connection | None = None
        self._refused = 0
        self._pause = FIRST_PAUSE
        self._error: BaseException | None = None  # what every job fails with from now on
        self._jobs: deque[_Job] = deque()
        self._wakeup, self._closing = Wakeup(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shardwise {end}", daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], Result]) -> Future[Result]:
        """Let the thread do a job after those that were posted before; the future has its result.

        It raises :class:`ServerLost` where the server is lost, and is cancelled by :meth:`close`.
        """
        job = _Job(work)
        self._jobs.append(job)
        if self._closing.is_set():
            job.future.cancel()
        self.wake()
        return job.future

    def wake(self) -> None:
        """Let the thread look at what it waits for."""
        self._wakeup.wake()

    def close(self) -> None:
        """End the thread and the connection; jobs that are not done are cancelled or fail."""
        self._closing.set()
        self.wake()
        self._thread.join()

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def join(self) -> int:
        """Be one of the live workers, and return the clock at this server."""
        if not self.joined:
            self.joined = True  # from now on a new connection joins by itself
            self._join()
        return self.clock

    def rest(self) -> None:
        """Hold nobody back until the next :meth:`join`."""
        self.joined = False
        self._open.send(bare(Header.of(Kind.LEAVE)))

    def ask_ticket(self, waits: bool) -> int:
        """Return a ticket, or what ``core/tickets.py`` answers otherwise."""
        self.ticket = self._open.ask(Header.of(Kind.TICKET, waits=int(waits)), Kind.NUMBER)["ticket"]
        return self.ticket

    def push(self, parts: list[Part]) -> None:
        """Send parts of a push."""
        if not self._parts or self._parts[-1] is not parts[-1]:  # else this job was interrupted
            self._parts += parts
        self._flush()

    def commit(self, ticket: int, read: int, weight: float) -> Ack:
        """Let the server apply what was sent."""
        if self._committing is None:
            self._committing = self.clock
        self._flush()
        clock, bits = self._committing, bits_of(weight)
        answer = self._open.ask(Header.of(Kind.COMMIT, clock=clock, ticket=ticket, read=read, weight=bits), Kind.ACK)
        ack = Ack(Outcome(answer["outcome"]), clock, answer["version"])
        self._parts, self._sent, self._committing, self.ticket = [], 0, None, -1
        self._seen = max(self._seen, ack.version)
        if ack.outcome != Outcome.REFUSED:
            self.clock = max(self.clock, clock + 1)
        return ack

    def discard(self) -> Ack:
        """Let the server forget what was sent."""
        self._open.send(bare(Header.of(Kind.DISCARD)))
        self._parts, self._sent, self.ticket = [], 0, -1
        return Ack(Outcome.REFUSED, self.clock, self._seen)

    def pull(self, into: Mapping[int, memoryview]) -> int:
        """Receive all parameters into memory of the server's ranges, which has those of the last pull; return their
        version."""
        self._seen = self._open.pull(self.clock if self.joined else 0, into, *self._have)
        self._have = self._seen, self._start
        return self._seen

    def wait_for(self, other: Future[Result]) -> Result:
        """Return what a job of another link results in, and stay connected meanwhile."""
        other.add_done_callback(lambda _: self.wake())
        while not other.done() and not self._closing.is_set():
            self._open.pump()
        return other.result(timeout=0)

    @property
    def _open(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def _join(self) -> None:
        self.clock = self._open.ask(Header.of(Kind.JOIN, clock=self.clock), Kind.JOINED)["clock"]

    def _flush(self) -> None:
        while self._sent < len(self._parts):
            part = self._parts[self._sent]
            self._open.send(holding(part.header(), part.payload))
            self._sent += 1

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._jobs:
                self._do(self._jobs.popleft())
            elif self._start and self._error is None:
                self._stay()
            else:
                self._wakeup.wait(self.end.heartbeat)
        if self._connection is not None:
            self._connection.close()
        while self._jobs:
            self._jobs.popleft().future.cancel()
        self._wakeup.close()

    def _do(self, job: _Job) -> None:
        """Do a job, on as many connections as it takes."""
        if not job.future.set_running_or_notify_cancel():
            return
        failing: float | None = None
        while self._error is None:
            began = time.monotonic()
            try:
                self._connect()
                result = job.work()
            except (OSError, FrameError) as error:
                now = time.monotonic()
                if failing is None or now - began > self.end.patience:  # it had worked for long
                    failing = now
                self._interrupted(error)
                if self._closing.is_set():
                    self._error = ServerLost(f"{self.end}: the client was closed")
                elif now - failing > self.end.patience:
                    self._error = ServerLost(f"{self.end}: not reached for {self.end.patience:g} s; {error}")
            except BaseException as error:
                self._error = error
            else:
                self._pause = FIRST_PAUSE
                job.future.set_result(result)
                return
        job.future.set_exception(self._error)

    def _stay(self) -> None:
        """Stay connected until there is a job: a worker that computes is as live as one that talks."""
        try:
            self._connect()
            self._open.pump()
        except (OSError, FrameError) as error:
            self._interrupted(error)
        except BaseException as error:
            self._error = error

    def _interrupted(self, error: Exception) -> None:
        """Give the connection up, and pause before there is another one."""
        if self._connection is not None:
            self._log(f"{self.end}: the connection has ended: {error}")
            self._connection.close()
            self._connection = None
        if isinstance(error, Refused):
            self._refused += 1
            if self._refused >= REFUSALS:
                self._error = refused(self.end, REFUSALS)
                return
        self._closing.wait(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _connect(self) -> None:
        """Connect unless there is a connection, tell what is left of an earlier one, and join if the worker had."""
        if self._connection is not None:
            return
        self._connection = Connection(
            self.end, self._wakeup, seen=self._seen, start=self._start, ticket=self.ticket
        )  # fmt: skip
        self._refused, self._sent = 0, 0
        self._seen, self._start = self._connection.welcome["version"], self._connection.welcome["start"]
        if self.joined:
            self._join()
