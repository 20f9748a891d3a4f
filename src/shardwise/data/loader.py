"""This module loads the rows of one rank from a dataset; the batches are the same for any number of ranks."""

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
from shardwise.core.layout import rank_rows
from shardwise.core.local_options import ISLANDS
from shardwise.core.mesh import Mesh
from shardwise.core.structure import Fields
from shardwise.parallel.local import island_rows
from shardwise.runtime.masks import all_ones

from .order import sample_order
from .samples import Samples

State = tuple[int, int]
"""A state is (epoch, number of its rows already taken)."""

AXES = ("dp_replicate", "dp")
"""The rows of a batch are divided over these mesh axes."""

AHEAD = 2  # the number of batches that are read before they are asked for


@dataclass(frozen=True)
class Batch:
    """This is one rank's part of a batch.

    ``fields`` are this rank's rows (sum(counts), *shape), its parts of microbatches 0, 1, … one after the other;
    ``rows`` is the number of rows of the whole batch, over all ranks and microbatches; ``starts`` and ``counts`` have,
    for each microbatch, the first row of this rank's part (counted in the whole batch) and its number of rows, which
    may be 0.  ``ones`` are those of the loader's ``masks`` that are all ones here; it is None if ``masks`` was None.
    Of islands that train apart each has a batch of its own, which is a part of one of ``together`` rows.  ``alike``
    says that the rows of all ranks are known to have one shape.
    """

    fields: Mapping[str, Tensor]
    rows: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    ones: tuple[str, ...] | None = None
    together: int = 0
    alike: bool = False

    @property
    def of_all(self) -> int:
        """Return the number of rows that all ranks train on in the step."""
        return self.together or self.rows


@dataclass(frozen=True)
class _Source:
    """This has all that is needed to make any batch; a batch depends on the state alone."""

    samples: Samples
    batch_size: int
    microbatches: int
    seed: int
    mesh: Mesh
    rank: int
    pin: bool = False
    masks: tuple[str, ...] | None = None

    def batch(self, state: State) -> tuple[Batch, State]:
        """Return the batch at ``state`` and the state after it; an epoch's last batch has the rows that are left, if
        there is one for each island."""
        epoch, first = state
        size, mesh = self.samples.size, self.mesh
        rows = min(self.batch_size, size - first)
        if rows < mesh.axis_size(ISLANDS) and first:
            return self.batch((epoch + 1, 0))
        start, stop = island_rows(mesh, self.rank, rows)
        ranges = rank_rows(stop - start, self.microbatches, mesh.axis_size(AXES), mesh.index(self.rank, AXES))
        order = np.concatenate([self._order(epoch, first + start + a, first + start + b) for a, b in ranges])
        batch = batch_of(self.samples.read(order), stop - start, ranges, self.pin, self.masks, rows)
        done = first + rows
        return batch, (epoch + 1, 0) if done == size else (epoch, done)

    def _order(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at places start … stop-1 of an epoch, in the dataset's own order or a shuffled one."""
        own = getattr(self.samples.dataset, "order_rows", None)
        if own is None:
            return sample_order(self.seed, epoch, start, stop, self.samples.size)
        found: NDArray[np.int64] = own(self.seed, epoch, start, stop)
        return found


def batch_of(
    fields: Fields, rows: int, ranges: Sequence[tuple[int, int]], pin: bool, masks: Sequence[str] | None,
    together: int = 0, alike: bool = False,
) -> Batch:  # fmt: skip
    """Return a rank's part of a batch; with ``pin`` it is page-locked, so that it is copied asynchronously."""
    ones = None if masks is None else all_ones(fields, masks)
    if pin:
        fields = fields.like({name: value.pin_memory() for name, value in fields.items()})
    return Batch(fields, rows, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges), ones, together, alike)


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
    """Yield this rank's part of each batch of one pass over ``dataset``, in its order; the last batch has the rows that
    are left.

    With ``batches`` there are at most that many: their rows are spread evenly over the dataset and are the same each
    time.  Ranks may get different numbers of rows, and some none.
    """
    check_count("data.batch_size", batch_size)
    samples, parts, index = Samples(dataset), mesh.axis_size(AXES), mesh.index(rank, AXES)
    total = samples.size if batches is None else min(samples.size, batches * batch_size)
    for first in range(0, total, batch_size):
        rows = min(batch_size, total - first)
        ranges = rank_rows(rows, microbatches, parts, index)
        places = np.concatenate([np.arange(first + a, first + b, dtype=np.int64) for a, b in ranges])
        yield batch_of(samples.read(_spread(places, samples.size, total)), rows, ranges, pin, masks)


