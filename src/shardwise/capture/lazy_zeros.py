"""Make tensors that nobody ever writes, with memory outside the allocator's heap.

Between two steps the heap gives nothing back to the system (that would cost page faults in every step).  Memory in it
that was never touched leaves a hole, and what is put there takes new pages, beside those of the holes that a model's
values have left.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 1 << 18
"""Tensors of fewer bytes than this lie in the heap, where they do not take whole pages."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU in a mapping of their own: pages are taken when touched and freed with the tensor."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST:
        return torch.zeros(tuple(shape), dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype).view(tuple(shape))
