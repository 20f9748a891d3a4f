"""One end of a connection between a worker and a parameter server: frames in and out of a socket that never blocks.

Payloads are not copied: what arrives is received into the memory that its owner names, and what is sent is sent from
where it lies.  A frame's MAC is made when its first byte is about to be sent, and checked when its last one has come.
"""

from __future__ import annotations

import hmac
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from shardwise.core.frames import HEADER, MAC, Header, unpack
from shardwise.runtime.secret import Seal

READ = 4 << 20
"""The most bytes that are read at once before others have their turn."""
EMPTY = memoryview(b"")

Payload = Callable[[], memoryview]
"""This returns the bytes of a payload; it is asked whenever some are sent, so that they may move meanwhile."""
Outgoing = tuple[Header, Payload]


def bare(header: Header) -> Outgoing:
    """Return a frame without a payload."""
    return header, lambda: EMPTY


def holding(header: Header, payload: bytes | memoryview) -> Outgoing:
    """Return a frame with a payload that stays where it is."""
    view = memoryview(payload)
    return header, lambda: view


class Wire:
    """This is an end of a connection; it is used by one thread.

    ``place`` gets each header that arrives, raises :class:`~shardwise.core.frames.FrameError` unless that is legal
    now, and returns memory of ``header.length`` bytes for the payload.  ``sending`` and ``receiving`` are the seals of
    both directions; frames have no MAC until they are set.
    """

    def __init__(self, sock: socket.socket, place: Callable[[Header], memoryview]) -> None:
        self.socket = sock
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sending: Seal | None = None
        self.receiving: Seal | None = None
        self._place = place
        self._fixed = memoryview(bytearray(HEADER + MAC))
        self._header: Header | None = None
        self._payload, self._wanted = EMPTY, self._fixed[:HEADER]
        self._mac: hmac.HMAC | None = None  # of what has come of the frame's header and payload
        self._in_trailer = False
        self._queue: deque[Iterator[Outgoing]] = deque()
        self._current: tuple[bytes, Payload, int, bytes] | None = None  # what is before, in, and behind the payload
        self._sent = 0  # bytes of the current frame

    def post(self, *frames: Outgoing) -> None:
        """Queue frames."""
        self._queue.append(iter(frames))

    def stream(self, frames: Iterator[Outgoing]) -> None:
        """Queue frames that are made one by one, each when the one before has been sent."""
        self._queue.append(frames)

    @property
    def queued(self) -> int:
        """Return how much is queued, in posts and streams."""
        return len(self._queue) + (self._current is not None)

    def write(self) -> int:
        """Send what the socket takes now, and return its bytes.  Raises OSError where the connection has ended."""
        total = 0
        while self._current is not None or self._start_next():
            assert self._current is not None
            head, payload, length, tail = self._current
            parts = _behind((memoryview(head), payload() if length else EMPTY, memoryview(tail)), self._sent)
            try:
                sent = self.socket.sendmsg(parts)
            except BlockingIOError:
                return total
            total, self._sent = total + sent, self._sent + sent
            if self._sent == len(head) + length + len(tail):
                self._current = None
            if total >= READ:
                return total
        return total

    def _start_next(self) -> bool:
        while self._queue:
            frame = next(self._queue[0], None)
            if frame is None:
                self._queue.popleft()
                continue
            header, payload = frame
            head, tail = header.pack(), b""
            if self.sending is not None:
                mac = self.sending.begin()
                mac.update(head)
                mac.update(payload())
                tail = mac.digest()
            self._current, self._sent = (head, payload, header.length, tail), 0
            return True
        return False

    def read(self) -> Iterator[tuple[Header, memoryview]]:
        """Yield the frames that are complete by now, but of no more than :data:`READ` bytes.

        Raises FrameError for one that is not legal, and OSError (ConnectionResetError at its regular end too) where the
        connection has ended.
        """
        left = READ
        while left > 0:
            try:
                got = self.socket.recv_into(self._wanted)
            except BlockingIOError:
                return
            if got == 0:
                raise ConnectionResetError("the other end has closed the connection")
            left -= got
            if self._header is not None and self._mac is not None and not self._in_trailer:
                self._mac.update(self._wanted[:got])
            self._wanted = self._wanted[got:]
            if not self._wanted:
                frame = self._advance()
                if frame is not None:
                    yield frame

    def _advance(self) -> tuple[Header, memoryview] | None:
        """Go on from a header to its payload, from there to the MAC, and from there to the next header."""
        if self._header is None:
            head = self._fixed[:HEADER]
            self._header = unpack(head)
            self._payload = self._place(self._header)
            assert len(self._payload) == self._header.length
            self._mac = None if self.receiving is None else self.receiving.begin()
            if self._mac is not None:
                self._mac.update(head)
            if self._header.length:
                self._wanted = self._payload
                return None
        if not self._in_trailer and self._mac is not None:
            self._in_trailer, self._wanted = True, self._fixed[HEADER:]
            return None
        if self._mac is not None:
            Seal.check(self._mac, self._fixed[HEADER:])
        frame = self._header, self._payload
        self._header, self._payload, self._wanted, self._in_trailer = None, EMPTY, self._fixed[:HEADER], False
        return frame

    def close(self) -> None:
        """Close the socket, and forget what is queued."""
        self._queue.clear()
        self._current = None
        self.socket.close()


def _behind(parts: Iterable[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of parts of which the first ``sent`` bytes have been sent."""
    found = []
    for part in parts:
        skipped = min(sent, len(part))
        sent -= skipped
        if skipped < len(part):
            found.append(part[skipped:])
    return found
