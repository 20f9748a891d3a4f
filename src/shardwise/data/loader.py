"""From a dataset to the rows of one rank, the same batches whatever the number of ranks."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardwise.core.errors import ConfigError, check_count
from shardwise.core.layout import shard_range
from shardwise.core.mesh import Mesh
from shardwise.runtime.masks import all_ones

from .order import sample_order
from .samples import Samples

State = tuple[int, int]
"""(epoch, rows of it already taken)."""

AXES = ("dp_replicate", "dp")
"""The mesh axes over which the rows of a batch are divided."""

AHEAD = 2  # batches read before they are asked for


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch.

    ``fields`` are this rank's rows (sum(counts), *shape), its parts of microbatches 0, 1, … one after the
    other; ``rows`` is the number of rows of the whole batch, over all ranks and microbatches; ``starts`` and
    ``counts`` have, for each microbatch, the first row of this rank's part (counted in the whole batch) and
    how many there are, maybe none.  ``ones`` are those of the loader's ``masks`` that are all ones here; None if it was
    not asked for any.
    """

    fields: dict[str, Tensor]
    rows: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    ones: tuple[str, ...] | None = None


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
    pin: bool = False
    masks: tuple[str, ...] | None = None

    def batch(self, state: State) -> tuple[Batch, State]:
        """The batch at ``state`` and the state after it. An epoch's last batch has the rows that are left."""
        epoch, first = state
        size = self.samples.size
        rows = min(self.batch_size, size - first)
        ranges = rank_rows(rows, self.microbatches, self.parts, self.index)
        order = np.concatenate([self._order(epoch, first + a, first + b) for a, b in ranges])
        batch = _batch(self.samples.read(order), rows, ranges, self.pin, self.masks)
        done = first + rows
        return batch, (epoch + 1, 0) if done == size else (epoch, done)

    def _order(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The samples at places of an epoch: the dataset's own order, or a shuffled one."""
        own = getattr(self.samples.dataset, "order_rows", None)
        if own is None:
            return sample_order(self.seed, epoch, start, stop, self.samples.size)
        found: NDArray[np.int64] = own(self.seed, epoch, start, stop)
        return found


def _batch(
    fields: dict[str, Tensor], rows: int, ranges: Sequence[tuple[int, int]], pin: bool, masks: Sequence[str] | None
) -> Batch:
    """A rank's part of a batch; with ``pin`` page-locked, for a copy to the device that nobody waits for."""
    ones = None if masks is None else all_ones(fields, masks)
    if pin:
        fields = {name: value.pin_memory() for name, value in fields.items()}
    return Batch(fields, rows, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges), ones)


def one_pass(
    dataset: Any,
    mesh: Mesh,
    rank: int,
    batch_size: int,
    microbatches: int = 1,
    *,
    batches: int | None = None,
    pin: bool = False,
    masks: tuple[str, ...] | None = None,
) -> Iterator[Batch]:
    """This rank's part of each batch of one pass over ``dataset``, in its order; the last batch has the rows that are
    left.

    With ``batches`` no more than that many: their rows are spread evenly over the dataset and are the same each time.
    Ranks may get different numbers of rows, some none.
    """
    check_count("data.batch_size", batch_size)
    samples, parts, index = Samples(dataset), mesh.axis_size(AXES), mesh.index(rank, AXES)
    total = samples.size if batches is None else min(samples.size, batches * batch_size)
    for first in range(0, total, batch_size):
        rows = min(batch_size, total - first)
        ranges = rank_rows(rows, microbatches, parts, index)
        places = np.concatenate([np.arange(first + a, first + b, dtype=np.int64) for a, b in ranges])
        yield _batch(samples.read(_spread(places, samples.size, total)), rows, ranges, pin, masks)


def _spread(places: NDArray[np.int64], size: int, total: int) -> NDArray[np.int64]:
    """floor(place x size / total), without a product that does not fit 63 bits."""
    whole, rest = divmod(size, total)
    return places * whole + places * rest // total


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
        with suppress(queue.Empty):
            self.ready.get_nowait()  # so that a thread that waits for a place need not wait longer
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=5)


class Loader:
    """An endless iterator over this rank's part of each batch, read a little ahead by a thread.

    Batches take ``batch_size`` rows of the current epoch in the order of :func:`sample_order`; an epoch's
    last one has what is left. Microbatch m is rows ``shard_range(rows, microbatches, m)`` of the batch, and
    of it this rank takes its share over the mesh axis ``dp``; ranks that differ in other axes only get the
    same rows.

    A dataset with a method ``order_rows(seed, epoch, start, stop)`` has an order of its own (:class:`Mixture`). With
    ``pin`` the fields lie in page-locked memory, which needs a GPU.  ``masks`` are fields of which each batch says
    whether they are all ones, which the thread that reads ahead finds out.

    ``state`` is (epoch, rows of it taken by the batches handed out so far); set it to go on from there. ``state_dict``
    says the same, and of which data, for a checkpoint.
    ``close``, the end of a ``with`` block, or the collection of the loader ends the thread. ConfigError for a
    dataset that is empty or yields samples that differ (:class:`Samples`); an exception inside the dataset is
    raised where the batch is asked for.
    """

    def __init__(
        self,
        dataset: Any,
        mesh: Mesh,
        rank: int,
        batch_size: int,
        microbatches: int = 1,
        seed: int = 0,
        *,
        pin: bool = False,
        masks: tuple[str, ...] | None = None,
    ) -> None:
        check_count("data.batch_size", batch_size)
        check_count("parallel.microbatches", microbatches)
        parts, index = mesh.axis_size(AXES), mesh.index(rank, AXES)
        self._source = _Source(Samples(dataset), batch_size, microbatches, seed, parts, index, pin, masks)
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

    def state_dict(self) -> dict[str, Any]:
        """The position and the data it is in, as JSON has them: ``epoch``, ``rows``, ``seed``, ``size``, ``digest``."""
        epoch, rows = self._state
        source = self._source
        return {
            "epoch": epoch,
            "rows": rows,
            "seed": source.seed,
            "size": source.samples.size,
            "digest": source.samples.digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the position of a :meth:`state_dict`, of any number of ranks, batch size and microbatches.

        ConfigError if the data, or the seed that orders them, are not those of that state: the position would mean
        other samples.
        """
        here = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(here):
            raise ConfigError(f"loader state: {state!r} is not legal; legal: a table of {', '.join(here)}")
        what = {"size": "samples", "digest": "digest", "seed": "train.seed"}
        found = [f"{words} {state[key]}, here {here[key]}" for key, words in what.items() if state[key] != here[key]]
        if found:
            raise ConfigError(
                f"the data is not the data of the checkpoint: it had {'; '.join(found)}; legal: the data and the "
                "train.seed that it "
                "was written with, or a new run"
            )
        self.state = (state["epoch"], state["rows"])

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
