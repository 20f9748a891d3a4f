"""A worker's end of one connection to a parameter server, from its HELLO until it breaks."""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.frames import NONCE, ROWS, WORKER, FrameError, Header, Kind, Shares
from shardwise.runtime.compression import put_rows
from shardwise.runtime.secret import Keys
from shardwise.runtime.wire import Outgoing, Wire, bare, holding

_ANSWERS = frozenset({
    Kind.JOINED, Kind.NUMBER, Kind.ACK, Kind.PARAMETERS, Kind.PULLED, Kind.PONG, Kind.REPLACED,
})  # fmt: skip


class ServerLost(ShardwiseError):
    """A server could not be reached for too long, or does not serve this worker any more."""

    cause = "server"


class Refused(ConnectionError):
    """A server has closed a connection before its WELCOME."""


@dataclass(frozen=True)
class Endpoint:
    """This says where a server is, what it has, and who talks to it; times are in seconds.

    ``run`` is the digest of the run's name.  A PING is sent at least every ``heartbeat``, and a server that is silent
    for ``timeout`` is taken for lost.  What a server is asked fails if it has not been reached for ``patience``.
    """

    number: int
    address: tuple[str, int]
    shares: Shares
    secret: bytes
    run: bytes
    worker: int
    heartbeat: float = 2.0
    timeout: float = 30.0
    patience: float = 60.0

    def __str__(self) -> str:
        return "server {} at {}:{}".format(self.number, *self.address)


class Wakeup:
    """Any thread wakes the one that waits at a connection."""

    def __init__(self) -> None:
        self.woken, self._waker = socket.socketpair()
        self.woken.setblocking(False)
        self._waker.setblocking(False)

    def wake(self) -> None:
        with suppress(OSError):  # it has been woken, or has closed
            self._waker.send(b"\0")

    def wait(self, seconds: float, sock: socket.socket | None = None, writes: bool = False) -> int:
        """Wait until woken, or until ``sock`` can be read (or written to): return the events of ``select.poll`` of it.

        A wake-up is used up by this."""
        poll = select.poll()
        poll.register(self.woken, select.POLLIN)
        if sock is not None:
            poll.register(sock, select.POLLIN | (select.POLLOUT if writes else 0))
        found = dict(poll.poll(1e3 * seconds))
        if self.woken.fileno() in found:
            with suppress(BlockingIOError):
                self.woken.recv(4096)
        return found.get(sock.fileno(), 0) if sock is not None else 0

    def close(self) -> None:
        self.woken.close()
        self._waker.close()


