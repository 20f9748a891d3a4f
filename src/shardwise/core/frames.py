"""What workers and parameter servers send each other: frames of a fixed header of integers and a bounded payload.

A header is 64 bytes, little-endian, without padding:

    magic 4s · protocol version u8 · kind u8 · encoding u16 · bucket u32 · length u32 · offset u64 · count u64 · 4 × i64

The last four are the numbers of its kind (:data:`NUMBERS`), and zero where a kind has fewer.  ``length`` is the bytes
of the payload, and ``offset`` and ``count`` are elements of the range that the server has of ``bucket``.  Everything in
a header is checked before memory is reserved for its payload: :func:`unpack` checks what any frame must be, and
:meth:`Header.check` what a frame may be in the place where it comes.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from shardwise.core.errors import ConfigError, ShardwiseError, check_count

MAGIC = b"SWPS"
PROTOCOL = 2
"""The version of all that is in this module, and of what both ends do with it."""
MAX_PAYLOAD = 1 << 20
"""The most bytes of a payload.  Larger ranges take several frames."""
NONCE = 32
"""The bytes of the random number that each end adds to a connection's keys."""
RUN = 32
"""The bytes of what names a run in a HELLO: the SHA-256 of its name."""
MAC = 32
"""The bytes behind each frame after the HELLO: HMAC-SHA256."""
MAX_BUCKETS = 1 << 20
MAX_WORKERS = 1 << 20
RAW = 0
"""The encoding of elements as they are, little-endian.  Other numbers belong to whoever encodes."""
ROWS = 4
"""The encoding of some rows of a table: their numbers as int32, counted from where the part begins, ascending; then
their elements.  Parameters may come so as well, and parts of a table without such rows are left out."""

_HEADER = struct.Struct("<4sBBHIIQQ4q")
HEADER = _HEADER.size


class FrameError(ShardwiseError):
    """A frame is not what may come in its place; the connection that brought it is closed."""

    cause = "frame"


class Kind(IntEnum):
    """The kinds of frames; ``→`` go from a worker to a server, ``←`` come back."""

    HELLO = 1  # → a worker's nonce and the run, before anything is proved
    CHALLENGE = 2  # ← the server's nonce
    PROOF = 3  # → the first frame with a MAC; the last version seen, of which start of the server; the ticket, or −1
    WELCOME = 4  # ← the server's first frame with a MAC
    JOIN = 5  # → be one of the live workers, at this clock or later
    JOINED = 6  # ← from this clock on
    LEAVE = 7  # → hold nobody back any more
    TICKET = 8  # → ask for a ticket; waits = 1: until one is free or none will be
    NUMBER = 9  # ← a ticket, or NONE or LATER of core/tickets.py
    PART = 10  # → a part of the gradient of a bucket
    COMMIT = 11  # → apply all parts since the last COMMIT or DISCARD
    DISCARD = 12  # → forget them
    ACK = 13  # ← what has become of the push: an Outcome
    PULL = 14  # → send all parameters, but of tables the rows that changed since a version of this start of the server
    PARAMETERS = 15  # ← a part of the parameters of a bucket
    PULLED = 16  # ← these were all
    PING = 17  # → a sign of life
    PONG = 18  # ← another one
    REPLACED = 19  # ← another connection has this worker's number now


class Outcome(IntEnum):
    """What has become of a push."""

    APPLIED = 0
    DUPLICATE = 1  # it had been applied before
    REFUSED = 2  # another worker has its ticket, or has done it


NUMBERS: Mapping[Kind, tuple[str, ...]] = MappingProxyType({
    Kind.HELLO: ("role", "worker"),
    Kind.PROOF: ("seen", "start", "ticket"),
    Kind.WELCOME: ("version", "start"),
    Kind.JOIN: ("clock",),
    Kind.JOINED: ("clock", "version"),
    Kind.TICKET: ("waits",),
    Kind.NUMBER: ("ticket",),
    Kind.COMMIT: ("clock", "ticket", "read", "weight"),
    Kind.ACK: ("clock", "version", "outcome"),
    Kind.PULL: ("clock", "since", "start"),
    Kind.PARAMETERS: ("version",),
    Kind.PULLED: ("version",),
})  # fmt: skip
"""The names of the numbers in the header of each kind; kinds that are not here have none."""
_LENGTHS = MappingProxyType({Kind.HELLO: NONCE + RUN, Kind.CHALLENGE: NONCE})
_OF_BUCKETS = (Kind.PART, Kind.PARAMETERS)
WORKER = 1
"""The role of a worker in its HELLO; no other is defined."""


