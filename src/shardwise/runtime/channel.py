"""A channel is a queue of operations between ranks that share memory: no lock, no thread, one writer per word.

Each rank owns a *control* segment that only it writes.  For every channel it holds two counters, ``posted`` and
``done``, and a ring of entries.  An operation is cut into pieces, and a piece goes through three steps on every rank:

1. *post*: write into the ring where the input lies, then raise ``posted``;
2. *work*: once all members have posted it, do this rank's part straight from their memory, then raise ``done``;
3. *retire*: once all members are done, no other rank reads this rank's memory any more, and the results are complete.
   The receiver of a message retires it as soon as it has read it, whatever the sender does meanwhile.

Input that others cannot see is first copied to a staging buffer of the channel.

A word is 8 aligned bytes with a single writer.  That is all x86 needs: such stores are never torn and become visible in
program order, after the data written before them; loads are not reordered with loads either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

import torch
from torch import Tensor

from shardwise.core.errors import ShardwiseError
from shardwise.runtime.call import Call
from shardwise.runtime.segments import Arena, SharedSegment, map_segment
from shardwise.runtime.wakeup import Waker

PIECE = 8 << 20  # the most bytes of a piece, which bounds the work of one step and the staging memory
STAGES = 2  # staging buffers per channel
WORDS = 8  # words in a cache line; different ranks never write to the same line
RING = 64  # entries per channel
CHANNELS = 256  # the most channels of a rank

# First line of a control segment: channels in use, whether the owner has left, and whether it waits to be woken.
COUNT, CLOSED, ASLEEP = 0, 1, 2
KEY, POSTED, DONE = 0, 1, 2  # words of the first line of a channel
# Words of an entry: which operation it is, and where in the owner's memory its input lies (in bytes, as is STRIDE).
SIGNATURE, FD, OFFSET, STRIDE = 0, 1, 2, 3
CHANNEL_WORDS = WORDS * (1 + RING)
CONTROL_BYTES = 8 * (WORDS + CHANNELS * CHANNEL_WORDS)

Source: TypeAlias = Callable[[int, int], Tensor]
"""``source(member, part)`` is the current piece of a part of a member's input, a 1-d view of that member's memory."""

Work: TypeAlias = Callable[[Source, int, int], None]
"""``work(source, start, stop)`` does this rank's share of elements ``start:stop`` of every part."""


class Board:
    """A board is what one rank sees of all ranks: their control words and, once they are needed, their segments."""

    def __init__(self, rank: int, pids: list[int], controls: list[memoryview], wakers: dict[int, Waker]) -> None:
        """``wakers`` has the wakers of the other ranks, by rank."""
        self.rank, self.controls = rank, controls
        self.arena, self.wakers = Arena(), wakers
        self._pids = pids
        self._segments: dict[tuple[int, int], Tensor] = {}

    def wake(self, ranks: Iterable[int]) -> None:
        """Wake those of ``ranks`` that sleep, after publishing something that they may wait for."""
        for rank in ranks:
            if self.controls[rank][ASLEEP] and rank in self.wakers:
                self.wakers[rank].wake()

    def segment(self, rank: int, fd: int) -> Tensor:
        """Return the bytes of a segment of another rank, mapped once."""
        found = self._segments.get((rank, fd))
        if found is None:
            memory = map_segment(self._pids[rank], fd)
            found = self._segments[rank, fd] = torch.frombuffer(memory, dtype=torch.uint8)
        return found

    def close(self) -> None:
        """Close this rank's segments and wakers."""
        self.arena.close()
        for waker in self.wakers.values():
            waker.close()
        self.wakers.clear()


