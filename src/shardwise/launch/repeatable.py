"""``train.deterministic`` gives the same bits each time, or an error that names an op that cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.core.errors import ConfigError

REFUSED = re.compile(r"(?:^|: )([^:\n]+) does not have a deterministic implementation")
"""This matches torch's error for an op that gives other bits each time; the op's name may be several words, such as
"median CUDA with indices output"."""


@contextmanager
def repeatable(device: torch.device, wanted: bool) -> Iterator[None]:
    """If ``wanted``, let ops give the same bits each time; raise :class:`ConfigError` naming an op that cannot."""
    if not wanted:
        yield
        return
    try:
        with same_bits():
            yield
    except RuntimeError as error:
        found = REFUSED.search(str(error))
        if found is None:
            raise
        op = f"{found[1]}, an op of the model, gives other bits each time on devices of type {device.type}"
        wrong = f"{op}, and torch has no other kernel for it"
        raise ConfigError.on("train.deterministic", wrong, "false, or a model without it") from error


@contextmanager
def same_bits() -> Iterator[None]:
    """Let torch compute only with kernels that give the same bits each time; it raises where it has none."""
    memory: Any = torch.utils.deterministic
    before, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # Filling new memory with NaN would take time for nothing: every element that is read has been written.
    memory.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        # Unlike torch.set_deterministic_debug_mode, this also tells torch.compile.
        torch.use_deterministic_algorithms(before, warn_only=warned)
        memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fill, benchmark
