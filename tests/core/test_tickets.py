"""Tickets: each is done once, whoever dies."""

from __future__ import annotations

import random

import pytest

from shardwise.core.tickets import LATER, NONE, Answers, Tickets


class Epoch:
    """Four workers ask, finish and die at random until every ticket is done or dropped."""

    def __init__(self, seed: int, again: bool) -> None:
        self.random, self.again = random.Random(seed), again
        self.tickets = Tickets(20, again)
        self.done: list[int] = []
        self.dropped: list[int] = []
        self.held: dict[int, int] = {}
        self.idle, self.waiting, self.ended = set(range(4)), set[int](), set[int]()

    def give(self, answers: Answers) -> None:
        for worker, ticket in answers.items():
            self.idle.discard(worker)
            self.waiting.discard(worker)
            if ticket >= 0:
                assert ticket not in (*self.done, *self.dropped, *self.held.values())
                self.held[worker] = ticket
            elif ticket == NONE:
                assert self.tickets.all_done() or not self.again
                self.ended.add(worker)
            else:
                assert ticket == LATER and self.again and self.held
                self.idle.add(worker)

    def ask(self, worker: int) -> None:
        if worker in self.idle:
            waits = self.random.random() < 0.5
            self.tickets, answers = self.tickets.ask(worker, waits)
            if worker not in answers:
                assert waits
                self.idle.discard(worker)
                self.waiting.add(worker)
            self.give(answers)

    def finish(self, worker: int) -> None:
        if worker in self.held:
            self.done.append(self.held.pop(worker))
            self.idle.add(worker)
            self.tickets, answers = self.tickets.done(worker)
            self.give(answers)

    def die(self, worker: int) -> None:
        if worker not in self.ended:
            if worker in self.held and not self.again:
                self.dropped.append(self.held[worker])
            self.held.pop(worker, None)
            self.waiting.discard(worker)
            self.idle.add(worker)
            self.tickets, answers = self.tickets.leave(worker)
            self.give(answers)


@pytest.mark.parametrize("again", [True, False])
def test_every_ticket_is_done_once_or_dropped(again: bool) -> None:
    for seed in range(60):
        epoch = Epoch(seed, again)
        for _ in range(2000):
            what = epoch.random.choice([epoch.ask, epoch.finish, epoch.finish, epoch.die])
            what(epoch.random.randrange(4))
            assert [t for t in range(20) if epoch.tickets.is_done(t)] == sorted(epoch.done)
            if len(epoch.ended) == 4:
                break
        assert sorted([*epoch.done, *epoch.dropped]) == list(range(20)), seed
        assert again == (not epoch.dropped) and not epoch.waiting


def test_one_that_waits_gets_what_a_dead_worker_leaves() -> None:
    tickets, answers = Tickets(1).ask(1)
    assert answers == {1: 0}
    assert tickets.ask(2)[1] == {2: LATER}
    tickets, answers = tickets.ask(2, waits=True)
    assert answers == {} and tickets.waiting == (2,)
    assert tickets.done(1)[1] == {2: NONE}
    assert tickets.leave(1)[1] == {2: 0}
    with pytest.raises(ValueError, match="worker 1 asks for a ticket"):
        tickets.ask(1)
    with pytest.raises(ValueError, match="worker 2 asks for a ticket"):
        tickets.ask(2)


def test_claims() -> None:
    tickets, _ = Tickets(9).ask(1)
    tickets, _ = tickets.ask(2)
    tickets, _ = tickets.leave(1)
    assert tickets.claim(1, 0).held == {1: 0, 2: 1} and not tickets.claim(1, 0).free, "it is back"
    taken, _ = tickets.ask(3)
    assert taken.held[3] == 0 and taken.claim(1, 0) is taken, "another one has it"
    assert tickets.done(2)[0].claim(2, 1).held == {}, "it is done"
    restarted = tickets.alone()
    assert restarted.free == {0, 1}
    far = restarted.claim(2, 5)
    assert far.held == {2: 5} and far.free == {0, 1, 2, 3, 4} and far.next == 6, "from after the snapshot"
    assert far.claim(1, 3).held == {2: 5, 1: 3}
    assert far.claim(1, 9) is far and far.claim(1, -1) is far
    once = Tickets(9, again=False).claim(2, 5)
    assert once.dropped == {0, 1, 2, 3, 4} and once.claim(1, 3).dropped == {0, 1, 2, 4}
    assert once.ask(1)[1] == {1: 6}
