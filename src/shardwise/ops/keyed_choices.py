"""Permutations and weighted choices that are functions of their position, as the numbers of ``keyed_random.py`` are."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.errors import ShardwiseError
from shardwise.ops.keyed_random import Batch, Rows, keyed_exponential, keyed_uniform, keyed_uniform_bits


def keyed_permutation(
    seed: int, step: int, ordinal: int, n: int, row_start: int = 0, device: torch.device | str = "cpu", kind: str = "",
    dtype: torch.dtype = torch.int64,
) -> Tensor:  # fmt: skip
    """Return a permutation of 0 to n - 1: the order of as many random words."""
    words = keyed_uniform_bits(seed, step, ordinal, row_start, 1, n, device, kind)
    return words[0].argsort(stable=True).to(dtype)


def keyed_multinomial(
    weights: Tensor, number: int, replacement: bool, seed: int, step: int, ordinal: int, batch: Batch | None = None,
    row_start: Rows = 0, kind: str = "", columns: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``number`` places in the last dim of ``weights``, drawn with chances in their proportion.

    Without ``replacement`` they are those of the largest quotients of weights and exponential numbers, which are the
    first of Poisson processes with such rates; with it, those where a sum of weights exceeds a uniform number.
    Raises :class:`ShardwiseError` where torch would refuse the weights or the number."""
    shape, device = weights.shape, weights.device
    if not 1 <= weights.dim() <= 2 or number < 1 or shape[-1] < (1 if replacement else number):
        raise ShardwiseError(
            f"torch.multinomial of {number} samples from weights of shape {tuple(shape)}"
            f"{' with' if replacement else ' without'} replacement; legal: one or two dims, and at least one sample, "
            "without replacement at most as many as weights"
        )
    wide = weights.to(Backend.of(device).widest_float)
    _check_weights(weights)
    if not replacement:
        waits = keyed_exponential(seed, step, ordinal, shape, batch, row_start, device, kind, columns, wide.dtype)
        return (wide / waits).topk(number, -1).indices
    places = (*shape[:-1], number)
    uniform = keyed_uniform(seed, step, ordinal, places, batch, row_start, device, kind, columns, wide.dtype)
    sums = wide.cumsum(-1)
    total = sums[..., -1:]
    return torch.searchsorted(sums, (uniform * total).minimum(total.nextafter(torch.zeros_like(total))), right=True)


def _check_weights(weights: Tensor) -> None:
    """Raise :class:`ShardwiseError` unless weights are finite and not negative, and one of each row is above 0; those
    on an accelerator are not read."""
    if weights.device.type != "cpu" or not weights.numel():
        return
    if not (weights.isfinite().all() and (weights >= 0).all() and (weights > 0).any(-1).all()):
        raise ShardwiseError(
            "torch.multinomial of weights that are negative or not finite, or all 0; legal: weights of at least 0, and "
            "one above 0 in each row"
        )
