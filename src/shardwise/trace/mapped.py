"""Memory that lives for the whole run, or that nobody ever writes, beside the allocator's heap.

Between two steps the heap gives nothing back to the system (that would cost page faults in every step), so what lies in it decides
what else can: the hole that a model leaves once its values have been taken shall be there for what comes and goes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 1 << 18
"""Bytes: smaller tensors lie in the heap, where they do not take whole pages."""


def mapped(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of the CPU in a mapping of their own, whose pages are taken when they are touched and given back when the tensor ends."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST:
        return torch.zeros(tuple(shape), dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype)
    return torch.ops.aten.lift_fresh(memory).view(tuple(shape))  # type: ignore[no-any-return]