class Connection:
    """This is a connection that the server has proved to be its end of; ``welcome`` is its first answer.

    Everything but :meth:`close` raises OSError where the connection breaks and FrameError where the server sends what
    it may not; the connection is then of no use any more.
    """

    def __init__(self, end: Endpoint, wakeup: Wakeup, *, seen: int, start: int, ticket: int) -> None:
        """Connect and prove; ``seen``, ``start`` and ``ticket`` are what a PROOF tells (``core/frames.py``).

        Raises OSError where there is no server, and :class:`Refused` where it does not take the proof.
        """
        self._end, self._wakeup = end, wakeup
        self._allowed = frozenset({Kind.CHALLENGE})
        self._nonce = memoryview(bytearray(NONCE))
        self._inbox: deque[Header] = deque()
        self._into: Mapping[int, memoryview] | None = None
        self._left = 0  # bytes that the pull under way still misses
        self._versions: set[int] = set()  # of those that have come
        self._heard = self._told = time.monotonic()
        self._wire = Wire(socket.create_connection(end.address, timeout=min(5.0, end.timeout)), self._place)
        try:
            self.welcome = self._greet(Header.of(Kind.PROOF, seen=seen, start=start, ticket=ticket))
        except ConnectionError as error:
            self.close()
            raise Refused(str(error)) from None
        except BaseException:
            self.close()
            raise

    def _greet(self, proof: Header) -> Header:
        end, nonce = self._end, secrets.token_bytes(NONCE)
        hello = Header.of(Kind.HELLO, len(nonce + end.run), role=WORKER, worker=end.worker)
        self.send(holding(hello, nonce + end.run))
        self._answer(Kind.CHALLENGE)
        keys = Keys.of(end.secret, end.run, end.worker, nonce, bytes(self._nonce))
        self._wire.sending, self._wire.receiving = keys.of_worker, keys.of_server
        self._allowed = frozenset({Kind.WELCOME})
        welcome = self.ask(proof, Kind.WELCOME)
        self._allowed = _ANSWERS
        return welcome

    def send(self, *frames: Outgoing) -> None:
        """Send frames; return when the system has all of them."""
        self._wire.post(*frames)
        while self._wire.queued:
            self.pump()

    def ask(self, header: Header, kind: Kind) -> Header:
        """Send a frame, and return the answer, which has to be of this kind."""
        self.send(bare(header))
        return self._answer(kind)

    def pull(self, clock: int, into: Mapping[int, memoryview], since: int = -1, start: int = 0) -> int:
        """Receive all parameters into memory of the server's ranges, as bytes; return their version.

        The memory has version ``since``, of a ``start`` of the server, of tables; −1: none."""
        whole = [memory for bucket, memory in into.items() if not self._end.shares[bucket].row]
        self._into, self._left, self._versions = into, sum(map(len, whole)), set()
        version = self.ask(Header.of(Kind.PULL, clock=clock, since=since, start=start), Kind.PULLED)["version"]
        if self._left or not self._versions <= {version}:
            found = sorted(self._versions)
            raise FrameError(f"a PULLED of version {version} after versions {found}, {self._left} bytes too early")
        self._into = None
        return version

    def pump(self) -> None:
        """Send and receive what is possible now, or wait for that, for a wake-up, or for the next sign of life."""
        wire = self._wire
        found = self._wakeup.wait(self._end.heartbeat / 2, wire.socket, wire.queued > 0)
        now = time.monotonic()
        if found & select.POLLOUT and wire.write():
            self._told = now
        if found & ~select.POLLOUT:
            for header, payload in wire.read():
                self._arrived(header, payload)
            self._heard = now
        if now - self._heard > self._end.timeout:
            raise TimeoutError(f"no sign of life for {self._end.timeout:g} s")
        if now - self._told > self._end.heartbeat and self._allowed is _ANSWERS and not wire.queued:
            wire.post(bare(Header.of(Kind.PING)))

    def close(self) -> None:
        self._wire.close()

    def _answer(self, kind: Kind) -> Header:
        while not self._inbox:
            self.pump()
        found = self._inbox.popleft()
        if found.kind != kind:
            raise FrameError(f"a {found.kind.name} came in place of a {kind.name}")
        return found

    def _arrived(self, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.REPLACED:
            raise ServerLost(f"{self._end}: another process has connected as worker {self._end.worker}")
        if header.kind == Kind.PARAMETERS:
            share = self._end.shares[header.bucket]
            self._left -= 0 if share.row else header.length
            self._versions.add(header["version"])
            if header.encoding == ROWS:
                assert self._into is not None
                size = share.parameter
                place = self._into[header.bucket][header.offset * size : (header.offset + header.count) * size]
                put_rows(place, payload, share.row * size)
        elif header.kind != Kind.PONG:
            self._inbox.append(header)

    def _place(self, header: Header) -> memoryview:
        header.check(self._allowed, self._end.shares)
        if header.kind != Kind.PARAMETERS:
            return self._nonce[: header.length]
        if self._into is None:
            raise FrameError("PARAMETERS came that nobody had asked for")
        if header.encoding == ROWS:
            return memoryview(bytearray(header.length))
        first = header.offset * self._end.shares[header.bucket].parameter
        return self._into[header.bucket][first : first + header.length]


def refused(end: Endpoint, times: int) -> ConfigError:
    """Return the error after a server has refused so many proofs in a row."""
    wrong = f"it has closed {times} connections before its WELCOME"
    return ConfigError.on(str(end), wrong, "the secret, the run and the version of shardwise that the server has")
