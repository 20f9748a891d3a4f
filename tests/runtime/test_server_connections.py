"""Who may connect to a server, what a connection may ask, and that nobody waits for one that does not read."""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import pytest
from serving import Array, Raw, served, shared_out, until

from shardwise.core.errors import ConfigError
from shardwise.core.frames import MAX_PAYLOAD, Header, Kind, Share
from shardwise.core.tickets import Tickets
from shardwise.runtime import server as server_module
from shardwise.runtime.server_client import ServerClient
from shardwise.runtime.server_connection import ServerLost
from shardwise.runtime.staging import Part


@pytest.mark.slow
def test_a_worker_without_a_sign_of_life_leaves() -> None:
    with served({0: 4}, bound=0, timeout=1.5) as run:
        silent = Raw(run.addresses[0], worker=1)
        silent.enter()
        silent.join()
        lives = run.client(0, heartbeat=0.1)
        lives.join()
        lives.push(0, np.ones(4))
        lives.commit(None, [0]).wait(10)
        began = time.monotonic()
        lives.pull({0: np.empty(4)}).wait(10)
        assert time.monotonic() - began > 0.5
        assert "no sign of life" in run.of("leave")[0]["reason"]
        time.sleep(1.7)
        assert len(run.of("leave")) == 1, "PINGs are signs of life"
        lives.close()


def test_a_client_that_does_not_read_is_dropped_and_nobody_waits_for_it() -> None:
    size = 8 * MAX_PAYLOAD // 8
    with served({0: size}, timeout=0.7) as run:
        deaf = Raw(run.addresses[0], worker=1)
        deaf.enter()
        deaf.send(pull(-1))
        client, ones = run.client(0, heartbeat=0.2), np.ones(size)
        client.join()
        into = {0: np.empty(size)}
        for step in range(2):
            client.push(0, ones)
            client.commit(None, [step]).wait(20)
            client.pull(into).wait(20)
        assert len(set(into[0])) == 1
        until(lambda: any("has read nothing for 0.7 s" in line for line in run.log))
        client.close()


@pytest.mark.slow
def test_a_client_that_asks_and_does_not_read_is_dropped() -> None:
    with served({0: 4}, timeout=0.7) as run:
        asks = Raw(run.addresses[0], worker=1)
        asks.enter()
        with pytest.raises(OSError):
            send_for_ever(asks)
        until(lambda: any("has read nothing for 0.7 s" in line for line in run.log))


def send_for_ever(raw: Raw) -> None:
    while True:
        raw.send(Header.of(Kind.PING))


def test_a_slow_reader_gets_one_version_while_others_push() -> None:
    size = 12 * MAX_PAYLOAD // 8
    with served({0: size, 1: 5}) as run:
        slow = Raw(run.addresses[0], worker=1)
        slow.enter()
        slow.send(pull(-1))
        until(lambda: run.of("pull"))
        client = run.client(0)
        client.join()
        for step in range(3):
            client.push(0, np.ones(size))
            client.push(1, np.ones(5))
            client.commit(None, [step]).wait(20)
        values = []
        while (header := unpacked(slow, values)).kind != Kind.PULLED:
            assert header["version"] == 0
        assert not np.concatenate(values).any() and sum(map(len, values)) == size + 5
        client.close()


def pull(since: int, start: int = 0) -> Header:
    return Header.of(Kind.PULL, clock=0, since=since, start=start)


