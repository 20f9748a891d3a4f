"""The ledger of a parameter server: every decision it makes, as pure data in and out, and the record of them.

A server of sockets asks the ledger and does what it answers (``runtime/server.py``).  The record is one line of JSON
for each decision, in the order in which they were made, so a replay of it makes the same parameters:

| event | what it says |
|---|---|
| ``start`` | a server begins at ``version``; ``restart`` if that is a snapshot's; ``start`` tells starts apart |
| ``lost`` | a worker has seen version ``seen`` of ``of``, an earlier start; ``updates`` of that are not in this one |
| ``join`` | a worker is live, from ``clock`` on |
| ``leave`` | it holds nobody back any more, and why; its ticket, if it had one, is free (``tickets.py``) |
| ``ticket`` | a worker has a ticket: a new one, or one that it still had when it connected again |
| ``push`` | a push was applied: its worker, clock, ticket (−1: none), weight, the version ``read`` that its gradient \
is of (perhaps of an earlier start), and the ``version`` after it |
| ``duplicate`` | a push came again, and was not applied again; ``version`` is that after the first time |
| ``refused`` | a push was not applied, since another worker has its ticket or has done it |
| ``pull`` | a worker is sent the parameters of ``version``; ``clock`` is null if it is not live |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.core.clocks import Clocks, Released
from shardwise.core.errors import ConfigError, check_count
from shardwise.core.frames import Outcome
from shardwise.core.tickets import Answers, Tickets


@dataclass(frozen=True, slots=True)
class Commit:
    """A worker asks to apply its push: at which clock, of which ticket (−1: none), with a gradient at which version,
    and with which weight."""

    worker: int
    clock: int
    ticket: int
    read: int
    weight: float


class Ledger:
    """This decides for one server, which has applied ``version`` pushes so far.

    ``record`` is called with each line, before anybody is told of the decision.  ``tickets`` is None on all servers but
    the first.  ``start`` is a number of at least 1 that no other start of the server has, such as a random one.
    """

    def __init__(
        self,
        clocks: Clocks,
        tickets: Tickets | None,
        record: Callable[[str], None],
        *,
        server: int = 0,
        start: int,
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin at version 0, or where the :meth:`snapshot` of an earlier start was taken.

        Raises :class:`ConfigError` for a snapshot that is of another server or of other tickets.
        """
        check_count("start", start)
        self.clocks, self.tickets = clocks, tickets
        self.version, self.start, self.server = 0, start, server
        self.lost = 0  # updates of an earlier start that this one does not have: the most that a worker has told
        self._record = record
        self._applied: dict[int, int] = {}  # the version after the last push of each worker
        if snapshot is not None:
            self._restore(snapshot)
        self._began = self.version
        self._note("start" if snapshot is None else "restart", server=server, version=self.version, start=start)

    def snapshot(self) -> dict[str, Any]:
        """Return all that a restarted server needs beside the parameters, as values for JSON.

        Tickets that workers have are among the free ones (or the dropped ones): a worker that comes back claims its
        own.
        """
        clocks, tickets = self.clocks.alone(), self.tickets and self.tickets.alone()
        return {
            "server": self.server,
            "version": self.version,
            "floor": clocks.floor,
            "pushed": [[worker, clock, self._applied[worker]] for worker, clock in sorted(clocks.pushed.items())],
            "tickets": tickets
            and {
                "total": tickets.total, "next": tickets.next, "free": sorted(tickets.free),
                "dropped": sorted(tickets.dropped),
            },
        }  # fmt: skip

    def _restore(self, values: Mapping[str, Any]) -> None:
        where = f"snapshot of server {self.server}"
        try:
            pushed = {int(worker): int(clock) for worker, clock, _ in values["pushed"]}
            self._applied = {int(worker): int(version) for worker, _, version in values["pushed"]}
            self.version, kept, server = int(values["version"]), values["tickets"], values["server"]
            self.clocks = Clocks(self.clocks.bound, floor=int(values["floor"]), pushed=pushed)
            if server != self.server:
                raise ConfigError.on(where, f"it is of server {server}", f"one of server {self.server}")
            if (kept and kept["total"]) != (self.tickets and self.tickets.total):
                raise ConfigError.on(where, f"its tickets are {kept}", "as many tickets as the run has")
            if self.tickets is not None:
                free, dropped = frozenset(map(int, kept["free"])), frozenset(map(int, kept["dropped"]))
                again = self.tickets.again
                self.tickets = Tickets(int(kept["total"]), again, int(kept["next"]), free=free, dropped=dropped)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError.on(where, f"cannot be read: {error!r}", "what Ledger.snapshot returned") from None

    # ---- what workers ask; each answer has who may read now, and who gets which ticket -------------------------------

    def seen(self, worker: int, version: int, start: int, ticket: int) -> None:
        """Hear from a worker that connects which version it has seen last, of which start, and which ticket it has."""
        if start not in (0, self.start) and version > self._began:
            updates = version - self._began
            self.lost = max(self.lost, updates)
            self._note("lost", worker=worker, seen=version, of=start, updates=updates)
        if self.tickets is not None and ticket >= 0:
            self.tickets = self.tickets.claim(worker, ticket)
            if self.tickets.held.get(worker) == ticket:
                self._note("ticket", worker=worker, ticket=ticket)

    def join(self, worker: int, clock: int) -> tuple[int, Released]:
        """Make a worker live; return its clock, and who may read."""
        self.clocks, released = self.clocks.join(worker, clock)
        self._note("join", worker=worker, clock=self.clocks.live[worker])
        return self.clocks.live[worker], released

    def leave(self, worker: int, reason: str) -> tuple[Released, Answers]:
        """Let a worker leave, which had joined or not."""
        if worker in self.clocks.live or (self.tickets is not None and worker in self.tickets.held):
            self._note("leave", worker=worker, reason=reason)
        self.clocks, released = self.clocks.leave(worker)
        answers: Answers = {}
        if self.tickets is not None:
            self.tickets, answers = self.tickets.leave(worker)
        return released, self._given(answers)

    def ticket(self, worker: int, waits: bool) -> Answers:
        """Return the tickets that are handed out now; a worker that ``waits`` may get its own later.

        Raises ValueError where this server has no tickets, or the worker has one.
        """
        if self.tickets is None:
            raise ValueError("this server has no tickets")
        self.tickets, answers = self.tickets.ask(worker, waits)
        return self._given(answers)

    def judge(self, commit: Commit) -> Outcome:
        """Return what is to become of a push; :data:`Outcome.APPLIED` is to be applied, and then :meth:`applied`.

        Raises ValueError for a worker that is not live, a clock that it does not have yet, and what no push has.
        """
        if not math.isfinite(commit.weight) or commit.read < 0 or commit.ticket < -1:
            raise ValueError(f"a push with weight {commit.weight}, version {commit.read}, ticket {commit.ticket}")
        if commit.worker not in self.clocks.live or not 0 <= commit.clock <= self.clocks.live[commit.worker]:
            have = self.clocks.live.get(commit.worker)
            raise ValueError(f"a push of worker {commit.worker} at clock {commit.clock}, where its clock is {have}")
        if not self.clocks.is_new(commit.worker, commit.clock):
            again = self.version_after(commit)
            self._note("duplicate", worker=commit.worker, clock=commit.clock, version=again)
            return Outcome.DUPLICATE
        if self.tickets is not None and commit.ticket >= 0 and self.tickets.held.get(commit.worker) != commit.ticket:
            self._note("refused", worker=commit.worker, clock=commit.clock, ticket=commit.ticket)
            return Outcome.REFUSED
        return Outcome.APPLIED

    def applied(self, commit: Commit) -> tuple[Released, Answers]:
        """Count a push that has been applied as a whole."""
        self.clocks, released = self.clocks.push(commit.worker, commit.clock)
        self.version += 1
        self._applied[commit.worker] = self.version
        self._note(
            "push",
            worker=commit.worker,
            clock=commit.clock,
            ticket=commit.ticket,
            read=commit.read,
            weight=commit.weight,
            version=self.version,
        )
        if self.tickets is None or commit.ticket < 0:
            return released, {}
        self.tickets, answers = self.tickets.done(commit.worker)
        return released, self._given(answers)

    def version_after(self, commit: Commit) -> int:
        """Return the version after the last push of a worker, which ``commit`` repeats."""
        return self._applied[commit.worker]

    def read(self, worker: int) -> Released:
        """Let a worker ask to read."""
        self.clocks, released = self.clocks.read(worker)
        return released

    def pulled(self, worker: int) -> None:
        """Note that a worker is sent the parameters of the present version."""
        self._note("pull", worker=worker, clock=self.clocks.live.get(worker), version=self.version)

    def _given(self, answers: Answers) -> Answers:
        for worker, ticket in answers.items():
            if ticket >= 0:
                self._note("ticket", worker=worker, ticket=ticket)
        return answers

    def _note(self, event: str, **values: object) -> None:
        self._record(json.dumps({"event": event, **values}))
