"""Model FLOPs utilisation: what share of its devices' peak a run computes the model with.

MFU as Chowdhery et al. define it (PaLM, 2022, appendix B): the FLOPs that forward and backward need, over what the
devices could do in the time of a step.  Recomputation does not count, and causal attention counts in full.
"""

from __future__ import annotations

from collections import Counter

import torch

from shardwise.backend import Backend
from shardwise.core.devices import model_of
from shardwise.core.errors import ConfigError, check_choice, check_count
from shardwise.core.layout import shard_sizes
from shardwise.core.plan import CHOICES
from shardwise.measure.unit_cost import cost
from shardwise.units.trace import Trace


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The dense peak of ``device`` for matrix products in ``precision`` (as in a plan), in FLOP/s; None if unknown.

    "fp32" is the peak of TF32 where torch may use it for the products of float32 matrices, as it is set now.  CPUs have
    none: what a core can do depends on its clock under load, on its vector units and on its neighbours.
    """
    check_choice("precision", precision, CHOICES["precision"])
    backend = Backend.of(device)
    return named_peak(backend.name(device), precision, tf32=backend.tf32) if backend.asynchronous else None


def named_peak(name: str, precision: str, *, tf32: bool = False) -> float | None:
    """:func:`peak_flops` of the device that its driver calls ``name``."""
    model = model_of(name)
    return None if model is None else model.peak.flops(precision, tf32=tf32)


def model_flops(trace: Trace, rows: int, microbatches: int = 1) -> float | None:
    """FLOPs of forward and backward of a whole batch of ``rows`` rows in ``microbatches``, on all ranks together.

    The ``trace`` is of the whole model, for no axis of tensor parallelism, on which ranks may compute the same.  None
    for a model that was not captured.  Matrix products, convolutions and attention count, 2 FLOPs a multiply-add; a
    product's backward is at most two products of its size, for what kernels compute beyond that is the scores of
    attention once more.
    """
    check_count("rows", rows)
    check_count("microbatches", microbatches)
    if trace.tensor:
        raise ConfigError(f"mfu: the trace is of one rank of {trace.tensor}; legal: one of the whole model")
    if trace.opaque is not None:
        return None
    sizes = Counter(shard_sizes(rows, microbatches))
    # What a kernel is chosen for on a GPU (heads padded to multiples of 8) is no work of the model's, so "cpu"
    # everywhere.
    return float(sum(times * _useful(trace, size) for size, times in sizes.items() if size))


def _useful(trace: Trace, rows: int) -> int:
    return sum(one.forward_flops + min(one.backward_flops, 2 * one.forward_flops) for one in cost(trace, rows))


def mfu(flops_per_step: float, seconds: float, ranks: int, peak: float) -> float:
    """The share, from 0 to 1, of what ``ranks`` devices of ``peak`` FLOP/s each could do in a step's ``seconds``."""
    if not (seconds > 0 and peak > 0 and ranks > 0):
        raise ConfigError(
            f"mfu: {seconds} s on {ranks} ranks of {peak} FLOP/s is not legal; legal: more than 0 of each"
        )
    return flops_per_step / (seconds * ranks * peak)