@dataclass(frozen=True, slots=True)
class Share:
    """A server has the elements ``start`` … ``stop`` − 1 of a flat bucket.

    ``gradient`` and ``parameter`` are the bytes of an element of a gradient and of a parameter.  If the bucket is a
    table whose rows travel by themselves, ``row`` is the number of elements of a row, and the range has whole rows.
    """

    start: int
    stop: int
    gradient: int
    parameter: int
    row: int = 0

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def cuts(self, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield (offset, count) of the frames that carry the range in elements of ``itemsize`` bytes, each as large as
        is legal but the last."""
        most = self.most(itemsize)
        for offset in range(0, self.numel, most):
            yield offset, min(most, self.numel - offset)

    def may_follow(self, offset: int, done: int) -> bool:
        """Return whether a part from ``offset`` on may be the next after ``done`` elements: of a table, parts without
        rows are left out."""
        return offset == done or (self.row > 0 and offset > done)

    def most(self, itemsize: int) -> int:
        """Return the most elements of a frame: whole rows of a table."""
        row = self.row or 1
        return MAX_PAYLOAD // (itemsize * row) * row


Shares = Mapping[int, Share]
"""What a server has, by the number of the bucket."""


def check_shares(where: str, shares: Shares) -> None:
    """Raise :class:`ConfigError`, which names ``where``, for shares that no server can have.

    It is raised too on a machine whose numbers are not little-endian, as those on the wire are.
    """
    if sys.byteorder != "little":
        raise ConfigError.on(where, f"this machine is {sys.byteorder}-endian", "a little-endian one")
    check_count(f"{where}: number of buckets", len(shares))
    for bucket, share in shares.items():
        at = f"{where}, bucket {bucket}"
        if not 0 <= bucket < MAX_BUCKETS:
            raise ConfigError.on(at, "its number is not legal", f"0 to {MAX_BUCKETS - 1}")
        if not 0 <= share.start < share.stop:
            raise ConfigError.on(at, f"elements {share.start} to {share.stop}", "a range that is not empty")
        for size in (share.gradient, share.parameter):
            if size not in (1, 2, 4, 8):
                raise ConfigError.on(at, f"elements of {size} bytes", "1, 2, 4 or 8 bytes")
            if share.row * size > MAX_PAYLOAD:
                wrong = f"a table with rows of {share.row * size} bytes"
                raise ConfigError.on(at, wrong, f'at most {MAX_PAYLOAD}, or sparse_gradients = "dense"')
        if share.row and (share.start % share.row or share.stop % share.row):
            raise ConfigError.on(at, f"elements {share.start} to {share.stop} of rows of {share.row}", "whole rows")


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's header; ``numbers`` are those that :data:`NUMBERS` names, and the rest as the module says."""

    kind: Kind
    numbers: tuple[int, ...] = ()
    length: int = 0
    bucket: int = 0
    offset: int = 0
    count: int = 0
    encoding: int = RAW

    @staticmethod
    def of(kind: Kind, length: int = 0, **numbers: int) -> Header:
        """Return the header of a frame that belongs to no bucket, with its numbers by name."""
        return Header(kind, tuple(numbers[name] for name in NUMBERS.get(kind, ())), length)

    def __getitem__(self, name: str) -> int:
        """Return the number of this name; KeyError where the kind has none."""
        names = NUMBERS.get(self.kind, ())
        if name not in names:
            raise KeyError(f"{self.kind.name} has no {name}")
        return self.numbers[names.index(name)]

    def pack(self) -> bytes:
        """Return the :data:`HEADER` bytes of this header.  Raises struct.error for numbers that do not fit."""
        padded = (*self.numbers, 0, 0, 0, 0)[:4]
        place = (self.encoding, self.bucket, self.length, self.offset, self.count)
        return _HEADER.pack(MAGIC, PROTOCOL, self.kind, *place, *padded)

    def check(self, allowed: Collection[Kind], shares: Shares) -> None:
        """Raise :class:`FrameError` unless a frame of this header may come where only ``allowed`` kinds may, to or from
        a server that has ``shares``.

        A range is sent as :meth:`Share.cuts` cuts it, so that nobody can make a server keep many small parts.  A raw
        part has exactly the bytes of its elements, and an encoded one at most so many.
        """
        if self.kind not in allowed:
            expected = ", ".join(sorted(kind.name for kind in allowed))
            raise FrameError(f"a {self.kind.name} came where only {expected} may come")
        if self.kind not in _OF_BUCKETS:
            return
        share = shares.get(self.bucket)
        if share is None:
            raise FrameError(f"a {self.kind.name} of bucket {self.bucket}, which is not here")
        itemsize = share.gradient if self.kind == Kind.PART else share.parameter
        most = share.most(itemsize)
        if self.offset % most or not 0 < self.count == min(most, share.numel - self.offset):
            raise FrameError(
                f"a {self.kind.name} of bucket {self.bucket} has {self.count} elements from {self.offset} on; "
                f"{share.numel} are sent {most} at a time"
            )
        size = self.count * itemsize
        encoded = self.encoding != RAW and (self.kind == Kind.PART or (self.encoding == ROWS and share.row))
        if self.length > size or (self.length < size and not encoded):
            raise FrameError(
                f"a {self.kind.name} of bucket {self.bucket} has {self.length} bytes for {self.count} elements of "
                f"{itemsize} bytes"
            )


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """Return the header in :data:`HEADER` bytes.

    Raises :class:`FrameError` where the magic, the version or the kind is not known, the payload is longer than
    :data:`MAX_PAYLOAD` or not of the length that its kind has, or a field is not zero that the kind does not have.
    """
    magic, version, kind, encoding, bucket, length, offset, count, *numbers = _HEADER.unpack(data)
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {magic!r} in place of {MAGIC!r}")
    if version != PROTOCOL:
        raise FrameError(f"a frame of protocol version {version}; this is version {PROTOCOL}")
    try:
        known = Kind(kind)
    except ValueError:
        raise FrameError(f"a frame of unknown kind {kind}") from None
    if known in _OF_BUCKETS:
        if length > MAX_PAYLOAD:
            raise FrameError(f"a payload of {length} bytes; at most {MAX_PAYLOAD} are legal")
    elif length != _LENGTHS.get(known, 0) or bucket or offset or count or encoding:
        raise FrameError(f"a {known.name} with a payload or a place that it does not have")
    named = len(NUMBERS.get(known, ()))
    if any(numbers[named:]):
        raise FrameError(f"a {known.name} has more numbers than {named}")
    return Header(known, tuple(numbers[:named]), length, bucket, offset, count, encoding)


def bits_of(weight: float) -> int:
    """Return the 64 bits of a number as an integer, as which a header carries it."""
    return int(struct.unpack("<q", struct.pack("<d", weight))[0])


def weight_of(bits: int) -> float:
    """Return the number of which these are the bits."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
