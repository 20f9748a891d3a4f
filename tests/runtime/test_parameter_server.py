"""Servers and workers over sockets: what is computed is what a replay of the record computes, whoever dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from serving import LR, Array, Crash, Numbers, Proxy, Raw, Served, served, until

from shardwise.core.errors import ConfigError
from shardwise.core.frames import MAX_PAYLOAD, FrameError, Header, Kind, Outcome
from shardwise.core.tickets import Tickets
from shardwise.runtime.server_connection import ServerLost
from shardwise.runtime.staging import Part, Push


def together(work: Callable[[int], None], workers: int) -> None:
    """Run workers in threads; what one raises is raised here."""
    errors: list[BaseException] = []

    def run(worker: int) -> None:
        try:
            work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


def gradient(ticket: int, whole: Array) -> Array:
    """One that depends on all parameters, so on the versions at which all servers were read."""
    return (0.1 + 0.01 * ticket) * whole - 0.3 * whole[::-1] + np.sin(ticket + np.arange(len(whole)))


def replayed(run: Served, numels: dict[int, int]) -> list[dict[int, Array]]:
    """The parameters of each server at the end, from the records alone."""
    pushes = [run.of("push", k) for k in range(len(run.servers))]
    read = {(p["ticket"], k): p["read"] for k, made in enumerate(pushes) for p in made}
    states = [[{b: np.zeros(s.numel) for b, s in held.items()}] for held in run.shares]
    moved = True
    while moved:
        moved = False
        for k, made in enumerate(pushes):
            while len(states[k]) <= len(made):
                push = made[len(states[k]) - 1]
                needed = [read[push["ticket"], i] for i in range(len(pushes))]
                if any(version >= len(states[i]) for i, version in enumerate(needed)):
                    break
                new = {}
                for b in numels:
                    whole = np.concatenate([states[i][version][b] for i, version in enumerate(needed)])
                    share = run.shares[k][b]
                    part = gradient(push["ticket"], whole)[share.start : share.stop]
                    new[b] = states[k][-1][b] - LR * push["weight"] * part
                states[k].append(new)
                moved = True
    assert all(len(state) == len(made) + 1 for state, made in zip(states, pushes, strict=True))
    return [state[-1] for state in states]


@pytest.mark.parametrize(("servers", "workers", "bound"), [(1, 3, None), (2, 4, 1), (3, 3, 0)])
def test_concurrent_workers_are_a_replay_of_the_record(servers: int, workers: int, bound: int | None) -> None:
    numels = {0: MAX_PAYLOAD // 8 * servers + 1000, 4: 7}  # two frames a range, and less than one
    with served(numels, servers, bound=bound, tickets=Tickets(12)) as run:

        def work(worker: int) -> None:
            client = run.client(worker)
            parameters = {b: np.empty(n) for b, n in numels.items()}
            while (ticket := client.ticket()) is not None:
                versions = client.pull(parameters).wait()
                for b in numels:
                    client.push(b, gradient(ticket, parameters[b]))
                acks = client.commit(ticket, versions, 1 / (1 + worker)).wait()
                assert [ack.outcome for ack in acks] == [Outcome.APPLIED] * servers
            client.close()

        together(work, workers)
        for k, parameters in enumerate(replayed(run, numels)):
            assert [p["version"] for p in run.of("push", k)] == list(range(1, 13))
            for b in numels:
                np.testing.assert_array_equal(run.stores[k].arrays[b], parameters[b])
        assert sorted(p["ticket"] for p in run.of("push")) == list(range(12))
        within_the_bound(run, bound)


def within_the_bound(run: Served, bound: int | None) -> None:
    """Every answered pull of a live worker, against clocks counted from the record."""
    for events in run.events:
        clocks: dict[int, int] = {}
        for event in events:
            match event["event"]:
                case "join":
                    clocks[event["worker"]] = event["clock"]
                case "leave":
                    clocks.pop(event["worker"], None)  # it may have had a ticket alone
                case "push":
                    clocks[event["worker"]] = event["clock"] + 1
                case "pull" if event["clock"] is not None:
                    assert event["clock"] == clocks[event["worker"]]
                    assert bound is None or event["clock"] <= min(clocks.values()) + bound


def test_a_dead_worker_holds_nobody_back() -> None:
    with served({0: 4}, bound=0) as run:
        dead, lives = Raw(run.addresses[0], worker=1), run.client(0)
        dead.enter()
        assert dead.join() == 0
        lives.join()
        into = {0: np.empty(4)}
        lives.pull(into).wait(10)
        lives.push(0, np.ones(4))
        lives.commit(None, [0]).wait(10)
        waits = lives.pull(into)
        with pytest.raises(TimeoutError):
            waits.wait(0.3)
        dead.part(0, np.ones(4))  # a push that it does not live to commit
        dead.socket.close()
        assert waits.wait(10) == (1,)
        np.testing.assert_array_equal(into[0], np.full(4, -LR))
        assert [e["worker"] for e in run.of("leave")] == [1]
        lives.close()


def test_a_push_that_comes_again_is_applied_once() -> None:
    with served({0: 4}) as run:
        raw = Raw(run.addresses[0])
        raw.enter()
        raw.join()
        for outcome in (Outcome.APPLIED, Outcome.DUPLICATE):
            raw.part(0, np.ones(4))
            answer = raw.commit(0)
            assert (answer["outcome"], answer["version"]) == (outcome, 1)
        raw.socket.close()
        again = Raw(run.addresses[0])
        again.enter()
        assert again.join(0) == 1, "after the push that was applied"
        again.part(0, np.ones(4))
        assert again.commit(0)["outcome"] == Outcome.DUPLICATE
        np.testing.assert_array_equal(run.stores[0].arrays[0], np.full(4, -LR))
        assert [e["event"] for e in run.events[0] if "version" in e] == ["start", "push", "duplicate", "duplicate"]


def crash_at_a_push(k: int, event: dict[str, Any]) -> None:
    if k == 1 and event["event"] == "push":
        raise Crash


@pytest.mark.parametrize("dies", ["before its COMMIT", "before its ACK", "after its ACK"])
def test_a_push_in_flight_as_its_server_restarts(dies: str) -> None:
    """Both pushes are applied to what the snapshot has, or said to be lost, and none twice."""
    with served({0: 8}, servers=2) as run:
        client = run.client(0)
        client.join()
        client.push(0, np.ones(8))
        client.commit(None, [0, 0]).wait(10)
        store = run.stores[1]
        snapshot, saved = (
            run.servers[1].call(lambda: (run.servers[1].ledger.snapshot(), store.arrays[0].copy())).result(9)
        )
        client.push(0, np.full(8, 10.0))
        if dies == "before its ACK":
            run.record = crash_at_a_push  # type: ignore[method-assign]
        committed = None if dies == "before its COMMIT" else client.commit(None, [1, 1])
        if committed and dies == "after its ACK":
            committed.wait(10)
        if dies == "before its ACK":
            run.threads[1].join(10)
            assert store.applied == 2
            run.record = Served.record.__get__(run)  # type: ignore[method-assign]
        run.restart(1, Numbers({0: saved}), snapshot)
        committed = committed or client.commit(None, [1, 1])
        acks = committed.wait(10)
        until(lambda: len(run.of("join", 1)) == 2)
        lost = dies == "after its ACK"
        assert [ack.outcome for ack in acks] == [Outcome.APPLIED] * 2
        client.push(0, np.full(8, 100.0))
        assert [a.version for a in client.commit(None, [2, 2]).wait(10)] == [3, 2 if lost else 3]
        assert run.servers[1].ledger.lost == (1 if lost else 0)
        assert [e["updates"] for e in run.of("lost", 1)] == ([1] if lost else [])
        for k, sum_ in ((0, 111.0), (1, 101.0 if lost else 111.0)):
            np.testing.assert_allclose(run.stores[k].arrays[0], np.full(4, -LR * sum_), rtol=1e-14)
        client.close()


def test_a_ticket_that_another_worker_has_by_now() -> None:
    """A worker is cut off, its ticket goes to another one, and it comes back and commits: no server applies that."""
    with served({0: 8}, servers=2, tickets=Tickets(2)) as run:
        proxy = Proxy(run.addresses[0])
        first = run.client(0, addresses=[proxy.listener.getsockname(), run.addresses[1]])
        assert first.ticket() == 0
        first.push(0, np.ones(8))
        proxy.cut()
        until(lambda: run.of("leave"))
        second = run.client(1)
        assert second.ticket() == 0
        proxy.open.set()
        assert [a.outcome for a in first.commit(0, [0, 0]).wait(10)] == [Outcome.REFUSED] * 2
        second.push(0, np.full(8, 2.0))
        assert [a.outcome for a in second.commit(0, [0, 0]).wait(10)] == [Outcome.APPLIED] * 2
        assert first.ticket() == 1
        first.push(0, np.full(8, 4.0))  # the servers have forgotten what they refused
        assert [(a.outcome, a.version) for a in first.commit(1, [0, 0]).wait(10)] == [(Outcome.APPLIED, 2)] * 2
        for store in run.stores:
            np.testing.assert_allclose(store.arrays[0], np.full(4, -LR * 6), rtol=1e-14)
        assert [(e["worker"], e["ticket"]) for e in run.of("refused")] == [(0, 0)]
        for client in (first, second):
            client.close()
        proxy.close()


def test_a_worker_that_is_cut_off_keeps_its_ticket_and_its_push() -> None:
    """The wires are cut again and again; each push is applied once all the same."""
    numel = 4 * MAX_PAYLOAD // 8
    with served({0: numel}, bound=0, tickets=Tickets(12)) as run:
        proxy = Proxy(run.addresses[0])
        client, into, stop = run.client(0, addresses=[proxy.listener.getsockname()]), np.empty(numel), threading.Event()

        def cut() -> None:
            while not stop.wait(0.15):
                proxy.cut()
                proxy.open.set()

        cutting = threading.Thread(target=cut, daemon=True)
        cutting.start()
        expected = 0.0
        while (ticket := client.ticket()) is not None:
            versions = client.pull({0: into}).wait(30)
            assert set(into) == {expected}
            client.push(0, np.full(numel, 1.0 + ticket))
            client.commit(ticket, versions).wait(30)
            expected -= LR * 1.0 * (1.0 + ticket)
            if len(run.of("join")) > 4:
                stop.set()
        assert len(run.of("join")) > 2, "nothing has been cut"
        assert [e["version"] for e in run.of("push")] == list(range(1, 13))
        stop.set()
        cutting.join()
        client.close()
        proxy.close()


def test_the_last_tickets_wait_for_those_who_have_them() -> None:
    """One that waits for a ticket holds nobody back meanwhile, and gets what a dead worker leaves."""
    with served({0: 2}, bound=0, tickets=Tickets(2)) as run:
        slow, fast = run.client(0), run.client(1)
        assert (slow.ticket(), fast.ticket()) == (0, 1)
        fast.push(0, np.ones(2))
        fast.commit(1, [0]).wait(10)
        found: list[int | None] = []
        waiting = threading.Thread(target=lambda: found.append(fast.ticket()), daemon=True)
        waiting.start()
        slow.push(0, np.ones(2))
        until(lambda: run.of("leave"))
        assert slow.pull({0: np.empty(2)}).wait(10) == (1,)
        assert not found
        slow.close()
        waiting.join(10)
        assert found == [0]
        assert run.of("join")[-1] == {"event": "join", "worker": 1, "clock": 1}
        fast.push(0, np.ones(2))
        fast.commit(0, [1]).wait(10)
        assert fast.ticket() is None
        fast.close()


def test_what_a_store_says_of_a_push() -> None:
    """One that it cannot decode ends the connection; another exception ends the server."""
    with served({0: 4}) as run:
        store, seen = run.stores[0], []

        def apply(push: Push) -> None:
            seen.extend((p.encoding, p.offset, p.count, bytes(p.payload)) for p in push.parts)
            raise FrameError("no such encoding")

        store.apply = apply  # type: ignore[method-assign]
        raw = Raw(run.addresses[0])
        raw.enter()
        raw.join()
        raw.send(Header(Kind.PART, (), 3, 0, 0, 4, 5), b"abc")
        with pytest.raises((EOFError, OSError)):
            raw.commit(0)
        assert seen == [(5, 0, 4, b"abc")]
        until(lambda: run.of("leave"))
        assert not run.of("push") and "no such encoding" in run.of("leave")[0]["reason"]
        client = run.client(0)
        client.join()
        store.apply = Numbers.apply.__get__(store)  # type: ignore[method-assign]
        client.push(0, np.ones(4))
        client.commit(None, [0]).wait(10)
        client.close()


def test_encoded_parts() -> None:
    """They come as they were sent, beside raw ones, and the memory of one push does not show in the next."""
    most = MAX_PAYLOAD // 8
    with served({0: 2 * most + 4, 1: 6}, servers=2) as run:
        seen: list[list[tuple[int, int, int, int, bytes]]] = [[], []]

        def keep(k: int) -> Callable[[Push], None]:
            return lambda push: seen[k].extend(
                (p.bucket, p.offset, p.count, p.encoding, bytes(p.payload)) for p in push.parts
            )

        for k, store in enumerate(run.stores):
            store.apply = keep(k)  # type: ignore[method-assign]
        client = run.client(0)
        client.join()
        raw = np.arange(2.0 * most + 4)
        client.push(0, raw)
        client.push(1, np.zeros(6))
        client.commit(None, [0, 0]).wait(20)
        half = raw[: most + 2].tobytes()
        assert seen[0] == [(0, 0, most + 2, 0, half), (1, 0, 3, 0, bytes(24))]
        for found in seen:
            found.clear()
        first, second = Part(0, 0, most, 3, memoryview(b"x")), Part(0, most, 2, 4, memoryview(b""))
        client.push_parts(0, [first])
        client.push_parts(0, [second])
        client.push_parts(1, [first, Part(0, most, 2, 0, memoryview(bytes(16)))])
        client.push(1, np.ones(6))
        client.commit(None, [1, 1]).wait(20)
        ones = (1, 0, 3, 0, np.ones(3).tobytes())
        assert seen[0] == [(0, 0, most, 3, b"x"), (0, most, 2, 4, b""), ones]
        assert seen[1] == [(0, 0, most, 3, b"x"), (0, most, 2, 0, bytes(16)), ones]
        with pytest.raises(ConfigError, match="push to server 0: a PART of bucket 0 has 1048577 bytes"):
            client.push_parts(0, [Part(0, 0, most, 3, memoryview(bytes(MAX_PAYLOAD + 1)))])
        client.close()


def test_an_error_of_the_store_ends_the_server() -> None:
    with served({0: 4}) as run:

        def apply(push: Push) -> None:
            raise Crash

        run.stores[0].apply = apply  # type: ignore[method-assign]
        client = run.client(0, patience=0.5)
        client.join()
        client.push(0, np.ones(4))
        with pytest.raises(ServerLost, match="not reached"):
            client.commit(None, [0]).wait(10)
        run.threads[0].join(10)
        assert not run.threads[0].is_alive() and not run.of("push")
        assert run.servers[0].call(lambda: 0).cancelled()
        client.close()
        run.restart(0, run.stores[0], {**run.servers[0].ledger.snapshot()})
