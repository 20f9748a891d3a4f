"""A loader over whole batches that every rank reads; each keeps its rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Self

from torch import Tensor

from shardwise.capture.wrapped import rows_in
from shardwise.core.errors import ConfigError, check_count
from shardwise.core.layout import rank_rows
from shardwise.core.local_options import ISLANDS
from shardwise.core.mesh import Mesh
from shardwise.core.structure import Fields, check_alike
from shardwise.parallel.local import island_rows

from .checksum import checksum_of
from .encoded import decoded, encoded
from .forming import kind_of, rows_of
from .generators import Generators
from .loader import AXES, Batch, Loader, batch_of, one_pass
from .streams import Collate, Source, source_of

KEYS = ("epoch", "batches", "seed", "word", "generators", "source", "random")
"""What the state of a loader has."""

Check = Callable[[int], object]
"""It is given the checksum of a batch, and raises :class:`ConfigError` where ranks have read others."""


class StreamLoader:
    """An endless iterator over this rank's part of the batches of ``source``, epoch after epoch.

    Every rank reads every batch, so that they are those of one device, in its order: reading costs each rank as much as
    it costs one device, and where that is slow a map-style dataset without a collator is better, of which a rank reads
    its own rows only (:class:`~shardwise.data.loader.Loader`).  The random generators of Python, numpy and torch are
    the source's own while it is read, made from ``seed`` and the epoch; ``check`` compares each batch among ranks.

    ``state_dict`` has the position for a checkpoint: the batches taken, and the source's own state if it keeps one.
    Without one, what came before in the epoch is read again, and the last batch is compared with the checkpoint's.
    """

    def __init__(
        self,
        source: Source,
        mesh: Mesh,
        rank: int,
        microbatches: int = 1,
        seed: int = 0,
        *,
        pin: bool = False,
        masks: tuple[str, ...] | None = None,
        check: Check | None = None,
    ) -> None:
        check_count("parallel.microbatches", microbatches)
        self.source = source
        self._mesh, self._rank, self._microbatches, self._seed = mesh, rank, microbatches, seed
        self._pin, self._masks, self._check = pin, masks, check
        self._epoch = self._taken = self._word = 0
        self._generators, self._iterator = Generators(), None  # type: tuple[Generators, Iterator[Fields] | None]
        self._own: list[Tensor] = []  # the states of the user's generators at the beginning of the epoch
        self._first: Fields | None = None
        self._resumed = False  # whether nothing has come since the source took a state of its own

    @property
    def notes(self) -> list[str]:
        """What a user should know of how the source resumes."""
        return [] if self.source.note is None else [self.source.note]

    @property
    def state(self) -> tuple[int, int]:
        """Return (epoch, batches of it taken)."""
        return self._epoch, self._taken

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        fields = self._next()
        word = checksum_of(fields)
        if self._check is not None:
            self._check(word)
        self._first = self._first or rows_of(fields, [(0, 1)])
        check_alike(fields, self._first, f"batch {self._taken} of epoch {self._epoch}")
        self._taken, self._word = self._taken + 1, word
        return part_of(fields, self._mesh, self._rank, self._microbatches, self._pin, self._masks, apart=True)

    def _next(self) -> Fields:
        """Return the next batch, of the next epoch where this one has ended."""
        if self._iterator is None:
            self._iterator = self._begun(self._taken)
        found = next(self._iterator, None)
        if found is not None:
            self._resumed = False
            return found
        theirs = self.source.theirs
        if not self._taken and self._resumed:  # its state was that of the end, which it says once more
            self._resumed, self._iterator = False, None
            return self._next()
        if not self._taken:
            raise ConfigError.on("data", f"{kind_of(theirs)} gave no batch in epoch {self._epoch}", "one or more")
        if hasattr(theirs, "__next__"):
            wrong = f"{kind_of(theirs)} has ended after {self._taken} batches, and can be iterated once"
            raise ConfigError.on("data", wrong, "fewer steps, or an iterable that begins anew, such as IterableDataset")
        self._epoch, self._taken, self._iterator, self._resumed = self._epoch + 1, 0, None, False
        return self._next()

    def _begun(self, skip: int) -> Iterator[Fields]:
        self._own = [one.get_state() for one in self.source.own_generators]
        return self.source.batches(self._epoch, self._generators, self._seed, skip)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, fit for JSON."""
        theirs = self.source.state
        over = theirs is not None and (self.source.ended or self._taken == self.source.batches_of_epoch)
        return {
            "epoch": self._epoch + over,
            "batches": 0 if over else self._taken,
            "seed": self._seed,
            "word": self._word,
            "generators": encoded(self._own),
            "source": None if theirs is None else encoded(theirs.state_dict(), "data: state_dict()"),
            "random": None if theirs is None or over else encoded(self._generators.states),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the position of a :meth:`state_dict`.

        ConfigError where it is that of other data, or where the batches that came before are others now."""
        if not isinstance(state, Mapping) or set(state) != set(KEYS):
            raise ConfigError(f"loader state: {state!r} is not legal; legal: a table of {', '.join(KEYS)}")
        theirs, generators = self.source.state, len(self.source.own_generators)
        had = "a train.seed of its own" if state["seed"] != self._seed else ""
        had = had or "no state" * (state["source"] is None and theirs is not None)
        had = had or "a state" * (state["source"] is not None and theirs is None)
        had = had or f"{len(state['generators'])} generators" * (len(state["generators"]) not in (0, generators))
        if had:
            wrong = f"the data is not the data of the checkpoint: it had {had}"
            raise ConfigError(f"{wrong}; legal: the data and the train.seed that it was written with, or a new run")
        self._epoch, self._taken, self._iterator = state["epoch"], state["batches"], None
        for generator, own in zip(self.source.own_generators, decoded(state["generators"]), strict=False):
            generator.set_state(own)
        if self.source.state is not None:
            self.source.state.load_state_dict(decoded(state["source"]))
            self._generators.resumed = decoded(state["random"])
            self._iterator, self._resumed = self._begun(0), True
        elif self._taken:
            self._read_again(state["word"])

    def _read_again(self, word: int) -> None:
        """Read what came before in the epoch, whose last batch has the checksum ``word``."""
        self._iterator = self._begun(self._taken - 1)
        before = next(self._iterator, None)
        if before is None or checksum_of(before) != word:
            what = "gave other batches" if before is not None else "had more batches in this epoch"
            wrong = f"{kind_of(self.source.theirs)} {what} when the checkpoint was written, so it cannot be resumed"
            legal = "an order that follows from torch's, numpy's and Python's generators, or a source with a state_dict"
            raise ConfigError.on("data", wrong, legal)
        self._word = word

    def close(self) -> None:
        """Let go of the iterator, and with it of its workers."""
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def part_of(
    fields: Mapping[str, Tensor], mesh: Mesh, rank: int, microbatches: int, pin: bool = False,
    masks: tuple[str, ...] | None = None, *, apart: bool = False,
) -> Batch:  # fmt: skip
    """Return a rank's part of a whole batch; of islands that train ``apart`` each has a part of the rows."""
    rows = rows_in(fields)
    start, stop = (0, rows)
    if apart:
        if rows < mesh.axis_size(ISLANDS):
            raise ConfigError.on("batch", f"{rows} rows for {mesh.axis_size(ISLANDS)} islands", "a row for each")
        start, stop = island_rows(mesh, rank, rows)
    ranges = rank_rows(stop - start, microbatches, mesh.axis_size(AXES), mesh.index(rank, AXES))
    mine = rows_of(fields, [(start + a, start + b) for a, b in ranges])
    return batch_of(mine, stop - start, ranges, pin, masks, rows if apart else 0, alike=True)


AnyLoader = Loader | StreamLoader


def open_loader(
    data: Any, mesh: Mesh, rank: int, rows: int, microbatches: int, seed: int, *, collate: Collate | None = None,
    whole: tuple[str, ...] = (), check: Check | None = None, pin: bool = False, masks: tuple[str, ...] | None = None,
) -> AnyLoader:  # fmt: skip
    """Return endless batches of a rank's rows of ``data``: a map-style dataset, or what :func:`source_of` takes.

    ``rows`` is the number of rows of a batch, but for a ``DataLoader``, which has its own; ``collate`` makes a batch of
    a list of samples, and ``whole`` are the tensors in it that have no rows."""
    source = source_of(data, rows, collate, whole)
    if source is None:
        return Loader(data, mesh, rank, rows, microbatches, seed, pin=pin, masks=masks)
    return StreamLoader(source, mesh, rank, microbatches, seed, pin=pin, masks=masks, check=check)


def open_pass(
    data: Any, mesh: Mesh, rank: int, rows: int, microbatches: int = 1, *, batches: int | None = None,
    whole: tuple[str, ...] = (), pin: bool = False, masks: tuple[str, ...] | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Yield this rank's part of each batch of one pass over ``data``, the same each time; the last has the rows that
    are left.  With ``batches`` there are at most that many: of a map-style dataset spread evenly, else the first."""
    source = source_of(data, rows, None, whole)
    if source is None:
        yield from one_pass(data, mesh, rank, rows, microbatches, batches=batches, pin=pin, masks=masks)
        return
    own = [one.get_state() for one in source.own_generators]
    for fields in islice(source.batches(0, Generators(), 0, 0), batches):
        yield part_of(fields, mesh, rank, microbatches, pin, masks)
    for generator, state in zip(source.own_generators, own, strict=True):
        generator.set_state(state)
