"""From a dataset to the rows of one rank, the same batches whatever the number of ranks."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from shardwise.core.errors import check_count
from shardwise.core.layout import shard_range
from shardwise.core.mesh import Mesh

from .order import sample_order
from .samples import Samples

State = tuple[int, int]
"""(epoch, rows of it already taken)."""

AXES = ("dp",)
"""The mesh axes over which the rows of a batch are divided."""

AHEAD = 2  # batches read before they are asked for


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch.

    ``fields`` are this rank's rows (sum(counts), *shape), its parts of microbatches 0, 1, … one after the
    other; ``rows`` is the number of rows of the whole batch, over all ranks and microbatches; ``starts`` and
    ``counts`` have, for each microbatch, the first row of this rank's part (counted in the whole batch) and
    how many there are, maybe none.
    """

    fields: dict[str, Tensor]
    rows: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]


def rank_rows(rows: int, microbatches: int, parts: int, index: int) -> tuple[tuple[int, int], ...]:
    """Part ``index`` of ``parts`` of each microbatch of a batch, as (start, stop) in its ``rows`` rows."""
    ranges = []
    for microbatch in range(microbatches):
        first, last = shard_range(rows, microbatches, microbatch)
        start, stop = shard_range(last - first, parts, index)
        ranges.append((first + start, first + stop))
    return tuple(ranges)


@dataclass(frozen=True)
class _Source:
    """All that it takes to make any batch: a pure function of the state."""

    samples: Samples
    batch_size: int
    microbatches: int
    seed: int
    parts: int
    index: int

    def batch(self, state: State) -> tuple[Batch, State]:
        """The batch at ``state`` and the state after it. An epoch's last batch has the rows that are left."""
        epoch, first = state
        size = self.samples.size
        rows = min(self.batch_size, size - first)
        ranges = rank_rows(rows, self.microbatches, self.parts, self.index)
        order = np.concatenate([sample_order(self.seed, epoch, first + a, first + b, size) for a, b in ranges])
        fields = self.samples.read(order.tolist())
        batch = Batch(fields, rows, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))
        done = first + rows
        return batch, (epoch + 1, 0) if done == size else (epoch, done)


class _Prefetch:
    """A thread that makes batches ahead of their use.  It ends on ``stop`` or with an exception."""

    def __init__(self, source: _Source, state: State) -> None:
        self.ready: queue.Queue[tuple[Batch, State] | BaseException] = queue.Queue(AHEAD)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(source, state), name="shardwise-loader", daemon=True)
        self.thread.start()

    def _run(self, source: _Source, state: State) -> None:
        try:
            while not self.stopped.is_set():
                batch, state = source.batch(state)
                self._put((batch, state))
        except BaseException as error:  # noqa: BLE001 - whoever asks for the batch gets it, whatever it is
            self._put(error)

    def _put(self, item: tuple[Batch, State] | BaseException) -> None:
        while not self.stopped.is_set():
            try:
                self.ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def stop(self) -> None:
        self.stopped.set()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=5)


class Loader:
    """An endless iterator over this rank's part of each batch, read a little ahead by a thread.

    Batches take ``batch_size`` rows of the current epoch in the order of :func:`sample_order`; an epoch's
    last one has what is left. Microbatch m is rows ``shard_range(rows, microbatches, m)`` of the batch, and
    of it this rank takes its share over the mesh axis ``dp``; ranks that differ in other axes only get the
    same rows.

    ``state`` is (epoch, rows of it taken by the batches handed out so far); set it to go on from there.
    ``close``, the end of a ``with`` block, or the collection of the loader ends the thread. ConfigError for a
    dataset that is empty or yields samples that differ (:class:`Samples`); an exception inside the dataset is
    raised where the batch is asked for.
    """

    def __init__(self, dataset: Any, mesh: Mesh, rank: int, batch_size: int, microbatches: int = 1, seed: int = 0) -> None:
        check_count("data.batch_size", batch_size)
        check_count("parallel.microbatches", microbatches)
        parts, index = mesh.axis_size(AXES), mesh.index(rank, AXES)
        self._source = _Source(Samples(dataset), batch_size, microbatches, seed, parts, index)
        self._state: State = (0, 0)
        self._prefetch: _Prefetch | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def example(self) -> dict[str, Tensor]:
        """Sample 0: each field without a dim of rows."""
        return dict(self._source.samples.reference)

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return self._source.samples.size

    @property
    def state(self) -> State:
        """(epoch, rows of it taken); what a run needs to go on with the next batch."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        epoch, index = state
        check_count("loader state: epoch", epoch, least=0)
        check_count("loader state: index", index, least=0)
        self.close()
        # A dataset that has shrunk since the state was taken: its epoch is over.
        self._state = (epoch, index) if index < self.samples else (epoch + 1, 0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._prefetch is None:
            self._prefetch = _Prefetch(self._source, self._state)
            self._finalizer = weakref.finalize(self, self._prefetch.stop)
        item = self._prefetch.ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, self._state = item
        return batch

    def close(self) -> None:
        """End the thread.  Asking for a batch starts another, where this one's batches ended."""
        if self._finalizer is not None:
            self._finalizer()
        self._prefetch = self._finalizer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
