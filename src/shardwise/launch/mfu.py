"""Compute the model FLOPs utilisation (MFU) of a run: the share of its devices' peak that it uses for the model.

Chowdhery et al. (PaLM, 2022, appendix B) define MFU as the FLOPs that forward and backward need, divided by the FLOPs
that the devices could do in the time of a step.  Recomputation does not count, and causal attention counts in full.
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
    """Return the dense peak of ``device`` for matrix products in ``precision`` (as in a plan), in FLOP/s, or None.

    For "fp32" it is the peak of TF32 if torch is now set to use TF32 for products of float32 matrices.  It is None if
    unknown, as for CPUs, whose peak depends on the clock under load, the vector units and the other cores.
    """
    check_choice("precision", precision, CHOICES["precision"])
    backend = Backend.of(device)
    return named_peak(backend.name(device), precision, tf32=backend.tf32) if backend.asynchronous else None


def named_peak(name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Return :func:`peak_flops` for the device that its driver calls ``name``."""
    model = model_of(name)
    return None if model is None else model.peak.flops(precision, tf32=tf32)


def model_flops(trace: Trace, rows: int, microbatches: int = 1) -> float | None:
    """Return the FLOPs of forward and backward on all ranks for a batch of ``rows`` rows in ``microbatches`` parts.

    The result is None for a model that was not captured.  Matrix products, convolutions and attention count, with 2
    FLOPs for each multiply-add; a product's backward counts as at most two products of its size, since kernels that
    compute more recompute the scores of attention.  ``trace`` must be of the whole model: with tensor parallelism,
    where several ranks may compute the same, :class:`ConfigError` is raised.
    """
    check_count("rows", rows)
    check_count("microbatches", microbatches)
    if trace.tensor:
        raise ConfigError(f"mfu: the trace is of one rank of {trace.tensor}; legal: one of the whole model")
    if trace.opaque is not None:
        return None
    sizes = Counter(shard_sizes(rows, microbatches))
    # The costs are those of a CPU: on a GPU they include padding of heads, which the model does not need.
    return float(sum(times * _useful(trace, size) for size, times in sizes.items() if size))


def _useful(trace: Trace, rows: int) -> int:
    return sum(one.forward_flops + min(one.backward_flops, 2 * one.forward_flops) for one in cost(trace, rows))


def mfu(flops_per_step: float, seconds: float, ranks: int, peak: float) -> float:
    """Return the MFU, from 0 to 1, of a step that takes ``seconds`` on ``ranks`` devices of ``peak`` FLOP/s each."""
    if not (seconds > 0 and peak > 0 and ranks > 0):
        raise ConfigError(
            f"mfu: {seconds} s on {ranks} ranks of {peak} FLOP/s is not legal; legal: more than 0 of each"
        )
    return flops_per_step / (seconds * ranks * peak)
