"""Staging copies the values of one moment aside, into bounded memory from which another thread writes them.

The pieces form one stream of bytes.  The memory is cut into blocks: one thread fills free blocks, in order, another
empties them.  If the stream is no longer than the memory, the filler never waits.  If it is longer, filling goes on as
blocks come back.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.flat import range_boxes

from .atoms import Piece

BLOCK = 16 << 20  # bytes, a power of two
UNIT = 64  # bytes; blocks begin at multiples of it, so that every dtype is aligned in them
LEAST_BYTES = 4 * UNIT


@dataclass(frozen=True)
class StagedRun:
    """Bytes ``start`` to ``stop`` of the stream: ``raw`` if they are contiguous in memory, else a ``strided``
    tensor."""

    start: int
    stop: int
    raw: Tensor | None
    strided: Tensor | None = None


def runs_of(pieces: Sequence[Piece]) -> list[StagedRun]:
    """Return the stream of ``pieces`` as runs, in order; pieces that are neighbours in memory become one run."""
    found: list[StagedRun] = []
    end = 0
    for piece in pieces:
        tensor, start = piece.tensor.detach(), end
        end = start + piece.nbytes
        if start == end:
            continue
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            found.append(StagedRun(start, end, None, tensor))
            continue
        raw = tensor.reshape(-1).view(torch.uint8)
        joined = _joined(found[-1].raw, raw) if found else None
        found[-1:] = (
            [StagedRun(found[-1].start, end, joined)]
            if joined is not None
            else [*found[-1:], StagedRun(start, end, raw)]
        )
    return found


def _joined(before: Tensor | None, after: Tensor) -> Tensor | None:
    """Return both as one view if they are neighbours in the same memory, else None."""
    if before is None or before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
        return None
    if before.storage_offset() + before.numel() != after.storage_offset():
        return None
    view = torch.empty(0, dtype=torch.uint8, device=after.device)
    return view.set_(after.untyped_storage(), before.storage_offset(), (before.numel() + after.numel(),), (1,))


class Staging:
    """Memory for values on their way to the disk, allocated once and reused; ``bound`` is the most bytes it may take.

    It is allocated a block at a time: torch rounds each allocation of page-locked memory up to a power of two, and the
    size of a block is one.
    """

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self._memory: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """The number of bytes that are allocated now."""
        return sum(one.numel() for one in self._memory)

    def needed(self, nbytes: int) -> int:
        """Return the bytes that are allocated once a stream of ``nbytes`` bytes has passed through it."""
        whole = -(-nbytes // UNIT) * UNIT
        return max(self.nbytes, whole if self.bound is None else min(whole, self.bound // UNIT * UNIT))

    def prepare(self, nbytes: int, pinned: bool) -> None:
        """Allocate the memory for a stream of ``nbytes`` and touch each page; copies from a GPU need ``pinned``."""
        size = self.needed(nbytes)
        if size > self.nbytes or (pinned and not all(one.is_pinned() for one in self._memory)):
            self._memory.clear()  # the old memory is freed first, so that both are never held
            for start in range(0, size, BLOCK):
                numel = min(BLOCK, size - start)
                self._memory.append(torch.empty(numel, dtype=torch.uint8, pin_memory=pinned).zero_())

    def blocks(self, nbytes: int) -> list[Tensor]:
        """Return the memory in blocks, small ones if the stream is longer, so that filling and emptying overlap."""
        size = BLOCK if nbytes <= self.nbytes else max(min(BLOCK, self.nbytes // 4 // UNIT * UNIT), UNIT)
        return [one[start : start + size] for one in self._memory for start in range(0, one.numel(), size)]


class Stream:
    """One passage of runs through blocks: the thread that has the values calls ``fill``, the one that writes
    ``take``."""

    def __init__(self, runs: Sequence[StagedRun], blocks: Sequence[Tensor]) -> None:
        self._runs = runs
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[Tensor, torch.Event | None] | None] = queue.SimpleQueue()
        self._taken: Tensor | None = None
        for block in blocks:
            self._free.put(block)

    def fill(self) -> None:
        """Copy all runs, and return when the last byte is copied or when the taker has given up."""
        total = self._runs[-1].stop if self._runs else 0
        position, index, event = 0, 0, None
        try:
            while position < total:
                block = self._free.get()
                if block is None:
                    return
                stop = min(position + block.numel(), total)
                while index < len(self._runs) and self._runs[index].start < stop:
                    run = self._runs[index]
                    _copy(run, max(run.start, position), min(run.stop, stop), block, position)
                    if run.stop > stop:
                        break
                    index += 1
                event = self._recorded()
                self._full.put((block[: stop - position], event))
                position = stop
            if event is not None:
                event.synchronize()
        finally:
            self._full.put(None)

    def take(self) -> memoryview | None:
        """Return the next bytes, valid until the next call; None after the last, or where ``fill`` ended early."""
        if self._taken is not None:
            self._free.put(self._taken)
            self._taken = None
        item = self._full.get()
        if item is None:
            return None
        block, event = item
        if event is not None:
            event.synchronize()
        self._taken = block
        return memoryview(block.numpy())  # type: ignore[arg-type]  # an array has the buffer protocol

    def _recorded(self) -> torch.Event | None:
        """Return an event after the copies into a block if a device makes them; None if the host has made them."""
        tensors = (run.strided if run.raw is None else run.raw for run in self._runs)
        device = next(
            (tensor.device for tensor in tensors if tensor is not None and Backend.of(tensor.device).asynchronous), None
        )
        return None if device is None else Backend.of(device).event(device)

    def give_up(self) -> None:
        """Take nothing more: ``fill`` returns instead of waiting for a free block."""
        self._free.put(None)


def _copy(run: StagedRun, start: int, stop: int, block: Tensor, position: int) -> None:
    """Copy bytes ``start`` to ``stop`` of the stream into a block that begins at ``position``."""
    into = block[start - position : stop - position]
    if run.raw is not None:
        into.copy_(run.raw[start - run.start : stop - run.start], non_blocking=True)
        return
    tensor = run.strided
    assert tensor is not None
    values, width, done = into.view(tensor.dtype), tensor.dtype.itemsize, 0
    for box in range_boxes(tuple(tensor.shape), (start - run.start) // width, (stop - run.start) // width):
        values[done : done + box.numel].view(box.shape).copy_(tensor[box.slices], non_blocking=True)
        done += box.numel
