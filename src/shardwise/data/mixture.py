"""This module makes one dataset of several: one after the other, or mixed by weight into an endless stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.core.errors import ConfigError

from .order import sample_order

Places = NDArray[np.int64]
BITS = 30  # the number of bits of the share of one side of a split


class Joined:
    """This joins datasets that have ``read_rows`` and the same fields, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.sizes = [len(part) for part in self.parts]
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.digest = hashlib.sha256("\0".join(part.digest for part in self.parts).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return {name: value[0] for name, value in self.read_rows(np.array([index])).items()}

    def read_rows(self, indices: Sequence[int] | Places) -> dict[str, Tensor]:
        """Return the samples at ``indices`` as fields of shape (rows, *shape)."""
        places = np.asarray(indices, dtype=np.int64)
        owner = np.searchsorted(self.offsets, places, side="right") - 1
        rows: dict[str, Tensor] = {}
        for part in np.unique(owner):
            at = np.flatnonzero(owner == part)
            found = self.parts[part].read_rows(places[at] - self.offsets[part])
            if len(at) == len(places):
                return found  # type: ignore[no-any-return]
            for name, value in found.items():
                if name not in rows:
                    rows[name] = value.new_empty((len(places), *value.shape[1:]))
                rows[name][torch.from_numpy(at)] = value
        return rows or self.parts[0].read_rows(places)


class Mixture(Joined):
    """A mixture draws from datasets in proportion to ``weights``, each in a shuffled order of its own, without end.

    An epoch of a mixture has as many draws as there are samples; a small dataset of great weight comes more than once
    in it, each time in another order. Draw k of a dataset is place k mod size of its own epoch k // size. Up to any
    draw, each of n datasets has had its share of all draws to within ceil(log2 n) / 2.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        super().__init__(parts)
        if len(weights) != len(self.parts) or not all(weight > 0 for weight in weights):
            raise ConfigError(f"data.mix: weights {list(weights)}; legal: a number above 0 for each source")
        self.weights = tuple(float(weight) for weight in weights)
        self.digest = hashlib.sha256(f"{self.digest}\0{self.weights}".encode()).hexdigest()

    def order_rows(self, seed: int, epoch: int, start: int, stop: int) -> Places:
        """Return the samples at places start … stop-1 of an epoch, shape (stop - start,), from these numbers alone."""
        places = np.arange(start, stop, dtype=np.int64) + epoch * len(self)
        sources, draws = allocate(places, self.weights)
        order = np.empty_like(places)
        for source in np.unique(sources):
            at = np.flatnonzero(sources == source)
            order[at] = self.offsets[source] + self._draw(seed, int(source), draws[at])
        return order

    def _draw(self, seed: int, source: int, draws: Places) -> Places:
        """Return the samples of one dataset at some of its draws, which are consecutive."""
        size, key = self.sizes[source], int.from_bytes(hashlib.sha256(f"{seed}/{source}".encode()).digest()[:7], "big")
        found = []
        first, last = (int(draws[0]), int(draws[-1]) + 1) if len(draws) else (0, 0)
        while first < last:
            epoch, place = divmod(first, size)
            stop = min(size, place + last - first)
            found.append(sample_order(key, epoch, place, stop, size))
            first += stop - place
        return np.concatenate(found)


def allocate(places: Places, weights: Sequence[float]) -> tuple[Places, Places]:
    """Return, for each place of an endless stream, its source and the number of earlier draws from that source; both
    have the shape of ``places``.

    The sources are the leaves of a tree. A node that has had g draws has sent round(g x share) of them to its left
    child, where share is the left child's part of the weight. This is a closed form, so a place takes O(log n) work for
    n sources. The rounding at a node adds at most one half to the error of the node's own count.
    """
    if len(weights) == 1:
        return np.zeros_like(places), places
    middle = len(weights) // 2
    share = min((1 << BITS) - 1, max(1, round(sum(weights[:middle]) / sum(weights) * (1 << BITS))))
    before, after = _left(places, share), _left(places + 1, share)
    left = after > before
    sources, draws = np.empty_like(places), np.empty_like(places)
    sources[left], draws[left] = allocate(before[left], weights[:middle])
    right, drawn = allocate((places - before)[~left], weights[middle:])
    sources[~left], draws[~left] = right + middle, drawn
    return sources, draws


def _left(count: Places, share: int) -> Places:
    """Return round(count x share / 2^BITS), halves rounded up, without a product that does not fit 63 bits."""
    high, low = count >> BITS, count & ((1 << BITS) - 1)
    return high * share + ((low * share + (1 << (BITS - 1))) >> BITS)
