"""The random generators of Python, numpy and torch while a source of data is read: those of the source, for each epoch
made from a seed, so that all ranks read the same and nobody else's random numbers change."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the one that datasets use


def _set(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


class Generators:
    """The generators of a source.  Only what runs inside :meth:`used` draws from them."""

    def __init__(self) -> None:
        self.states: tuple[Any, Any, torch.Tensor] | None = None
        self.resumed: tuple[Any, Any, torch.Tensor] | None = None  # what the next beginning goes on from

    def begin(self, *key: int) -> None:
        """Seed them by a key, such as (seed, epoch), or let them go on where they were."""
        if self.resumed is not None:
            self.states, self.resumed = self.resumed, None
            return
        word = int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:7], "big")
        before = _states()
        random.seed(word)
        np.random.seed(word % (1 << 32))  # noqa: NPY002
        torch.default_generator.manual_seed(word)
        self.states = _states()
        _set(before)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let them be the process's own meanwhile."""
        assert self.states is not None
        before = _states()
        _set(self.states)
        try:
            yield
        finally:
            self.states = _states()
            _set(before)
