"""A live server gets everything that is not a frame; a worker that works meanwhile gets right numbers."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import psutil
import pytest
from serving import LR, Raw, Served, served

from shardwise.core.frames import HEADER, MAC, MAX_PAYLOAD, NONCE, NUMBERS, Header, Kind
from shardwise.core.tickets import Tickets

SIZE = 2 * MAX_PAYLOAD // 8 + 100
GROWN = 100 << 20
"""By so many bytes the process may grow: the ranges of 2.1 MB that some connections hold, and what Python keeps."""


class Attacks:
    """Each is one byte string or frame on a connection of its own, and returns whether it has to be closed."""

    def __init__(self, run: Served, seed: int) -> None:
        self.random, self.address, self.counts = random.Random(seed), run.addresses[0], Counter[str]()
        genuine = Raw(self.address, worker=50)
        genuine.enter()
        # What a worker once sent: its HELLO, its PROOF and a PING, as they went over the wire.
        self.recorded = genuine.hello(), genuine.sealed(Header.of(Kind.PING))
        genuine.socket.close()
        self.all: list[Callable[[], None]] = [
            self.noise, self.changed_hello, self.truncated_hello, self.wrong_secret, self.replayed_session,
            self.no_proof, self.noise_inside, self.changed_inside, self.truncated_inside, self.wrong_mac, self.twice,
            self.long_payload, self.any_frame,
        ]  # fmt: skip

    def one(self) -> None:
        attack = self.random.choice(self.all)
        self.counts[attack.__name__] += 1
        attack()

    # ---- without the secret: not one byte may come but a CHALLENGE ---------------------------------------------------

    def outside(self, data: bytes, challenged: bool = False) -> None:
        raw = Raw(self.address)
        with suppress(OSError):
            raw.socket.sendall(data)
            if len(data) < HEADER + 2 * NONCE:
                raw.socket.shutdown(socket.SHUT_WR)
        came = raw.ended()
        assert len(came) in ((0, HEADER + NONCE) if challenged else (0,)), came

    def noise(self) -> None:
        self.outside(self.random.randbytes(self.random.choice([1, 63, 64, 200, 5000])))

    def changed_hello(self) -> None:
        data = bytearray(self.recorded[0])
        for _ in range(self.random.randint(1, 4)):
            data[self.random.randrange(HEADER)] = self.random.randrange(256)
        self.outside(bytes(data) + bytes(HEADER + MAC), challenged=True)

    def truncated_hello(self) -> None:
        self.outside(self.recorded[0][: self.random.randrange(1, HEADER + 2 * NONCE)])

    def replayed_session(self) -> None:
        self.outside(b"".join(self.recorded), challenged=True)

    def no_proof(self) -> None:
        self.outside(self.recorded[0] + Header.of(Kind.JOIN, clock=0).pack() + bytes(MAC), challenged=True)

    def wrong_secret(self) -> None:
        raw = Raw(self.address, secret=self.random.randbytes(32))
        raw.greet()
        raw.send(Header.of(Kind.PROOF, seen=0, start=0, ticket=-1))
        assert raw.ended() == b""

    # ---- with the secret: a worker that has gone wrong ---------------------------------------------------------------

    @contextmanager
    def inside(self) -> Iterator[Raw]:
        raw = Raw(self.address, worker=self.random.randrange(10, 40))
        raw.enter()
        with suppress(OSError, EOFError):  # the server may have closed it at any point
            yield raw
        raw.socket.close()

    def closed(self, raw: Raw, data: bytes) -> None:
        with suppress(ConnectionError):
            raw.socket.sendall(data)
        raw.ended()

    def frame(self) -> tuple[Header, bytes]:
        part = Header(Kind.PART, (), 8 * 100, 0, SIZE - 100, 100)
        first = Header(Kind.PART, (), MAX_PAYLOAD, 0, 0, MAX_PAYLOAD // 8)
        kinds = Kind.PING, Kind.PULL, Kind.COMMIT, Kind.JOIN, Kind.LEAVE, Kind.TICKET, Kind.DISCARD
        others = [Header.of(kind, **dict.fromkeys(NUMBERS.get(kind, ()), 0)) for kind in kinds]
        chosen = self.random.choice([part, first, *others])
        return chosen, b"\0" * (chosen.length if chosen.length < 1000 else 0)

    def noise_inside(self) -> None:
        with self.inside() as raw:
            self.closed(raw, self.random.randbytes(self.random.choice([64, 200, 5000])))

    def changed_inside(self) -> None:
        """A changed header whose MAC is right: legal or not, the server goes on."""
        with self.inside() as raw:
            header, payload = self.frame()
            data = bytearray(header.pack())
            for _ in range(self.random.randint(1, 3)):
                data[self.random.randrange(HEADER)] = self.random.randrange(256)
            assert raw.keys is not None
            mac = raw.keys.of_worker.begin()
            mac.update(bytes(data) + payload)
            raw.socket.sendall(bytes(data) + payload + mac.digest())
            raw.socket.shutdown(socket.SHUT_WR)
            raw.ended()

    def truncated_inside(self) -> None:
        with self.inside() as raw:
            data = raw.sealed(*self.frame())
            raw.socket.sendall(data[: self.random.randrange(1, len(data))])

    def wrong_mac(self) -> None:
        with self.inside() as raw:
            data = bytearray(raw.sealed(Header.of(Kind.PING)))
            data[HEADER + self.random.randrange(MAC)] ^= 1 << self.random.randrange(8)
            self.closed(raw, bytes(data))

    def twice(self) -> None:
        with self.inside() as raw:
            self.closed(raw, 2 * raw.sealed(Header.of(Kind.PING)))

    def long_payload(self) -> None:
        with self.inside() as raw:
            length, offset, count = self.random.choice([
                (2**32 - 1, 0, MAX_PAYLOAD // 8), (8 * 101, SIZE - 100, 100), (8 * 99, SIZE - 100, 100),
                (16, 2**64 - 1, 2), (8, 0, 1), (0, 0, 0),
            ])  # fmt: skip
            header = Header(Kind.PART, (), length, self.random.randrange(2), offset, count)
            self.closed(raw, raw.sealed(header))

    def any_frame(self) -> None:
        """A frame that a server sends, or one at a wrong time."""
        with self.inside() as raw:
            kind = self.random.choice(
                [k for k in Kind if k not in (Kind.JOIN, Kind.LEAVE, Kind.TICKET, Kind.PING, Kind.PULL)]
            )
            header = Header(kind, tuple(self.random.getrandbits(62) for _ in NUMBERS.get(kind, ())))
            raw.send(header)
            raw.socket.shutdown(socket.SHUT_WR)
            raw.ended()


def works(run: Served, stop: threading.Event, done: list[int], errors: list[BaseException]) -> None:
    """One update after the other, each compared with what it has to be."""
    try:
        client, into = run.client(0), {0: np.empty(SIZE)}
        client.join()
        expected = np.zeros(SIZE)
        while not stop.is_set():
            versions = client.pull(into).wait(30)
            np.testing.assert_array_equal(into[0], expected)
            gradient = np.cos(into[0] + len(done) + np.arange(SIZE))
            client.push(0, gradient)
            client.commit(None, versions).wait(30)
            expected -= LR * 1.0 * gradient
            done.append(versions[0])
            stop.wait(0.02)
        assert done == list(range(len(done)))
        client.close()
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize("attacks", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_but_frames_of_workers_gets_in(attacks: int) -> None:
    with served({0: SIZE}, tickets=Tickets(3)) as run:
        stop, done, errors = threading.Event(), list[int](), list[BaseException]()
        worker = threading.Thread(target=works, args=(run, stop, done, errors), daemon=True)
        worker.start()
        fuzz, memory = Attacks(run, seed=attacks), psutil.Process()
        for _ in range(50):
            fuzz.one()
        before = memory.memory_info().rss
        for _ in range(attacks):
            fuzz.one()
        grown = memory.memory_info().rss - before
        stop.set()
        worker.join(30)
        assert not errors, errors
        assert not worker.is_alive() and len(done) > 5
        assert len(fuzz.counts) == len(fuzz.all)
        assert {event["worker"] for event in run.of("push")} == {0} and len(run.of("push")) == len(done)
        assert grown < GROWN
        assert all("\n" not in line for line in run.log) and len(run.log) >= attacks
