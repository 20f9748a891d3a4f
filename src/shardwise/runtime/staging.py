"""What a parameter server keeps of a push until its COMMIT, and of parameters until they have been sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.core.frames import RAW, FrameError, Header, Kind, Shares
from shardwise.core.ledger import Commit
from shardwise.runtime.wire import Outgoing, holding


@dataclass(frozen=True, slots=True)
class Part:
    """These are ``count`` elements of a gradient, from element ``offset`` of the server's range of ``bucket`` on.

    Under encoding :data:`~shardwise.core.frames.RAW` the payload is the elements, little-endian; what else it may be is
    up to whoever encodes and decodes it.
    """

    bucket: int
    offset: int
    count: int
    encoding: int
    payload: memoryview

    def header(self) -> Header:
        """Return the header of the frame that carries this part."""
        return Header(
            Kind.PART, (), len(self.payload), self.bucket, self.offset, self.count, self.encoding
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Push:
    """This is the whole push of a worker: its parts tile the server's ranges of all buckets, in order in each bucket.

    Raw parts that follow each other are one part.  Of a table, parts without rows are left out.
    """

    commit: Commit
    parts: tuple[Part, ...]


class Store(Protocol):
    """A store has the parameters of a server; all its methods are called by the server's thread."""

    def apply(self, push: Push) -> None:
        """Update the parameters by a push; its payloads are used again when this returns.

        Raises FrameError, before it changes anything, where it cannot decode a payload: the worker's connection is then
        closed.  Any other exception ends the server.
        """

    def parameters(self, bucket: int) -> memoryview:
        """Return the memory of the server's range of a bucket as contiguous bytes; it is only read.

        Every call returns the same memory.
        """

    def changed(self, bucket: int, since: int) -> Iterator[Part]:
        """Yield copies of the rows of a table that have changed since a version, part by part, without empty ones."""


class Pool:
    """The memory of whole ranges that pushes have used is used again: new memory costs more than a copy into it."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._free: dict[int, list[memoryview]] = {bucket: [] for bucket in shares}

    def take(self, bucket: int) -> memoryview:
        """Return memory for the gradient of a bucket's range."""
        free, share = self._free[bucket], self.shares[bucket]
        return free.pop() if free else memoryview(bytearray(share.numel * share.gradient))

    def give(self, bucket: int, memory: memoryview) -> None:
        """Take memory back."""
        self._free[bucket].append(memory)


class Staging:
    """These are the parts of a worker's unfinished push; it holds at most the bytes of the server's ranges."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._memory: dict[int, memoryview] = {}
        self._parts: dict[int, list[Part]] = {}
        self._next: dict[int, int] = {}  # how many elements of each bucket have come

    def place(self, header: Header) -> memoryview:
        """Return memory for the payload of a PART; raise FrameError unless it is the next one of its bucket.

        An encoded payload lies where its elements would begin, since it is never longer than they are.
        """
        expected, share = self._next.get(header.bucket, 0), self._pool.shares[header.bucket]
        if not share.may_follow(header.offset, expected):
            raise FrameError(f"a PART of bucket {header.bucket} from {header.offset} on, in place of {expected}")
        if share.row:  # few rows come, so there is no memory for all
            return memoryview(bytearray(header.length))
        if header.bucket not in self._memory:
            self._memory[header.bucket] = self._pool.take(header.bucket)
        return self._span(header.bucket, header.offset, header.count)[: header.length]

    def add(self, header: Header, payload: memoryview) -> None:
        """Add a PART that has come whole."""
        part = Part(header.bucket, header.offset, header.count, header.encoding, payload)
        parts = self._parts.setdefault(header.bucket, [])
        table = self._pool.shares[header.bucket].row > 0
        if parts and part.encoding == RAW == parts[-1].encoding and not table:
            before = parts.pop()
            count = before.count + part.count
            part = Part(part.bucket, before.offset, count, RAW, self._span(part.bucket, before.offset, count))
        parts.append(part)
        self._next[header.bucket] = header.offset + header.count

    def whole(self) -> tuple[Part, ...]:
        """Return all parts; raise FrameError unless they are all elements of all buckets."""
        for bucket, share in self._pool.shares.items():
            if not share.row and self._next.get(bucket, 0) != share.numel:
                raise FrameError(
                    f"a COMMIT after {self._next.get(bucket, 0)} of {share.numel} elements of bucket {bucket}"
                )
        return tuple(part for bucket in sorted(self._parts) for part in self._parts[bucket])

    def clear(self) -> None:
        """Forget all parts."""
        for bucket, memory in self._memory.items():
            self._pool.give(bucket, memory)
        self._memory, self._parts, self._next = {}, {}, {}

    def _span(self, bucket: int, offset: int, count: int) -> memoryview:
        size = self._pool.shares[bucket].gradient
        return self._memory[bucket][offset * size : (offset + count) * size]


class Reading:
    """These are the parameters of one version, for as long as they are being sent.

    They are sent from the store's own memory, and copied only where a push is applied before they have been sent.  The
    rows of tables are copied at once: all of them only for a worker that has none.
    """

    def __init__(self, store: Store, shares: Shares, version: int) -> None:
        self.version = version
        self._store, self._shares = store, shares
        self._memory: dict[int, memoryview] = {}
        self._copied = False

    def keep(self) -> None:
        """Copy the parameters, which are about to change."""
        if not self._copied:
            self._memory = {bucket: memoryview(bytes(memory)) for bucket, memory in self._memory.items()}
            self._copied = True

    def frames(self, since: int) -> Iterator[Outgoing]:
        """Return the frames of all parameters, and of the rows of tables that have changed since a version; −1: of all
        rows."""
        tables = [bucket for bucket, share in self._shares.items() if share.row and since >= 0]
        rows = [part for bucket in tables for part in self._store.changed(bucket, since)]
        whole = sorted(set(self._shares).difference(tables))
        for bucket in whole:
            self._memory.setdefault(bucket, self._store.parameters(bucket).cast("B"))
        return self._sent(rows, whole)

    def _sent(self, rows: Sequence[Part], whole: Sequence[int]) -> Iterator[Outgoing]:
        for part in rows:
            place = len(part.payload), part.bucket, part.offset, part.count, part.encoding
            yield holding(Header(Kind.PARAMETERS, (self.version,), *place), part.payload)
        for bucket in whole:
            share = self._shares[bucket]
            for offset, count in share.cuts(share.parameter):
                yield self._frame(bucket, offset, count)

    def _frame(self, bucket: int, offset: int, count: int) -> Outgoing:
        size = self._shares[bucket].parameter
        first, last = offset * size, (offset + count) * size
        header = Header(Kind.PARAMETERS, (self.version,), last - first, bucket, offset, count)
        return header, lambda: self._memory[bucket][first:last]
