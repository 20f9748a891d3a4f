"""Devices that memory is predicted for: those with a name, and the one at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import psutil
import torch

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError, did_you_mean

GIB = 2**30
GPU_MARGIN = 0.05
"""What a rank leaves of a GPU's memory: to CUDA's own context and kernels, and to the allocator's fragmentation."""


@dataclass(frozen=True)
class Device:
    """``kind`` is "gpu" or "cpu"; ``memory`` the bytes that there are for all ranks on it, ``budget`` what one may use of them."""

    name: str
    kind: str
    memory: int
    budget: int


# GiB that CUDA gives as a device's total, the least of what is reported of its kinds: some percent less than its name says.
NAMED: Mapping[str, float] = MappingProxyType(
    {
        "V100-16GB": 15.77, "V100-32GB": 31.73, "T4": 14.56, "A10": 21.98, "L4": 21.95, "RTX3090": 23.67, "RTX4090": 23.63,
        "L40S": 44.39, "A100-40GB": 39.38, "A100-80GB": 79.10, "H100-80GB": 79.10, "H200": 139.72, "B200": 178.35,
    }
)  # fmt: skip


def named(name: str) -> Device:
    """The device that ``name`` says: one of :data:`NAMED`, ``cpu`` (this machine's, for one rank), or either with ``=GiB`` of memory."""
    plain, equals, amount = name.partition("=")
    known = {one.lower(): one for one in (*NAMED, "cpu")}
    found = known.get(plain.lower())
    if found is None:
        raise ConfigError(
            f"--device {name}: legal: {', '.join(known.values())}, or such as cpu=64 (GiB).{did_you_mean(plain, known.values())}"
        )
    if equals:
        try:
            memory = round(float(amount) * GIB)
        except (ValueError, OverflowError):
            memory = 0
        if memory <= 0:
            raise ConfigError(f"--device {name}: legal: a number of GiB above 0 after the =, such as {found}=64")
        return Device(found, "cpu", memory, memory) if found == "cpu" else _gpu(found, memory)
    return _cpu(1) if found == "cpu" else _gpu(found, round(NAMED[found] * GIB))


def here(device: torch.device | None = None, ranks: int = 1) -> Device:
    """The device of this machine that a rank trains on, by default its GPU if it has one; ``ranks`` share the memory of its CPUs."""
    device = device or Backend.here().device()
    backend = Backend.of(device)
    if backend.asynchronous:
        return _gpu(backend.name(device), backend.free_and_total(device)[1])
    return _cpu(ranks)


def _gpu(name: str, memory: int) -> Device:
    return Device(name, "gpu", memory, int(memory * (1 - GPU_MARGIN)))


def _cpu(ranks: int) -> Device:
    """What is free now counts, not what there is: other processes are there too."""
    memory = int(psutil.virtual_memory().available)
    return Device("cpu", "cpu", memory, memory // ranks)
