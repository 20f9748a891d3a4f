"""Whether the host waits for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """What makes the host wait for the device is an error meanwhile, where torch can tell: on CUDA and ROCm.

    On a device without hardware every case is found (``card.py``).
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
