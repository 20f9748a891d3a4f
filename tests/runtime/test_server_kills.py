"""Workers and servers are killed at random points; the records then say what has become of every push."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import LR
from serving_process import BOUND, NUMELS, SERVERS, SHARES, TICKETS, WORKERS, load, value

from shardwise.runtime.secret import make_secret

Event = dict[str, Any]
SCRIPT = Path(__file__).with_name("serving_process.py")


class Processes:
    """Servers and workers of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, [free_port() for _ in range(SERVERS)]
        make_secret(folder / "secret")
        self.servers = [self.server(k) for k in range(SERVERS)]
        self.workers = [self.worker(w) for w in range(WORKERS)]

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(SCRIPT), *map(str, words)])

    def server(self, k: int) -> subprocess.Popen[bytes]:
        return self.start("server", self.folder, k, self.ports[k])

    def worker(self, w: int) -> subprocess.Popen[bytes]:
        return self.start("worker", self.folder, w, *self.ports)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        assert process.poll() is None, "it has ended by itself, so the kill tests nothing"
        process.send_signal(signal.SIGKILL)
        process.wait(20)

    def record(self, k: int) -> list[Event]:
        return [json.loads(line) for line in (self.folder / f"record_{k}.jsonl").read_text().splitlines()]

    def end(self) -> None:
        for process in (*self.servers, *self.workers):
            process.kill()
            process.wait(20)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.end()


def surviving(events: list[Event]) -> list[Event]:
    """The pushes that the parameters have at the end; those that restarts have lost are left out."""
    pushes: list[Event] = []
    for event in events:
        if event["event"] == "push":
            assert event["version"] == len(pushes) + 1, "versions are consecutive"
            pushes.append(event)
        elif event["event"] == "restart":
            assert event["version"] <= len(pushes)
            del pushes[event["version"] :]
    return pushes


def stated_losses(events: list[Event]) -> int:
    """What a restart says it has lost is what it has, but for updates that nobody alive had seen: how many in all."""
    starts = [event for event in events if event["event"] in ("start", "restart")]
    began = {event["start"]: event["version"] for event in starts}
    ended, seen, now = dict(began), dict.fromkeys(began, 0), 0
    for event in events:
        match event["event"]:
            case "start" | "restart":
                now = event["start"]
            case "push":
                ended[now] = event["version"]
            case "lost":
                assert began[now] < event["seen"] <= ended[event["of"]] and event["of"] != now
                assert event["updates"] == event["seen"] - began[now]
                seen[event["of"]] = max(seen[event["of"]], event["seen"])
    lost, unseen = 0, 0
    for one, following in pairwise(event["start"] for event in starts):
        lost += ended[one] - began[following]
        unseen += ended[one] - max(seen[one], began[following])
    assert unseen <= WORKERS * (len(starts) - 1)
    return lost


def replayed_clocks(events: list[Event]) -> None:
    """The bound held at every pull, and no push of a start was counted twice."""
    clocks: dict[int, int] = {}
    for event in events:
        worker = event.get("worker", -1)
        match event["event"]:
            case "restart":
                clocks = {}
            case "join":
                clocks[worker] = event["clock"]
            case "leave":
                clocks.pop(worker, None)  # it may have had a ticket alone
            case "push":
                assert event["clock"] <= clocks[worker]
                clocks[worker] = max(clocks[worker], event["clock"] + 1)
            case "pull" if event["clock"] is not None:
                assert event["clock"] == clocks[worker] <= min(clocks.values()) + BOUND


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_twenty_workers_and_ten_servers_are_killed(processes: Processes) -> None:
    draw = random.Random(7)
    victims = [*["worker"] * 20, *["server"] * 10]
    draw.shuffle(victims)
    time.sleep(1.0)
    for victim in victims:
        time.sleep(draw.uniform(0.05, 0.4))
        if victim == "worker":
            w = draw.randrange(WORKERS)
            processes.kill(processes.workers[w])
            processes.workers[w] = processes.worker(w)
        else:
            k = draw.randrange(SERVERS)
            processes.kill(processes.servers[k])
            processes.servers[k] = processes.server(k)
    for process in processes.workers:
        assert process.wait(120) == 0
    for process in processes.servers:
        process.terminate()
        assert process.wait(20) == 0

    restarts = 0
    for k in range(SERVERS):
        events = processes.record(k)
        lost = stated_losses(events)
        restarts += sum(event["event"] == "restart" for event in events)
        replayed_clocks(events)
        pushes = surviving(events)
        assert len({(p["worker"], p["clock"]) for p in pushes}) == len(pushes)
        done = [p["ticket"] for p in pushes]
        if k == 0:
            assert sorted(done) == list(range(TICKETS)), "each batch once, on the server of the tickets"
        else:
            assert len(set(done)) >= TICKETS - lost - 20, "one is missing that was not lost, nor its worker killed"
        arrays, snapshot = load(processes.folder / f"end_{k}.npz")
        assert snapshot["version"] == len(pushes)
        expected = 0.0
        for ticket in done:
            expected -= LR * 1.0 * value(ticket)
        for b in NUMELS:
            np.testing.assert_array_equal(arrays[b], np.full(SHARES[k][b].numel, expected))
    assert 5 <= restarts <= 10
