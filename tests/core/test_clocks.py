"""The stale-synchronous rule on clocks alone, against a model that counts pushes itself."""

from __future__ import annotations

import heapq
import random

import pytest

from shardwise.core.clocks import Clocks
from shardwise.core.errors import ConfigError


class Simulation:
    """Workers of random speeds read, compute and push; they join and leave at any time, some without a sign.

    What the rule promises is checked with counts of its own: a worker that reads misses no push of clock below c − s of
    any live worker, and nobody waits who could go on.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.bound = self.random.choice([0, 1, 2, 5])
        self.clocks = Clocks(self.bound)
        self.count: dict[int, int] = {}  # of live workers
        self.last: dict[int, int] = {}  # the clock of the last push of any
        self.reading: set[int] = set()
        self.pace = {worker: self.random.choice([1.0, 1.0, 3.0, 10.0]) for worker in range(6)}
        self.events: list[tuple[float, int, int, str, int]] = []
        self.lives = dict.fromkeys(range(6), 0)
        self.now, self.order, self.answered, self.spread = 0.0, 0, 0, 0

    def plan(self, delay: float, what: str, worker: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, self.lives[worker], what, worker))

    def run(self, events: int) -> None:
        for worker in range(4):
            self.plan(self.random.random(), "join", worker)
        for _ in range(events):
            if not self.events:
                break
            self.now, _, life, what, worker = heapq.heappop(self.events)
            if life == self.lives[worker]:
                getattr(self, what)(worker)
                self.check()
            if self.random.random() < 0.05:
                self.plan(0, self.random.choice(["join", "leave"]), self.random.randrange(6))

    def check(self) -> None:
        least = min(self.count.values(), default=0)
        assert self.clocks.live == self.count
        assert self.reading == {w for w in self.reading if self.count[w] > least + self.bound}, "one waits in vain"
        assert self.reading == self.clocks.waiting
        if self.count:
            assert len(self.reading) < len(self.count), "all wait"
            self.spread = max(self.spread, max(self.count.values()) - least)

    def released(self, workers: tuple[int, ...]) -> None:
        for worker in workers:
            self.reading.remove(worker)
            assert all(self.count[worker] <= other + self.bound for other in self.count.values())
            self.answered += 1
            self.plan(self.random.expovariate(1 / self.pace[worker]), "push", worker)

    def join(self, worker: int) -> None:
        if worker in self.count:
            return
        floor = min(self.count.values(), default=self.clocks.floor)
        self.clocks, released = self.clocks.join(worker)
        self.count[worker] = max(floor, self.last.get(worker, -1) + 1)
        self.released(released)
        self.read(worker)

    def leave(self, worker: int) -> None:
        self.lives[worker] += 1
        self.count.pop(worker, None)
        self.reading.discard(worker)
        self.clocks, released = self.clocks.leave(worker)
        self.released(released)

    def read(self, worker: int) -> None:
        self.reading.add(worker)
        self.clocks, released = self.clocks.read(worker)
        self.released(released)

    def push(self, worker: int) -> None:
        clock = self.count[worker]
        assert clock > self.last.get(worker, -1), "a clock is used twice"
        self.count[worker], self.last[worker] = clock + 1, clock
        self.clocks, released = self.clocks.push(worker, clock)
        self.released(released)
        self.read(worker)


def test_the_bound_holds_whoever_joins_and_leaves() -> None:
    answered = spread = 0
    for seed in range(1000):
        simulation = Simulation(seed)
        simulation.run(60)
        answered, spread = answered + simulation.answered, max(spread, simulation.spread - simulation.bound)
    assert answered > 10_000, "the simulation hardly runs"
    assert spread == 1, "no worker has ever come as far ahead as the rule lets it"


def test_who_is_released() -> None:
    clocks, _ = Clocks(0).join(1)
    clocks, _ = clocks.join(2)
    clocks, _ = clocks.push(1, 0)
    clocks, released = clocks.read(1)
    assert released == () and clocks.waiting == {1}
    assert clocks.push(2, 0)[1] == (1,), "the push that it waits for"
    assert clocks.leave(2)[1] == (1,), "the death of the worker that it waits for"
    assert clocks.leave(1)[1] == (), "it has left itself"
    assert clocks.read(7)[1] == (7,), "one that has not joined"
    assert Clocks().join(1)[0].push(1, 0)[0].join(2)[0].push(1, 1)[0].read(1)[1] == (1,), "without a bound"


def test_where_workers_join() -> None:
    clocks = Clocks(3)
    for worker in (1, 2):
        clocks, _ = clocks.join(worker)
    for clock in range(3):
        clocks, _ = clocks.push(1, clock)
    clocks, _ = clocks.push(2, 0)
    assert clocks.join(3)[0].live[3] == 1, "at the minimum"
    assert clocks.join(3, 2)[0].live[3] == 2, "at the clock that it says it has"
    gone = clocks.leave(1)[0]
    assert gone.join(1)[0].live[1] == 3, "after its own last push"
    alone = clocks.leave(1)[0].leave(2)[0]
    assert alone.floor == 1 and alone.join(2)[0].live[2] == 1 and alone.join(5)[0].live[5] == 1, "the floor stays"


def test_pushes_that_are_not_legal() -> None:
    clocks, _ = Clocks(1).join(1)
    clocks, _ = clocks.push(1, 0)
    for worker, clock in ((1, 0), (1, 2), (2, 0)):
        with pytest.raises(ValueError, match="a push at clock"):
            clocks.push(worker, clock)
    assert not clocks.is_new(1, 0) and clocks.is_new(1, 1)
    later, _ = clocks.join(1, 9)
    assert later.push(1, 4)[0].live[1] == 9, "a push that is sent again does not take a clock back"
    with pytest.raises(ConfigError, match="stale: -1"):
        Clocks(-1)
