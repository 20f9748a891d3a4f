"""This module computes the order of samples, a keyed permutation, where it is needed; it is never stored.

Sample ``index`` of an epoch is the image of ``index`` under a permutation of 0 … size-1 that depends on (seed, epoch)
alone. It is a Feistel network over the next power of four, walked along its cycle until it falls inside the range
(Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). So any rank finds any sample of any epoch by itself,
and a run that starts again in the middle needs only two numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6


def sample_order(seed: int, epoch: int, start: int, stop: int, size: int) -> NDArray[np.int64]:
    """Return the samples at places start … stop-1 of an epoch of ``size`` samples: int64, shape (stop - start,)."""
    if not 0 <= start <= stop <= size:
        raise ValueError(f"places {start} to {stop} are not inside an epoch of {size} samples")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = np.arange(start, stop, dtype=np.uint64)
    # Every walk ends, because a cycle that starts inside the range comes back to it, at the latest at its start.
    values = _feistel(values, half, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply a bijection of the integers of 2 x ``half`` bits."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << bits) | right


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return one key per round; every bit of seed and epoch reaches every key."""
    word = (1 << 64) - 1
    state = _mix(np.array([seed & word], dtype=np.uint64)) ^ np.uint64(epoch & word)
    golden = np.uint64(0x9E3779B97F4A7C15)  # the step of splitmix64: 2^64 / golden ratio
    return _mix(_mix(state) + golden * np.arange(1, ROUNDS + 1, dtype=np.uint64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Take one step of splitmix64 (Steele, Lea and Flood, 2014) from state ``x``; arithmetic is mod 2^64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
