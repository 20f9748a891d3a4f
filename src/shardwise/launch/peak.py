"""Model FLOPs utilisation: what share of its devices' peak a run computes the model with.

MFU as Chowdhery et al. define it (PaLM, 2022, appendix B): the FLOPs that forward and backward need, over what the devices could
do in the time of a step.  Recomputation does not count, and causal attention counts in full.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError, check_choice, check_count
from shardwise.core.layout import shard_range
from shardwise.core.plan import CHOICES
from shardwise.trace.cost import cost
from shardwise.trace.trace import Trace


class Peak(NamedTuple):
    """Dense peaks in TFLOP/s, without structured sparsity; None where the device has no such units or no figure is published."""

    fp64: float | None  # of the tensor cores where they have it
    fp32: float
    tf32: float | None
    bf16: float | None  # accumulated in fp32, as torch does
    fp16: float | None = None  # the same; that of bf16 where it is None


# Datasheets and architecture whitepapers of NVIDIA (V100, A100, GA102, Ada, H100, H200 NVL, RTX Blackwell, HGX B200 and B300).
_HOPPER, _NVL, _A100 = Peak(67.0, 67.0, 494.5, 989.0), Peak(60.0, 60.0, 417.5, 835.5), Peak(19.5, 19.5, 156.0, 312.0)

# A whole name as CUDA gives it, without its maker's.  Slices of a device ("... MIG 1g.10gb"), laptop versions and other sizes,
# which have fewer or slower units, match nothing.
PEAKS: Mapping[str, Peak] = MappingProxyType(
    {
        r"GB300": Peak(None, 80.0, 1250.0, 2500.0),
        r"GB200": Peak(40.0, 80.0, 1250.0, 2500.0),
        r"B300( SXM6( AC)?)?": Peak(1.25, 75.0, 1125.0, 2250.0),
        r"B200": Peak(37.0, 75.0, 1125.0, 2250.0),
        r"GH200 (120GB|480GB|144G HBM3e)": _HOPPER,
        r"H200 NVL": _NVL,
        r"H200": _HOPPER,
        r"H100 NVL": _NVL,
        r"H100 PCIe": Peak(51.0, 51.0, 378.0, 756.0),
        r"H100 80GB HBM3": _HOPPER,
        r"A100-(SXM4|PCIE|PCIe)-[48]0GB|A100 80GB PCIe": _A100,
        r"A800-SXM4-[48]0GB|A800 80GB PCIe": _A100,
        r"A30": Peak(10.3, 10.3, 82.0, 165.0),
        r"A40": Peak(None, 37.4, 74.8, 149.7),
        r"A10": Peak(None, 31.2, 62.5, 125.0),
        r"RTX A6000": Peak(None, 38.7, 77.4, 154.8),
        r"L4": Peak(None, 30.3, 60.0, 121.0),
        r"L40": Peak(None, 90.5, 90.5, 181.0),
        r"L40S": Peak(None, 91.6, 183.0, 362.0),
        r"RTX 6000 Ada Generation": Peak(None, 91.1, 182.1, 364.2),
        r"V100-SXM[23]-(16|32)GB(-LS)?": Peak(7.8, 15.7, None, None, 125.0),
        r"V100-PCIE-(16|32)GB": Peak(7.0, 14.0, None, None, 112.0),
        r"V100S-PCIE-32GB": Peak(8.2, 16.4, None, None, 130.0),
        r"T4": Peak(None, 8.1, None, None, 65.0),
        r"GeForce RTX 3090": Peak(0.556, 35.6, 35.6, 71.0),
        r"GeForce RTX 3090 Ti": Peak(0.625, 40.0, 40.0, 80.0),
        r"GeForce RTX 4080": Peak(0.761, 48.7, 48.7, 97.5),
        r"GeForce RTX 4090": Peak(1.29, 82.6, 82.6, 165.2),
        r"GeForce RTX 5080": Peak(0.879, 56.3, 56.3, 112.6),
        r"GeForce RTX 5090": Peak(1.64, 104.8, 104.8, 209.5),
    }
)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The dense peak of ``device`` for matrix products in ``precision`` (as in a plan), in FLOP/s; None if unknown.

    "fp32" is the peak of TF32 where torch may use it for the products of float32 matrices, as it is set now.  CPUs have none: what
    a core can do depends on its clock under load, on its vector units and on its neighbours.
    """
    check_choice("precision", precision, CHOICES["precision"])
    backend = Backend.of(device)
    return named_peak(backend.name(device), precision, tf32=backend.tf32) if backend.asynchronous else None


def named_peak(name: str, precision: str, *, tf32: bool = False) -> float | None:
    """:func:`peak_flops` of the device that CUDA calls ``name``."""
    short = re.sub(r"^(NVIDIA |Tesla )*", "", name.strip())
    found = next((peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, short)), None)
    if found is None:
        return None
    fp32 = found.tf32 if tf32 and found.tf32 is not None else found.fp32
    fp16 = found.bf16 if found.fp16 is None else found.fp16
    tera = {"fp32": fp32, "bf16": found.bf16, "fp16": fp16, "fp64": found.fp64}[precision]
    return None if tera is None else tera * 1e12


def model_flops(trace: Trace, rows: int, microbatches: int = 1) -> float | None:
    """FLOPs of forward and backward of a whole batch of ``rows`` rows in ``microbatches``, on all ranks together.

    The ``trace`` is of the whole model, for no axis of tensor parallelism, on which ranks may compute the same.  None for a model that was not captured.  Matrix products, convolutions and attention count, 2 FLOPs a multiply-add; a product's
    backward is at most two products of its size, for what kernels compute beyond that is the scores of attention once more.
    """
    check_count("rows", rows)
    check_count("microbatches", microbatches)
    if trace.tensor:
        raise ConfigError(f"mfu: the trace is of one rank of {trace.tensor}; legal: one of the whole model")
    if trace.opaque is not None:
        return None
    bounds = (shard_range(rows, microbatches, index) for index in range(microbatches))
    sizes = Counter(stop - start for start, stop in bounds)
    # What a kernel is chosen for on a GPU (heads padded to multiples of 8) is no work of the model's, so "cpu" everywhere.
    return float(sum(times * _useful(trace, size) for size, times in sizes.items() if size))


def _useful(trace: Trace, rows: int) -> int:
    return sum(one.forward_flops + min(one.backward_flops, 2 * one.forward_flops) for one in cost(trace, rows))


def mfu(flops_per_step: float, seconds: float, ranks: int, peak: float) -> float:
    """The share, from 0 to 1, of what ``ranks`` devices of ``peak`` FLOP/s each could do in the ``seconds`` of a step."""
    if not (seconds > 0 and peak > 0 and ranks > 0):
        raise ConfigError(f"mfu: {seconds} s on {ranks} ranks of {peak} FLOP/s is not legal; legal: more than 0 of each")
    return flops_per_step / (seconds * ranks * peak)
