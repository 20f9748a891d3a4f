"""A server's decisions, and its record of them, without any sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.core.clocks import Clocks
from shardwise.core.errors import ConfigError
from shardwise.core.frames import Outcome
from shardwise.core.ledger import Commit, Ledger
from shardwise.core.tickets import NONE, Tickets


def made(**more: Any) -> tuple[Ledger, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    given = {"clocks": Clocks(0), "tickets": Tickets(5), "start": 11, **more}
    return Ledger(
        given.pop("clocks"), given.pop("tickets"), lambda line: events.append(json.loads(line)), **given
    ), events


def push(ledger: Ledger, worker: int, clock: int, ticket: int) -> Outcome:
    commit = Commit(worker, clock, ticket, ledger.version, 0.5)
    outcome = ledger.judge(commit)
    if outcome == Outcome.APPLIED:
        ledger.applied(commit)
    return outcome


def test_the_record_has_every_decision_in_order() -> None:
    ledger, events = made()
    ledger.join(1, 0)
    ledger.join(2, 0)
    assert ledger.ticket(1, False) == {1: 0} and ledger.ticket(2, False) == {2: 1}
    assert push(ledger, 1, 0, 0) == Outcome.APPLIED and ledger.version == 1
    assert ledger.read(1) == ()
    released, answers = ledger.leave(2, "it died")
    assert released == (1,) and answers == {}
    ledger.pulled(1)
    assert push(ledger, 1, 0, 0) == Outcome.DUPLICATE
    assert ledger.ticket(1, False) == {1: 1}
    assert push(ledger, 1, 1, 4) == Outcome.REFUSED
    assert events == [
        {"event": "start", "server": 0, "version": 0, "start": 11},
        {"event": "join", "worker": 1, "clock": 0},
        {"event": "join", "worker": 2, "clock": 0},
        {"event": "ticket", "worker": 1, "ticket": 0},
        {"event": "ticket", "worker": 2, "ticket": 1},
        {"event": "push", "worker": 1, "clock": 0, "ticket": 0, "read": 0, "weight": 0.5, "version": 1},
        {"event": "leave", "worker": 2, "reason": "it died"},
        {"event": "pull", "worker": 1, "clock": 1, "version": 1},
        {"event": "duplicate", "worker": 1, "clock": 0, "version": 1},
        {"event": "ticket", "worker": 1, "ticket": 1},
        {"event": "refused", "worker": 1, "clock": 1, "ticket": 4},
    ]


def test_what_a_restart_knows_and_what_it_has_lost() -> None:
    ledger, _ = made()
    for worker in (1, 2):
        ledger.join(worker, 0)
        ledger.ticket(worker, False)
    push(ledger, 1, 0, 0)
    snapshot = json.loads(json.dumps(ledger.snapshot()))
    push(ledger, 2, 0, 1)
    assert ledger.ticket(1, False) == {1: 2}
    push(ledger, 1, 1, 2)  # versions 2 and 3 are lost

    again, events = made(start=12, snapshot=snapshot)
    assert again.version == 1 and events == [{"event": "restart", "server": 0, "version": 1, "start": 12}]
    again.seen(1, 3, 11, -1)
    again.seen(2, 2, 11, 1)
    again.seen(3, 0, 0, -1)
    assert again.lost == 2
    assert [e for e in events if e["event"] == "lost"] == [
        {"event": "lost", "worker": 1, "seen": 3, "of": 11, "updates": 2},
        {"event": "lost", "worker": 2, "seen": 2, "of": 11, "updates": 1},
    ]
    assert again.join(1, 2)[0] == 2, "the clock that it had"
    assert again.join(2, 0)[0] == 2, "the minimum"
    assert push(again, 1, 0, 0) == Outcome.DUPLICATE, "from before the snapshot"
    assert again.version_after(Commit(1, 0, 0, 0, 1.0)) == 1
    assert push(again, 2, 0, 1) == Outcome.APPLIED, "its own ticket, which it has claimed, for a push that was lost"
    assert again.ticket(1, False) == {1: 2}, "a batch of which the update was lost"
    again.seen(1, 2, 12, -1)
    assert again.lost == 2, "a version of this start is not lost"


def test_a_snapshot_of_another_server_or_run() -> None:
    ledger, _ = made()
    snapshot = ledger.snapshot()
    for change, said in (
        ({"server": 1}, "it is of server 1; legal: one of server 0"),
        ({"tickets": None}, "its tickets are None"),
        ({"version": "x"}, "cannot be read"),
        ({"pushed": [3]}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            made(snapshot={**snapshot, **change})
    with pytest.raises(ConfigError, match="start: 0"):
        made(start=0)


def test_commits_that_are_not_legal() -> None:
    ledger, events = made()
    ledger.join(1, 0)
    before = len(events)
    for worker, clock, ticket, read, weight in (
        (2, 0, -1, 0, 1.0), (1, 1, -1, 0, 1.0), (1, -1, -1, 0, 1.0), (1, 0, -2, 0, 1.0), (1, 0, -1, -1, 1.0),
        (1, 0, -1, 0, float("nan")), (1, 0, -1, 0, float("inf")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="a push"):
            ledger.judge(Commit(worker, clock, ticket, read, weight))
    assert len(events) == before
    without, _ = made(tickets=None)
    with pytest.raises(ValueError, match="no tickets"):
        without.ticket(1, False)


def test_the_last_ticket() -> None:
    ledger, _ = made(tickets=Tickets(1))
    for worker in (1, 2):
        ledger.join(worker, 0)
    ledger.ticket(1, False)
    assert ledger.ticket(2, True) == {}
    commit = Commit(1, 0, 0, 0, 1.0)
    assert ledger.judge(commit) == Outcome.APPLIED
    assert ledger.applied(commit) == ((), {2: NONE})