def _spread(places: NDArray[np.int64], size: int, total: int) -> NDArray[np.int64]:
    """Return floor(place x size / total), without a product that does not fit 63 bits."""
    whole, rest = divmod(size, total)
    return places * whole + places * rest // total


class _Prefetch:
    """This thread makes batches before they are asked for.  It ends on ``stop`` or with an exception."""

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
            self.ready.get_nowait()  # a thread that waits for a place in the queue need not wait longer
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=5)


class Loader:
    """A loader is an endless iterator over this rank's part of each batch, which a thread reads a little ahead.

    A batch takes ``batch_size`` rows of the current epoch in the order of :func:`sample_order`; an epoch's last batch
    has the rows that are left. Microbatch m is rows ``shard_range(rows, microbatches, m)`` of the batch, and this rank
    takes its part of them over the mesh axes ``dp_replicate`` and ``dp``; ranks that differ only in other axes get the
    same rows.  Islands that train apart have a part of the rows each, which is a batch of their own.

    A dataset with a method ``order_rows(seed, epoch, start, stop)`` has an order of its own (:class:`Mixture`). With
    ``pin`` the fields are in page-locked memory, which needs a GPU.  Each batch says which of the fields ``masks`` are
    all ones; the thread that reads ahead finds this out.

    ``state`` is (epoch, rows of it taken by the batches handed out so far); set it to go on from there. ``state_dict``
    has the same, and identifies the data, for a checkpoint. ``close``, the end of a ``with`` block, or the collection
    of the loader ends the thread. ConfigError for a dataset that is empty or whose samples differ (:class:`Samples`);
    an exception inside the dataset is raised where the batch is asked for.
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
        self._source = _Source(Samples(dataset), batch_size, microbatches, seed, mesh, rank, pin, masks)
        islands, most = mesh.axis_size(ISLANDS), min(batch_size, self._source.samples.size)
        if most < islands:
            wrong = f"{most} row{'s' * (most != 1)} of a batch for {islands} islands"
            raise ConfigError.on("data.batch_size", wrong, "at least a row for each island")
        self._state: State = (0, 0)
        self._prefetch: _Prefetch | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def example(self) -> dict[str, Tensor]:
        """Return sample 0, whose fields have no dim of rows."""
        return self._source.samples.reference

    @property
    def notes(self) -> list[str]:
        """Return what a user should know: nothing, for the position in the order is all that a run needs to resume."""
        return []

    @property
    def samples(self) -> int:
        """Return the number of samples in an epoch."""
        return self._source.samples.size

    @property
    def state(self) -> State:
        """Return (epoch, rows of it taken), which a run needs to go on with the next batch."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        epoch, index = state
        check_count("loader state: epoch", epoch, least=0)
        check_count("loader state: index", index, least=0)
        self.close()
        # If the dataset has shrunk since the state was taken, its epoch is over.
        self._state = (epoch, index) if index < self.samples else (epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what identifies the data, fit for JSON: epoch, rows, seed, size and digest."""
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
        """Go on from the position of a :meth:`state_dict`; ranks, batch size and microbatches may have changed.

        ConfigError if the data, or the seed that orders them, have changed: the position would mean other samples.
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

    def batch_at(self, number: int) -> Batch:
        """Return batch ``number`` of a run from its beginning, whatever has been handed out; the state stays."""
        size = self._source.batch_size
        epoch, place = divmod(number, -(-self.samples // size))
        return self._source.batch((epoch, place * size))[0]

    def close(self) -> None:
        """End the thread.  Asking for a batch starts another, which goes on after the last batch handed out."""
        if self._finalizer is not None:
            self._finalizer()
        self._prefetch = self._finalizer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
