"""A parameter server: it applies the pushes of workers, and sends them parameters, over sockets (Li et al., "Scaling
Distributed Machine Learning with the Parameter Server", OSDI 2014).

One thread serves all connections and never waits for one of them.  What it decides is in ``core/ledger.py``; what goes
over the wire, and who may talk, in docs/asynchronous.md.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from shardwise.core.clocks import Released
from shardwise.core.errors import check_value
from shardwise.core.frames import (
    MAX_WORKERS,
    NONCE,
    RUN,
    WORKER,
    FrameError,
    Header,
    Kind,
    Outcome,
    Shares,
    check_shares,
    weight_of,
)
from shardwise.core.ledger import Commit, Ledger
from shardwise.core.tickets import Answers
from shardwise.runtime.secret import Keys, check_secret, run_digest
from shardwise.runtime.staging import Pool, Push, Reading, Staging, Store
from shardwise.runtime.wire import Outgoing, Wire, bare, holding

HELLO_TIMEOUT = 5.0
"""The seconds that a connection has to prove that it knows the secret."""
MAX_UNPROVED = 64
"""The most connections that have not proved it yet; one more closes the oldest of them."""
MAX_QUEUED = 64
"""While this many answers wait for a connection to take them, nothing more is read from it."""
TICK = 0.25
"""The seconds between looks at who has been silent for too long."""

Result = TypeVar("Result")

_HANDSHAKE = (frozenset({Kind.HELLO}), frozenset({Kind.PROOF}))
_OF_WORKERS = frozenset({
    Kind.JOIN, Kind.LEAVE, Kind.TICKET, Kind.PART, Kind.COMMIT, Kind.DISCARD, Kind.PULL, Kind.PING,
})  # fmt: skip


class _Peer:
    """This is a connection: of a worker once it has proved that it knows the secret."""

    def __init__(self, sock: socket.socket, address: str, pool: Pool, now: float) -> None:
        self.address, self.since, self.heard, self.took = address, now, now, now
        self.wire = Wire(sock, self._place)
        self.shares, self.staging = pool.shares, Staging(pool)
        self.proved = False
        self.worker = -1
        self.keys: Keys | None = None
        self.asked = False  # whether a PULL has not been answered in full
        self.has = -1  # the version that it has of tables
        self.reading: Reading | None = None
        self.events = selectors.EVENT_READ
        self._hello = memoryview(bytearray(NONCE + RUN))

    def __str__(self) -> str:
        return f"worker {self.worker} at {self.address}" if self.proved else f"{self.address}, not proved"

    def _place(self, header: Header) -> memoryview:
        allowed = _OF_WORKERS if self.proved else _HANDSHAKE[self.keys is not None]
        header.check(allowed, self.shares)
        return self.staging.place(header) if header.kind == Kind.PART else self._hello[: header.length]

    def reads(self) -> bool:
        """Whether more is read from it now."""
        return self.wire.queued < MAX_QUEUED


class Server:
    """This serves the ``shares`` that a ``store`` has, to the workers of ``run`` that know its ``secret``.

    ``ledger`` decides, and is used by the server's thread alone.  ``timeout`` is in seconds: a worker leaves if no byte
    has come from it for so long (a living one sends PINGs, :mod:`~shardwise.runtime.server_client`) or if it has taken
    none of what waits for it.  ``log`` gets one line for each connection that ends.
    """

    def __init__(
        self,
        store: Store,
        shares: Shares,
        ledger: Ledger,
        secret: bytes,
        run: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout: float = 30.0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Listen at ``host``; port 0 takes a free one, which :attr:`address` tells.

        Raises :class:`ConfigError` for shares that are not legal, for a store whose memory has other sizes, and for a
        secret of another length; OSError where the address cannot be had.
        """
        check_shares(f"server {ledger.server}", shares)
        check_secret(f"server {ledger.server}: secret", secret)
        check_value("timeout", timeout, timeout > 0, "more than 0 seconds")
        for bucket, share in shares.items():
            found, needed = store.parameters(bucket).nbytes, share.numel * share.parameter
            check_value(f"server {ledger.server}: bytes of bucket {bucket}", found, found == needed, f"{needed}")
        self.store, self.shares, self.ledger = store, shares, ledger
        self._secret, self._run, self._timeout, self._log = secret, run_digest(run), timeout, log
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._pool = Pool(shares)
        self._peers: dict[socket.socket, _Peer] = {}
        self._workers: dict[int, _Peer] = {}
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[Any]]] = SimpleQueue()
        self._closing = self._closed = False
        self._now = time.monotonic()
        self._handlers: Mapping[Kind, Callable[[_Peer, Header, memoryview], None]] = {
            Kind.HELLO: self._hello, Kind.PROOF: self._proof, Kind.JOIN: self._join, Kind.LEAVE: self._leave,
            Kind.TICKET: self._ticket, Kind.PART: self._part, Kind.COMMIT: self._commit, Kind.DISCARD: self._discard,
            Kind.PULL: self._pull, Kind.PING: self._ping,
        }  # fmt: skip

    # ---- from any thread ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let :meth:`run` return, which closes all connections; workers try to come back for a while."""
        self._closing = True
        self._wake()

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Let the server's thread call a function between two pushes, as to save the store and ``ledger.snapshot()``.

        The future has its result, or its exception; it is cancelled if the server ends before.
        """
        future: Future[Result] = Future()

        def called() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put((called, future))
        if self._closed:
            future.cancel()
        self._wake()
        return future

    def _wake(self) -> None:
        with suppress(OSError):  # it has been woken, or has closed
            self._waker.send(b"\0")

    # ---- the thread --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`close`; an exception of the store or of the record ends this too."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        looked = self._now
        try:
            while not self._closing:
                ready = self._selector.select(TICK)
                self._now = time.monotonic()
                for key, events in ready:
                    self._turn(key.fileobj, events)  # type: ignore[arg-type]
                # What had come before now has been read, so a long turn makes nobody seem silent; and the time that an
                # update takes is not that of a connection that would prove itself.
                busy = time.monotonic() - self._now
                for peer in self._peers.values() if busy > TICK else ():
                    peer.since += busy
                if self._now - looked >= TICK:
                    looked = self._now
                    self._drop_silent()
                for peer in list(self._peers.values()):
                    self._register(peer)
        finally:
            self._end()

    def _turn(self, sock: socket.socket, events: int) -> None:
        if sock is self._listener:
            self._accept()
        elif sock is self._woken:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            while not self._calls.empty():
                self._calls.get()[0]()
        elif sock in self._peers:
            peer = self._peers[sock]
            if events & selectors.EVENT_WRITE:
                self._write(peer)
            if events & selectors.EVENT_READ and sock in self._peers:
                self._read(peer)

    def _write(self, peer: _Peer) -> None:
        try:
            if peer.wire.write():
                peer.took = self._now
        except OSError as error:
            self._drop(peer, str(error))

    def _read(self, peer: _Peer) -> None:
        """Do what a connection asks; an OSError of the store or of the record is not the connection's."""
        frames = peer.wire.read()
        while peer.wire.socket in self._peers and peer.reads():
            try:
                frame = next(frames, None)
            except (FrameError, OSError) as error:
                self._drop(peer, str(error))
                return
            peer.heard = self._now  # also by a part of a frame
            if frame is None:
                return
            header, payload = frame
            try:
                self._handlers[header.kind](peer, header, payload)
            except FrameError as error:
                self._drop(peer, str(error))

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:  # it has gone again, or there are no more files
            self._log(f"a connection could not be accepted: {error}")
            return
        unproved = [peer for peer in self._peers.values() if not peer.proved]
        if len(unproved) >= MAX_UNPROVED:
            self._drop(min(unproved, key=lambda peer: peer.since), f"more than {MAX_UNPROVED} connections at once")
        peer = _Peer(sock, "{}:{}".format(*address[:2]), self._pool, self._now)
        self._peers[sock] = peer
        self._selector.register(sock, peer.events)

    def _register(self, peer: _Peer) -> None:
        """Tell the selector what a connection waits for."""
        events = (selectors.EVENT_READ if peer.reads() else 0) | (selectors.EVENT_WRITE if peer.wire.queued else 0)
        if events & selectors.EVENT_WRITE and not peer.events & selectors.EVENT_WRITE:
            peer.took = self._now
        if events != peer.events:
            peer.events = events
            self._selector.modify(peer.wire.socket, events)

    def _drop_silent(self) -> None:
        for peer in list(self._peers.values()):
            if not peer.proved and self._now - peer.since > HELLO_TIMEOUT:
                self._drop(peer, f"no proof within {HELLO_TIMEOUT:g} s")
            elif peer.events & selectors.EVENT_WRITE and self._now - peer.took > self._timeout:
                self._drop(peer, f"it has read nothing for {self._timeout:g} s")
            elif peer.events & selectors.EVENT_READ and self._now - peer.heard > self._timeout:
                self._drop(peer, f"no sign of life for {self._timeout:g} s")

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Close a connection; a worker leaves, and what it had not committed is forgotten."""
        del self._peers[peer.wire.socket]
        self._selector.unregister(peer.wire.socket)
        peer.wire.close()
        peer.staging.clear()
        peer.reading, peer.asked = None, False
        self._log(f"{peer}: {reason}")
        if self._workers.get(peer.worker) is peer:
            del self._workers[peer.worker]
            self._answer(*self.ledger.leave(peer.worker, reason))

    def _end(self) -> None:
        self._closed = True
        while not self._calls.empty():
            self._calls.get()[1].cancel()
        for peer in self._peers.values():
            peer.wire.close()
        self._peers.clear()
        self._workers.clear()
        self._selector.close()
        for sock in (self._listener, self._woken, self._waker):
            sock.close()

    # ---- what a connection sends; ValueErrors of the ledger are its frame's fault ------------------------------------

    def _hello(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        worker, nonce = header["worker"], bytes(payload[:NONCE])
        if header["role"] != WORKER or not 0 <= worker < MAX_WORKERS:
            raise FrameError(f"a HELLO of role {header['role']}, number {worker}")
        if not hmac.compare_digest(payload[NONCE:], self._run):
            raise FrameError("a HELLO of another run")
        own = secrets.token_bytes(NONCE)
        peer.worker, peer.keys = worker, Keys.of(self._secret, self._run, worker, nonce, own)
        peer.wire.post(holding(Header.of(Kind.CHALLENGE, NONCE), own))
        peer.wire.receiving = peer.keys.of_worker  # a frame that is not sealed by the secret gets no further

    def _proof(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        assert peer.keys is not None
        peer.wire.sending, peer.proved = peer.keys.of_server, True
        before = self._workers.get(peer.worker)
        if before is not None:
            before.wire.post(bare(Header.of(Kind.REPLACED)))
            with suppress(OSError):
                before.wire.write()
            self._drop(before, f"{peer.address} has its number now")
        self._workers[peer.worker] = peer
        self.ledger.seen(peer.worker, header["seen"], header["start"], header["ticket"])
        peer.wire.post(bare(Header.of(Kind.WELCOME, version=self.ledger.version, start=self.ledger.start)))

    def _join(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        if header["clock"] < 0:
            raise FrameError(f"a JOIN at clock {header['clock']}")
        clock, released = self.ledger.join(peer.worker, header["clock"])
        peer.wire.post(bare(Header.of(Kind.JOINED, clock=clock, version=self.ledger.version)))
        self._answer(released)

    def _leave(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        released, answers = self.ledger.leave(peer.worker, "it says so")
        self._answer((*released, peer.worker) if peer.asked and peer.reading is None else released, answers)

    def _ticket(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        try:
            answers = self.ledger.ticket(peer.worker, bool(header["waits"]))
        except ValueError as error:
            raise FrameError(str(error)) from None
        self._answer((), answers)

    def _part(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        peer.staging.add(header, payload)

    def _commit(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        weight = weight_of(header["weight"])
        commit = Commit(peer.worker, header["clock"], header["ticket"], header["read"], weight)
        parts = peer.staging.whole()
        try:
            outcome = self.ledger.judge(commit)
        except ValueError as error:
            raise FrameError(str(error)) from None
        released: Released = ()
        answers: Answers = {}
        if outcome == Outcome.APPLIED:
            for other in self._peers.values():
                if other.reading is not None:
                    other.reading.keep()
            self.store.apply(Push(commit, parts))
            released, answers = self.ledger.applied(commit)
        peer.staging.clear()
        version = self.ledger.version_after(commit) if outcome == Outcome.DUPLICATE else self.ledger.version
        peer.wire.post(bare(Header.of(Kind.ACK, clock=commit.clock, version=version, outcome=outcome)))
        self._answer(released, answers)

    def _discard(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        peer.staging.clear()

    def _pull(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        clock = self.ledger.clocks.live.get(peer.worker)
        if peer.asked or (clock is not None and header["clock"] != clock):
            raise FrameError(f"a PULL at clock {header['clock']} (here {clock}), or before the last one was answered")
        peer.asked = True
        peer.has = header["since"] if header["start"] == self.ledger.start else -1
        self._answer(self.ledger.read(peer.worker))

    def _ping(self, peer: _Peer, header: Header, payload: memoryview) -> None:
        peer.wire.post(bare(Header.of(Kind.PONG)))

    # ---- what follows for others -------------------------------------------------------------------------------------

    def _answer(self, released: Released = (), answers: Mapping[int, int] | None = None) -> None:
        """Send parameters to those who may read now, and tickets to those who get one."""
        for worker, ticket in (answers or {}).items():
            self._workers[worker].wire.post(bare(Header.of(Kind.NUMBER, ticket=ticket)))
        for worker in released:
            peer = self._workers[worker]
            self.ledger.pulled(worker)
            peer.reading = next(
                (p.reading for p in self._peers.values() if p.reading and p.reading.version == self.ledger.version),
                None,
            ) or Reading(self.store, self.shares, self.ledger.version)
            peer.wire.stream(self._sent(peer, peer.reading, peer.reading.frames(peer.has)))

    @staticmethod
    def _sent(peer: _Peer, reading: Reading, frames: Iterator[Outgoing]) -> Iterator[Outgoing]:
        yield from frames
        peer.reading, peer.asked = None, False  # before the worker can know that these were all
        yield bare(Header.of(Kind.PULLED, version=reading.version))