@pytest.mark.parametrize(("start", "frames"), [(0, 1), (-1, 4)])
def test_rows_of_a_table_are_those_of_the_version_that_was_asked_for(start: int, frames: int) -> None:
    """A push comes between the pull and its answer, while the server applies an earlier push.  Of another start of the
    server the worker has no version, so all rows come."""
    numel = 4 * (MAX_PAYLOAD // 24) * 3
    with served({0: numel}, row=3, slow=0.4) as run:
        first, other, reader = (Raw(run.addresses[0], worker=worker) for worker in (1, 2, 3))
        for one in (first, other, reader):
            one.enter()
        for one in (first, other):
            one.join()
        own = run.servers[0].ledger.start
        first.row(0, 2, np.ones(3))
        first.send(Header.of(Kind.COMMIT, clock=0, ticket=-1, read=0, weight=0x3FF0000000000000))
        time.sleep(0.2)
        reader.send(pull(0, own + start))
        time.sleep(0.05)
        other.row(0, 7, np.ones(3))
        other.send(Header.of(Kind.COMMIT, clock=0, ticket=-1, read=0, weight=0x3FF0000000000000))
        values: list[Array] = []
        while (header := unpacked(reader, values)).kind != Kind.PULLED:
            assert header["version"] == 1
        assert len(values) == frames and run.stores[0].applied == 2
        rows = values[0].view(np.uint8)[4:].view(np.float64) if frames == 1 else np.concatenate(values)[6:9]
        assert rows.tolist() == [-0.1] * 3
        assert frames == 1 or np.count_nonzero(np.concatenate(values)) == 3


def unpacked(raw: Raw, values: list[Array]) -> Header:
    """Receive a frame, checked, and keep its payload."""
    got: list[bytes] = []
    exactly = raw.exactly
    raw.exactly = lambda n: got.append(exactly(n)) or got[-1]  # type: ignore[method-assign,func-returns-value]
    try:
        header = raw.receive()
    finally:
        raw.exactly = exactly  # type: ignore[method-assign]
    if header.length:
        values.append(np.frombuffer(got[1], np.float64 if header.length % 8 == 0 else np.uint8))
    return header


def test_a_number_that_two_processes_have() -> None:
    with served({0: 2}) as run:
        first, second = run.client(3), run.client(3)
        with pytest.raises(ServerLost, match="another process has connected as worker 3"):
            first.join()
        second.join()
        first.close()
        second.close()


@pytest.mark.parametrize("wrong", [{"secret": bytes(32)}, {"run": "another run"}])
def test_a_client_of_another_run_is_told_what_may_be_wrong(wrong: dict[str, Any]) -> None:
    with served({0: 2}) as run:
        with pytest.raises(ConfigError, match=r"server 0 at 127.0.0.1:\d+: it has closed 5 connections before its WEL"):
            run.client(0, **wrong)
        until(lambda: len(run.log) >= 5)  # the client may see the last end before the server has written its line
        assert not run.of("join") and len(run.log) == 5
        assert all("not proved" in line for line in run.log)


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with pytest.raises(ServerLost, match="not reached for 0.3 s"):
        ServerClient([address], shared_out({0: 2}, 1), bytes(32), "run", 0, patience=0.3)


def test_connections_that_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end after a time, at most so many are there at once, and they do not keep a worker out."""
    monkeypatch.setattr(server_module, "HELLO_TIMEOUT", 2.0)
    monkeypatch.setattr(server_module, "MAX_UNPROVED", 8)
    with served({0: 2}) as run:
        began = time.monotonic()
        idle = [Raw(run.addresses[0]) for _ in range(20)]
        until(lambda: sum("more than 8 connections" in line for line in run.log) == 12)
        client = run.client(0)
        assert time.monotonic() - began < 5
        idle[-1].greet()
        for raw in idle:
            assert raw.ended() == b""
        until(lambda: sum("no proof within 2 s" in line for line in run.log) >= 7)
        client.join()
        client.close()


def test_calls_that_a_client_refuses() -> None:
    with served({0: 4, 2: 6}, servers=2, tickets=Tickets(3)) as run:
        client = run.client(0)
        with pytest.raises(ConfigError, match="this worker has not joined"):
            client.commit(None, [0, 0])
        client.ticket()
        for call, said in (
            (lambda: client.commit(1, [0, 0]), "commit: ticket: 1 is not legal; legal: 0, which this worker has"),
            (lambda: client.commit(0, [0]), r"commit: versions: \[0\] is not legal; legal: 2 versions"),
            (lambda: client.commit(0, [0, 0], float("nan")), "commit: weight: nan is not legal"),
            (lambda: client.ticket(), "ticket 0 has not been committed"),
            (lambda: client.push(0, np.ones(5)), "gradients of bucket 0: bytes: 40 is not legal; legal: 32"),
            (lambda: client.push(1, np.ones(4)), "gradients of bucket 1"),
            (lambda: client.pull({0: np.ones(4)}), "parameters of bucket 2: bytes: 0 is not legal; legal: 48"),
            (lambda: client.commit(0, [0, 0]), "0 of 2 elements of bucket 0 have been pushed to server 0"),
            (
                lambda: client.push_parts(0, [Part(0, 0, 1, 0, memoryview(bytes(8)))]),
                "a PART of bucket 0 has 1 element",
            ),
        ):
            with pytest.raises(ConfigError, match=said):
                call()
        client.push(0, np.ones(4))
        with pytest.raises(ConfigError, match="bucket 0 from element 0 on"):
            client.push(0, np.ones(4))
        client.close()
    for shares, said in (
        ([{0: Share(0, 2, 8, 8)}, {0: Share(3, 4, 8, 8)}], "elements 3 to 4 follow 2"),
        ([{0: Share(1, 2, 8, 8)}, {1: Share(0, 1, 8, 8)}], "elements 1 to 2 follow 0"),
        ([{0: Share(0, 2, 8, 8)}, {0: Share(2, 4, 4, 8)}], "of the same elements"),
        ([{0: Share(0, 2, 8, 8)}], "2 addresses for 1 shares"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServerClient([("127.0.0.1", 1)] * 2, shares, bytes(32), "run", 0)
