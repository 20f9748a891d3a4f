"""A map-style dataset is split into the samples to train on and those to evaluate on, by a keyed permutation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError

from .order import sample_order
from .samples import Samples

KEY = 2**63 - 1  # the "epoch" of the permutation that splits: no run gets to it


class Part:
    """The samples of a dataset at places ``start`` to ``stop`` of the permutation that splits it, in that order.

    The permutation depends on the number of samples alone, so a sample is on the same side in every run.
    """

    def __init__(self, dataset: Any, start: int, stop: int) -> None:
        self.dataset, self.start, self.stop = dataset, start, stop
        self.size = len(dataset)
        self.digest = f"{Samples(dataset).digest}/{start}-{stop}"
        if hasattr(dataset, "read_rows"):
            self.read_rows = self._read_rows

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.dataset[int(self.places([index])[0])]

    def places(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places in the dataset of samples of this part."""
        found = [sample_order(0, KEY, self.start + int(i), self.start + int(i) + 1, self.size) for i in indices]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _read_rows(self, indices: Sequence[int] | NDArray[np.int64]) -> Any:
        return self.dataset.read_rows(self.places(indices))


def split(dataset: Any, share: float) -> tuple[Part, Part]:
    """Return the samples to train on and those to evaluate on, of which there are ``share`` of the dataset's, rounded.

    Raises :class:`ConfigError` where one side would have none."""
    size = len(dataset)
    apart = round(share * size)
    if not 0 < apart < size:
        what = "to train on" if apart else "to evaluate on"
        legal = f"from {1 / size:.2g} to {1 - 1 / size:.2g}, for one sample or more on each side" if size > 1 else "0"
        raise ConfigError(f"validation.share = {share:g}: of {size} samples it leaves none {what}; legal: {legal}")
    return Part(dataset, apart, size), Part(dataset, 0, apart)