@dataclass(eq=False, slots=True)
class Operation:
    """An operation has an input ``x`` of ``parts`` times ``length`` elements, which the others read, or None.

    With a ``result`` the others also write where they read, and at the end the result is there: they write to ``x``
    where that is ``result``, else to a staged copy of ``x`` that is then copied to ``result``.  ``signature`` must be
    the same on all members.
    """

    call: Call
    x: Tensor | None
    parts: int
    length: int
    dtype: torch.dtype
    signature: int
    work: Work
    result: Tensor | None = None
    reads_only: bool = False  # the operation ends with this rank's work: the others need nothing from it
    remaining: int = 0  # pieces that have not been retired

    def pieces(self) -> list[Piece]:
        step = max(1, PIECE // max(1, self.parts * self.dtype.itemsize))
        starts = range(0, max(1, self.length), step)
        self.remaining = len(starts)
        return [Piece(self, start, min(start + step, self.length)) for start in starts]


@dataclass(eq=False, slots=True)
class Piece:
    """A piece has elements ``start:stop`` of every part of an operation; ``shared`` is this rank's input, by part."""

    operation: Operation
    start: int
    stop: int
    shared: Tensor | None = None
    staged: bool = False

    def of(self, x: Tensor) -> Tensor:
        """Return this piece of a tensor that has the shape of the input, as (parts, elements of the piece)."""
        parts = x.view(self.operation.parts, -1)
        return parts if parts.size(1) == self.stop - self.start else parts[:, self.start : self.stop]


class Channel:
    """A channel has the operations of one group and lane, or the messages from rank to rank, in posting order."""

    def __init__(self, board: Board, ranks: tuple[int, ...], name: str) -> None:
        self._board, self._ranks, self._me = board, ranks, ranks.index(board.rank)
        self._own = board.controls[board.rank]
        self._key = int.from_bytes(blake2b(f"{name} {ranks}".encode(), digest_size=8).digest(), signed=True)
        self._bases = [0] * len(ranks)  # where the channel is in each member's control segment; 0: not yet known
        self._bases[self._me] = self._claim()
        self._pieces: deque[Piece] = deque()  # not yet retired
        self._posted = self._worked = self._retired = 0  # numbers of this rank's pieces
        self._stages: SharedSegment | None = None
        self._staged = 0  # staging buffers in use
        self._next_stage = 0

    @property
    def idle(self) -> bool:
        return not self._pieces

    def post(self, operation: Operation) -> None:
        self._pieces.extend(operation.pieces())
        self._publish()

    def advance(self) -> bool:
        """Take each of the three steps once if it can be taken now, and return whether any was."""
        moved = self._retired
        worked = self._worked < self._posted and self._lowest(POSTED) > self._worked
        if worked:
            self._work()
        if self._retired < self._worked:
            self._retire()
        return self._publish() or worked or moved != self._retired

    def late(self) -> list[int]:
        """Return the ranks that this rank's next piece waits for."""
        wanted = self._retired + 1
        for word in (POSTED, DONE):
            late = [rank for at, rank in enumerate(self._ranks) if self._word(at, word) < wanted]
            if late:
                return late
        return []

    def close(self) -> None:
        if self._stages is not None:
            self._stages.close()

    def _claim(self) -> int:
        count = self._own[COUNT]
        if count == CHANNELS:
            raise ShardwiseError(f"shared memory: more than {CHANNELS} channels (pairs of group and lane) on one rank")
        base = WORDS + count * CHANNEL_WORDS
        self._own[base + KEY] = self._key
        self._own[COUNT] = count + 1
        return base

    def _word(self, member: int, word: int) -> int:
        control = self._board.controls[self._ranks[member]]
        base = self._bases[member]
        if not base:
            for at in range(WORDS, WORDS + control[COUNT] * CHANNEL_WORDS, CHANNEL_WORDS):
                if control[at + KEY] == self._key:
                    base = self._bases[member] = at
                    break
            else:
                return 0
        return int(control[base + word])

    def _lowest(self, word: int) -> int:
        return min(self._word(member, word) for member in range(len(self._ranks)))

    def _publish(self) -> bool:
        first = self._posted
        # An entry is free when all are done with it, which may be after this rank has retired its piece.
        while self._posted - self._retired < len(self._pieces) and self._posted - self._lowest(DONE) < RING:
            if not self._share(self._pieces[self._posted - self._retired]):
                break
            self._posted += 1
            self._own[self._bases[self._me] + POSTED] = self._posted
        if self._posted > first:
            self._board.wake(self._ranks)
        return self._posted > first

    def _share(self, piece: Piece) -> bool:
        """Make the input visible and write the entry; False while there is no room for it."""
        whole, result, fd, offset, stride = piece.operation.x, piece.operation.result, -1, 0, 0
        if whole is not None:
            x = piece.of(whole)
            place = self._board.arena.locate(x) if result is None or result is whole else None
            if place is None:
                if self._staged == STAGES:
                    return False
                fd, offset, piece.shared = self._stage(x)
                piece.staged = True
            else:
                (fd, offset), piece.shared = place, x
            stride = piece.shared.stride(0) * x.itemsize
        entry = self._bases[self._me] + WORDS * (1 + self._posted % RING)
        own = self._own
        own[entry + SIGNATURE], own[entry + FD] = piece.operation.signature, fd
        own[entry + OFFSET], own[entry + STRIDE] = offset, stride
        return True

    def _stage(self, x: Tensor) -> tuple[int, int, Tensor]:
        if self._stages is None:
            self._stages = SharedSegment(STAGES * PIECE)
        offset = self._next_stage * PIECE
        self._next_stage = (self._next_stage + 1) % STAGES
        self._staged += 1
        copy = self._stages.bytes[offset : offset + x.nbytes].view(x.dtype).view(x.shape)
        return self._stages.fd, offset, copy.copy_(x)

    def _work(self) -> None:
        piece = self._pieces[self._worked - self._retired]
        operation = piece.operation
        slot = WORDS * (1 + self._worked % RING)
        nbytes = (piece.stop - piece.start) * operation.dtype.itemsize

        def source(member: int, part: int) -> Tensor:
            if member == self._me:
                assert piece.shared is not None
                return piece.shared[part]
            rank = self._ranks[member]
            control, entry = self._board.controls[rank], self._bases[member] + slot
            start = control[entry + OFFSET] + part * control[entry + STRIDE]
            try:
                segment = self._board.segment(rank, control[entry + FD])
            except OSError as error:
                reason = f"the memory of rank {rank} cannot be mapped: {error}"
                raise operation.call.error(reason, self._board.rank) from error
            return segment[start : start + nbytes].view(operation.dtype)

        for member, rank in enumerate(self._ranks):
            if self._board.controls[rank][self._bases[member] + slot + SIGNATURE] != operation.signature:
                reason = f"rank {rank} has posted another operation, size or dtype here"
                raise operation.call.error(reason, self._board.rank)
        operation.work(source, piece.start, piece.stop)
        self._worked += 1
        self._own[self._bases[self._me] + DONE] = self._worked
        self._board.wake(self._ranks)

    def _retire(self) -> None:
        done = self._lowest(DONE)
        while self._pieces and self._retired < (self._worked if self._pieces[0].operation.reads_only else done):
            piece = self._pieces.popleft()
            self._retired += 1
            if piece.staged:
                self._staged -= 1
                if piece.operation.result is not None:
                    assert piece.shared is not None
                    piece.of(piece.operation.result).copy_(piece.shared)
            piece.operation.remaining -= 1
