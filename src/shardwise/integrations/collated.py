"""Batches that a collator makes of samples, as in transformers: each rank reads, collates and pads its rows of each
batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardwise.capture import state
from shardwise.core.errors import ConfigError
from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.data.loader import AXES, Batch
from shardwise.runtime.masks import all_ones

Collate = Callable[[list[Any]], Mapping[str, Any]]
Order = Callable[[int], Sequence[int]]
"""An order gives the samples of an epoch, in turn."""

PADS: Mapping[str, float] = {"attention_mask": 0, "decoder_attention_mask": 0, "labels": -100, "token_type_ids": 0}
"""What fields are padded with; :func:`padding` adds those that follow from a tokenizer or a model."""


def padding(tokenizer: Any, config: Any) -> dict[str, float]:
    """Return the value with which each field is padded, as a tokenizer or a model's config has it."""
    pads = dict(PADS)
    tokens = (getattr(one, "pad_token_id", None) for one in (tokenizer, config))
    token = next((one for one in tokens if one is not None), None)
    if token is not None:
        pads |= {"input_ids": token, "decoder_input_ids": token}
        pads["token_type_ids"] = getattr(tokenizer, "pad_token_type_id", 0)
        pads |= {"special_tokens_mask": 1, "position_ids": 0}
    return pads


def fields_of(collated: Any) -> dict[str, Tensor]:
    """Return the fields of a collated batch; raise :class:`ConfigError` unless each is a tensor with as many rows."""
    if not isinstance(collated, Mapping):
        raise ConfigError(f"data_collator: it returned {type(collated).__name__}; legal: a dict of tensors")
    for name, value in collated.items():
        if not isinstance(value, Tensor) or not value.dim():
            what = "a tensor without dims" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise ConfigError(f'data_collator: field "{name}" is {what}; legal: tensors with rows in their first dim')
    if len({value.shape[0] for value in collated.values()}) != 1:
        sizes = {name: value.shape[0] for name, value in collated.items()}
        raise ConfigError(f"data_collator: fields have different numbers of rows: {sizes}; legal: one number")
    return dict(collated)


