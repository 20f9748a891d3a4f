"""Whole batches that every rank reads, as one device would, and of which it keeps its rows: those of a ``DataLoader``,
of an ``IterableDataset``, or those that a collator makes of a map-style dataset."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from shardwise.core.errors import ConfigError
from shardwise.core.structure import Fields

from .forming import fields_of, kind_of
from .generators import Generators
from .order import sample_order
from .padding import Padded
from .samples import Samples

Collate = Callable[[list[Any]], Any]
"""It makes a batch of a list of samples."""

LEGAL = "a map-style dataset (len(dataset) and dataset[index]), an IterableDataset or a DataLoader"
BY_STATE = "it resumes by its own state_dict, and whether that brings the samples that were to come is not known here"
AGAIN = "it resumes by reading again what came before in the epoch, which takes as long as it took then"


@dataclass(frozen=True)
class Counted:
    """A collator that says how many samples it was given."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


def has_state(one: Any) -> bool:
    """Whether an object gives its state and takes one, as torchdata's StatefulDataLoader does."""
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


class Source(ABC):
    """What gives the whole batches of an epoch, the same on all ranks.

    ``theirs`` is the object of the user; ``state`` that object if it keeps its own position; ``note`` says how it
    resumes, if it is not known to go on where it was at once."""

    theirs: Any
    state: Any = None
    note: str | None = None
    ended = False  # whether the last batch is known to have ended the epoch

    @abstractmethod
    def batches(self, epoch: int, generators: Generators, seed: int, skip: int) -> Iterator[Fields]:
        """Yield the batches of an epoch without its first ``skip`` ones, on generators that are begun here."""

    @property
    def batch_size(self) -> int | None:
        """The number of rows of a batch, where it is known."""
        return None

    @property
    def batches_of_epoch(self) -> int | None:
        """The number of batches in an epoch, where it is known."""
        return None

    @property
    def own_generators(self) -> list[torch.Generator]:
        """The generators of torch that the user has given it, each once."""
        return []

    def set_epoch(self, epoch: int) -> None:
        """Tell all that wants to know the epoch."""
        theirs = self.theirs
        for one in (theirs, *(getattr(theirs, name, None) for name in ("dataset", "sampler", "batch_sampler"))):
            if callable(function := getattr(one, "set_epoch", None)):
                function(epoch)


