"""Parameter servers in threads, with numpy in place of torch, and a client that says whatever a test wants."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from shardwise.core.clocks import Clocks
from shardwise.core.frames import HEADER, MAC, MAX_PAYLOAD, NONCE, ROWS, WORKER, Header, Kind, Share, Shares, unpack
from shardwise.core.ledger import Ledger
from shardwise.core.tickets import Tickets
from shardwise.runtime.secret import Keys, run_digest
from shardwise.runtime.server import Server
from shardwise.runtime.server_client import ServerClient
from shardwise.runtime.staging import Part, Push

SECRET = bytes(range(32))
RUN = "a run"
LR = 0.1
Array = np.ndarray[Any, np.dtype[np.float64]]


class Numbers:
    """A store of float64 that SGD updates: p ← p − 0.1 · weight · g."""

    def __init__(self, parameters: Mapping[int, Array], slow: float = 0.0) -> None:
        self.arrays, self.slow, self.applied = dict(parameters), slow, 0

    def apply(self, push: Push) -> None:
        time.sleep(self.slow)
        for part in push.parts:
            at = self.arrays[part.bucket][part.offset : part.offset + part.count]
            if part.encoding == ROWS:  # one row of three
                number = int(np.frombuffer(part.payload, np.int32, 1)[0])
                at[3 * number : 3 * number + 3] -= LR * np.frombuffer(bytes(part.payload[4:]))
                continue
            at -= LR * push.commit.weight * np.frombuffer(part.payload)
        self.applied += 1

    def parameters(self, bucket: int) -> memoryview:
        return memoryview(self.arrays[bucket]).cast("B")

    def changed(self, bucket: int, since: int) -> Iterator[Part]:
        """Of a table with rows of three that are all in the first part: the rows that are not zero."""
        count = MAX_PAYLOAD // 24 * 3
        rows = self.arrays[bucket][:count].reshape(-1, 3)
        numbers = rows.any(1).nonzero()[0]
        payload = numbers.astype(np.int32).tobytes() + rows[numbers].tobytes()
        yield Part(bucket, 0, count, ROWS, memoryview(payload))


def shared_out(numels: Mapping[int, int], servers: int, row: int = 0) -> list[Shares]:
    """Equal ranges of each bucket, in float64."""
    return [
        {b: Share(n * k // servers, n * (k + 1) // servers, 8, 8, row) for b, n in numels.items()}
        for k in range(servers)
    ]


class Crash(OSError):
    """This ends a server as its death would; it is an OSError, as connections have too."""


class Served:
    """Servers that run: their stores, records as events, logs, and what a client needs."""

    def __init__(
        self,
        shares: Sequence[Shares],
        stores: Sequence[Numbers],
        bound: int | None = None,
        tickets: Tickets | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.shares, self.stores, self.bound, self.tickets, self.timeout = shares, stores, bound, tickets, timeout
        self.events: list[list[dict[str, Any]]] = [[] for _ in shares]
        self.log: list[str] = []
        self.servers: list[Server] = []
        self.threads: list[threading.Thread] = []
        for k in range(len(shares)):
            self.servers.append(self.made(k))
            self.threads.append(self.started(k))

    def made(self, k: int, port: int = 0, snapshot: Mapping[str, Any] | None = None) -> Server:
        ledger = Ledger(
            Clocks(self.bound), self.tickets if k == 0 else None,
            lambda line: self.record(k, json.loads(line)),
            server=k, start=1 + secrets.randbits(60), snapshot=snapshot,
        )  # fmt: skip
        return Server(
            self.stores[k], self.shares[k], ledger, SECRET, RUN, port=port, timeout=self.timeout, log=self.log.append
        )

    def started(self, k: int) -> threading.Thread:
        def run() -> None:
            with suppress(Crash):
                self.servers[k].run()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def record(self, k: int, event: dict[str, Any]) -> None:
        self.events[k].append(event)

    def stop(self, k: int) -> None:
        self.servers[k].close()
        self.threads[k].join(10)
        assert not self.threads[k].is_alive()

    def restart(self, k: int, store: Numbers, snapshot: Mapping[str, Any]) -> None:
        """Stop a server, and start it again where it was, from a snapshot."""
        port = self.servers[k].address[1]
        self.stop(k)
        self.stores = [store if i == k else old for i, old in enumerate(self.stores)]
        self.servers[k] = self.made(k, port, snapshot)
        self.threads[k] = self.started(k)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [server.address for server in self.servers]

    def client(self, worker: int, **more: Any) -> ServerClient:
        given = {"addresses": self.addresses, "secret": SECRET, "run": RUN, "patience": 20.0, **more}
        return ServerClient(given.pop("addresses"), self.shares, given.pop("secret"), given.pop("run"), worker, **given)

    def of(self, kind: str, k: int = 0) -> list[dict[str, Any]]:
        return [event for event in self.events[k] if event["event"] == kind]


@contextmanager
def served(
    numels: Mapping[int, int], servers: int = 1, slow: float = 0.0, row: int = 0, **more: Any
) -> Iterator[Served]:
    """Servers of zeros; none outlives this, and none has ended by itself."""
    shares = shared_out(numels, servers, row)
    stores = [Numbers({b: np.zeros(share.numel) for b, share in held.items()}, slow) for held in shares]
    found = Served(shares, stores, **more)
    try:
        yield found
        assert all(thread.is_alive() for thread in found.threads)
    finally:
        for k in range(servers):
            found.stop(k)


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.005)


class Raw:
    """A connection of a worker that may send anything at any time; it has no thread, and waits where it reads."""

    def __init__(
        self, address: tuple[str, int], worker: int = 9, secret: bytes = SECRET, timeout: float = 20.0
    ) -> None:
        self.socket = socket.create_connection(address, timeout=timeout)
        self.worker, self.secret = worker, secret
        self.nonce = secrets.token_bytes(NONCE)
        self.keys: Keys | None = None

    def hello(self) -> bytes:
        header = Header.of(Kind.HELLO, 64, role=WORKER, worker=self.worker)
        return header.pack() + self.nonce + run_digest(RUN)

    def greet(self) -> None:
        """Say HELLO, and take the CHALLENGE."""
        self.socket.sendall(self.hello())
        found = self.exactly(HEADER + NONCE)
        self.keys = Keys.of(self.secret, run_digest(RUN), self.worker, self.nonce, found[HEADER:])

    def enter(self) -> Header:
        """Prove, and take the WELCOME."""
        self.greet()
        self.send(Header.of(Kind.PROOF, seen=0, start=0, ticket=-1))
        return self.receive()

    def sealed(self, header: Header, payload: bytes = b"") -> bytes:
        """The bytes of a frame, with its MAC."""
        assert self.keys is not None
        head = header.pack()
        mac = self.keys.of_worker.begin()
        mac.update(head + payload)
        return head + payload + mac.digest()

    def send(self, header: Header, payload: bytes = b"") -> None:
        self.socket.sendall(self.sealed(header, payload))

    def part(self, bucket: int, values: Array) -> None:
        """Send a small range whole."""
        self.send(Header(Kind.PART, (), values.nbytes, bucket, 0, len(values)), values.tobytes())

    def row(self, bucket: int, number: int, values: Array) -> None:
        """Send one row of three of a large table."""
        payload = np.array([number], np.int32).tobytes() + values.tobytes()
        self.send(Header(Kind.PART, (), len(payload), bucket, 0, MAX_PAYLOAD // 24 * 3, ROWS), payload)

    def commit(self, clock: int, ticket: int = -1) -> Header:
        self.send(Header.of(Kind.COMMIT, clock=clock, ticket=ticket, read=0, weight=0x3FF0000000000000))
        return self.receive()

    def join(self, clock: int = 0) -> int:
        self.send(Header.of(Kind.JOIN, clock=clock))
        return self.receive()["clock"]

    def receive(self) -> Header:
        head = self.exactly(HEADER)
        header = unpack(head)
        payload, mac = self.exactly(header.length), self.exactly(MAC)
        assert self.keys is not None
        found = self.keys.of_server.begin()
        found.update(head + payload)
        assert found.digest() == mac
        return header

    def exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            some = self.socket.recv(size - len(found))
            if not some:
                raise EOFError(found)
            found += some
        return found

    def ended(self) -> bytes:
        """What comes until the server has closed the connection."""
        found = b""
        with suppress(ConnectionResetError):
            while some := self.socket.recv(65536):
                found += some
        self.socket.close()
        return found


class Proxy:
    """This stands between a worker and a server, and can cut the wires without either of them having died."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address, self.open = address, threading.Event()
        self.open.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                self.open.wait()
                far = socket.create_connection(self.address)
                self.pairs.append((near, far))
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self.forward, args=(one, other), daemon=True).start()

    @staticmethod
    def forward(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while some := one.recv(65536):
                other.sendall(some)
        for sock in (one, other):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cut all wires; new ones do not get through until :attr:`open` is set again."""
        self.open.clear()
        for pair in self.pairs:
            for sock in pair:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self.pairs.clear()

    def close(self) -> None:
        self.listener.close()
        self.cut()
        self.open.set()