@dataclass
class Shapes:
    """Every batch gets the shapes of the longest samples, for the model is captured once: rows aside, all batches are
    alike. ``like`` are the fields of the first batch, ``pads`` what each field can be padded with."""

    pads: Mapping[str, float]
    like: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def fit(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the fields, padded at the end of their second dim. Raise :class:`ConfigError` where that does not make
        them like the first batch's."""
        self.like = self.like or {name: tuple(value.shape[1:]) for name, value in fields.items()}
        return {name: self._fitted(name, value) for name, value in fields.items()}

    def _fitted(self, name: str, value: Tensor) -> Tensor:
        expected, shape = self.like.get(name), tuple(value.shape[1:])
        if expected is None or shape == expected:
            return value
        missing = expected[0] - shape[0] if shape and shape[1:] == expected[1:] else -1
        if missing < 0:
            wrong = f'field "{name}" has rows of shape {shape}, those of the first batch had {expected}'
            raise ConfigError.on("batch", wrong, "rows of one shape, such as a collator that pads to a length makes")
        if name not in self.pads:
            wrong = f'field "{name}" has {shape[0]} entries a row, that of the first batch {expected[0]}'
            legal = f"as many in every batch, or one of the fields that are padded: {', '.join(self.pads)}"
            raise ConfigError.on("batch", wrong, legal)
        return F.pad(value, (0, 0) * (len(shape) - 1) + (0, missing), value=self.pads[name])


def longest(dataset: Any) -> list[int]:
    """Return the samples that have the longest value of some field; none where samples are not dicts of lists or
    tensors of one dim with different lengths. It reads all samples once, if the first have lengths at all."""
    first = dataset[0]
    if not isinstance(first, Mapping):
        return []
    names = [name for name, value in first.items() if _length(value) is not None]
    most: dict[str, tuple[int, int]] = {}
    for index in range(len(dataset)) if names else ():
        sample = dataset[index]
        for name in names:
            size = _length(sample[name]) or 0
            if name not in most or size > most[name][0]:
                most[name] = size, index
    return list(dict.fromkeys(index for _, index in most.values()))


def _length(value: Any) -> int | None:
    if isinstance(value, Tensor | np.ndarray):
        return len(value) if value.ndim == 1 else None
    return len(value) if isinstance(value, list | tuple) else None


@contextmanager
def generators_kept() -> Iterator[None]:
    """Let what runs inside draw random numbers that nobody misses: of Python's, numpy's and torch's generators."""
    with state.generators_kept(), torch.random.fork_rng(devices=[]):
        yield


class RankBatches:
    """The batches of an epoch, of which each has this rank's rows: ``rows`` of ``dataset`` at a time in an ``order``.

    Args:
        dataset: map-style, or an iterable one, of which every rank reads all samples and keeps its own.
        collate: makes a dict of tensors of a list of samples.
        order: the samples of an epoch; None for an iterable dataset.
        rows: the rows of a batch, over all ranks and microbatches; the last has those that are left.
        whole: the multiple of rows that an epoch has: 1, or that of a batch where the rest is dropped.
        seed: the seed of what workers draw.
        loading: further arguments of :class:`torch.utils.data.DataLoader`, for the workers that read.
    """

    def __init__(
        self, dataset: Any, collate: Collate, order: Order | None, rows: int, mesh: Mesh, rank: int, microbatches: int,
        shapes: Shapes, *, whole: int = 1, masks: tuple[str, ...] = (), loading: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.dataset, self.collate, self.order, self.rows = dataset, collate, order, rows
        self.microbatches, self.shapes, self.masks, self.loading = microbatches, shapes, masks, dict(loading or {})
        self._seed = seed
        self._parts, self._index = mesh.axis_size(AXES), mesh.index(rank, AXES)
        self._whole, self._epoch, self._skipped = whole, 0, 0
        if order is not None and not self.samples:
            raise ConfigError.on(
                "data", f"an epoch of {len(dataset)} samples has no batch", f"at least {whole} samples"
            )

    @property
    def samples(self) -> int:
        """Return the number of samples in an epoch."""
        return len(self.dataset) // self._whole * self._whole

    def __len__(self) -> int:
        """Return the number of batches in an epoch; TypeError for an iterable dataset."""
        if self.order is None:
            raise TypeError("an iterable dataset has no length")
        return -(-self.samples // self.rows)

    def start(self, epoch: int, skipped: int = 0) -> None:
        """Let the next iteration be that of ``epoch``, without its first ``skipped`` batches."""
        self._epoch, self._skipped = epoch, skipped

    def __iter__(self) -> Iterator[Batch]:
        skipped, self._skipped = self._skipped, 0
        if self.order is None:
            yield from self._streamed(skipped)
            return
        order = self.order(self._epoch)[: self.samples]
        firsts = range(skipped * self.rows, len(order), self.rows)
        chunks = [order[first : first + self.rows] for first in firsts]
        ranges = [self._ranges(len(chunk)) for chunk in chunks]
        own = [[chunk[i] for a, b in one for i in range(a, b)] for chunk, one in zip(chunks, ranges, strict=True)]
        # A rank without rows reads one sample of the batch, whose shapes it needs.
        read = [mine or [chunk[0]] for mine, chunk in zip(own, chunks, strict=True)]
        own_seeds = torch.Generator().manual_seed(self._seed + self._epoch)  # of the workers; no one else's numbers
        loader = DataLoader(
            self.dataset, batch_sampler=read, collate_fn=self.collate, generator=own_seeds, **self.loading
        )
        for collated, mine, chunk, one in zip(loader, own, chunks, ranges, strict=True):
            yield self._batch(collated, len(mine), len(chunk), one)

    def _streamed(self, skipped: int) -> Iterator[Batch]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self._epoch)
        samples = iter(self.dataset)
        next(islice(samples, skipped * self.rows, skipped * self.rows), None)
        while chunk := list(islice(samples, self.rows)):
            if self._whole > 1:
                chunk = chunk[: len(chunk) // self._whole * self._whole]
            if not chunk:
                return
            ranges = self._ranges(len(chunk))
            mine = [chunk[i] for a, b in ranges for i in range(a, b)]
            yield self._batch(self.collate(mine or chunk[:1]), len(mine), len(chunk), ranges)

    def _ranges(self, rows: int) -> tuple[tuple[int, int], ...]:
        return rank_rows(rows, self.microbatches, self._parts, self._index)

    def _batch(self, collated: Any, own: int, rows: int, ranges: Sequence[tuple[int, int]]) -> Batch:
        fields = {name: value[:own] for name, value in self.shapes.fit(fields_of(collated)).items()}
        ones = all_ones(fields, self.masks) if self.masks else None
        return Batch(fields, rows, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges), ones)

    def rows_of(self, rows: int) -> list[list[int]]:
        """Return, for each part over the batch axes, which of the rows of a batch it has, in its order."""
        parts = [rank_rows(rows, self.microbatches, self._parts, part) for part in range(self._parts)]
        return [list(chain.from_iterable(range(a, b) for a, b in one)) for one in parts]


def first_batch(
    dataset: Any, collate: Collate, rows: int, shapes: Shapes, more: Iterable[int] = ()
) -> dict[str, Tensor]:
    """Return the fields of an example of at most ``rows`` rows, among them the samples ``more``; it sets ``shapes``."""
    with generators_kept():
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            samples = list(islice(iter(dataset), rows))
        else:
            chosen = list(dict.fromkeys([*more, *range(min(rows, len(dataset)))]))
            samples = [dataset[index] for index in chosen[: max(rows, len(list(more)))]]
        if not samples:
            raise ConfigError.on("data", "the dataset is empty", "one sample or more")
        return shapes.fit(fields_of(collate(samples)))