class Collated(Source):
    """A map-style dataset in the keyed order, whose batches a collator makes of ``rows`` samples."""

    def __init__(self, dataset: Any, rows: int, collate: Collate, whole: tuple[str, ...]) -> None:
        self.theirs, self.rows, self.collate, self.whole = dataset, rows, collate, whole
        self.size = len(dataset)
        if self.size < 1:
            raise ConfigError(f"data: the dataset ({type(dataset).__name__}) is empty; legal: one sample or more")

    @property
    def batch_size(self) -> int | None:
        return self.rows

    @property
    def batches_of_epoch(self) -> int | None:
        return -(-self.size // self.rows)

    def batches(self, epoch: int, generators: Generators, seed: int, skip: int) -> Iterator[Fields]:
        """Yield them; each batch has random numbers of its own, so that none has to be read to skip it."""
        for number in range(skip, -(-self.size // self.rows)):
            first = number * self.rows
            order = sample_order(seed, epoch, first, min(first + self.rows, self.size), self.size)
            generators.begin(seed, epoch, number)
            with generators.used():
                made = self.collate([self.theirs[int(index)] for index in order])
            yield fields_of(made, len(order), self.whole, f"batch {number} of epoch {epoch}")


class Loaded(Source):
    """The batches of a loader that somebody else has made; its sampler, collator and workers are as they were given."""

    def __init__(self, loader: Any, whole: tuple[str, ...]) -> None:
        self.theirs, self.whole = loader, whole
        self.state = loader if has_state(loader) else None
        self.note = f"data: {type(loader).__name__}: {AGAIN if self.state is None else BY_STATE}"
        if isinstance(sampler := getattr(loader, "sampler", None), DistributedSampler) and sampler.num_replicas > 1:
            wrong = f"its sampler is a DistributedSampler of {sampler.num_replicas} ranks"
            raise ConfigError.on("data", wrong, "the sampler of one device, for ranks take their rows of each batch")

    @property
    def batch_size(self) -> int | None:
        found = getattr(self.theirs, "batch_size", None)
        return found if isinstance(found, int) else None

    @property
    def batches_of_epoch(self) -> int | None:
        try:
            return len(self.theirs)
        except TypeError:
            return None

    @property
    def own_generators(self) -> list[torch.Generator]:
        theirs = self.theirs
        owners = [theirs, *(getattr(theirs, name, None) for name in ("sampler", "batch_sampler"))]
        owners.append(getattr(owners[-1], "sampler", None))
        found = {id(one): one for owner in owners if (one := getattr(owner, "generator", None)) is not None}
        return [one for one in found.values() if isinstance(one, torch.Generator)]

    def batches(self, epoch: int, generators: Generators, seed: int, skip: int) -> Iterator[Fields]:
        """Yield them; those that are skipped are read."""
        self.set_epoch(epoch)
        loader, counted = self.theirs, False
        if isinstance(loader, DataLoader) and loader.batch_sampler is not None and self.state is None:
            loader, counted = copy.copy(loader), True
            loader.collate_fn = Counted(loader.collate_fn)
        generators.begin(seed, epoch)
        with generators.used():
            iterator = iter(loader)
        for number, made in enumerate(_drawn(iterator, generators)):
            if number >= skip:
                rows, batch = made if counted else (None, made)
                yield fields_of(batch, rows, self.whole, f"batch {number} of epoch {epoch}")


class Iterated(Source):
    """The samples of an iterable, ``rows`` of them in a batch, which a collator makes, or stacks of their tensors."""

    def __init__(self, samples: Iterable[Any], rows: int, collate: Collate | None, whole: tuple[str, ...]) -> None:
        self.theirs, self.rows, self.collate, self.whole = samples, rows, collate, whole
        self.state = samples if has_state(samples) else None
        self.note = f"data: {type(samples).__name__}: {AGAIN if self.state is None else BY_STATE}"

    @property
    def batch_size(self) -> int | None:
        return self.rows

    def batches(self, epoch: int, generators: Generators, seed: int, skip: int) -> Iterator[Fields]:
        """Yield them; those that are skipped are read."""
        self.set_epoch(epoch)
        generators.begin(seed, epoch)
        with generators.used():
            iterator = iter(self.theirs)
        for _ in islice(_drawn(iterator, generators), skip * self.rows):
            pass
        number = skip
        self.ended = False
        while samples := list(islice(_drawn(iterator, generators), self.rows)):
            self.ended = len(samples) < self.rows
            where = f"batch {number} of epoch {epoch}"
            if self.collate is None:
                yield Samples(samples, where).read(range(len(samples)))
            else:
                with generators.used():
                    made = self.collate(samples)
                yield fields_of(made, len(samples), self.whole, where)
            number += 1


def _drawn(iterator: Iterator[Any], generators: Generators) -> Iterator[Any]:
    """Yield what an iterator gives, which draws from the source's generators."""
    while True:
        with generators.used():
            try:
                found = next(iterator)
            except StopIteration:
                return
        yield found


def is_dataset(data: Any) -> bool:
    """Whether data is a map-style dataset."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping)


def is_loader(data: Any) -> bool:
    """Whether data gives batches: a DataLoader, or what has a dataset and is iterated, as those of other libraries."""
    return isinstance(data, DataLoader) or (
        hasattr(data, "dataset") and hasattr(data, "__iter__") and not isinstance(data, IterableDataset)
    )


def source_of(data: Any, rows: int, collate: Collate | None = None, whole: tuple[str, ...] = ()) -> Source | None:
    """Return what reads whole batches of ``data``; None for a map-style dataset without a collator, of which each rank
    reads its own rows.  Raises :class:`ConfigError` for what is none of these."""
    if isinstance(data, Padded):
        return source_of(data.data, rows, data.padding, whole)
    if is_loader(data):
        if collate is not None:
            raise ConfigError.on("collate_fn", f"given beside {kind_of(data)}", "the collate_fn of the loader")
        return Loaded(data, whole)
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not is_dataset(data)):
        if isinstance(data, Mapping | str | bytes | Tensor | set):
            raise ConfigError.on("data", kind_of(data), LEGAL)
        return Iterated(data, rows, collate, whole)
    return None if collate is None else Collated(data, rows, collate, whole)


def samples_of(data: Any, rows: int) -> int:
    """Return the number of samples in an epoch, in batches of ``rows``; :class:`ConfigError` where it is not known."""
    if (source := source_of(data, rows)) is None:
        return len(data)
    if source.batches_of_epoch is None:
        raise ConfigError.on("train.epochs", f"{kind_of(data)} has no length", "train.steps")
    return source.batches_of_epoch * rows
