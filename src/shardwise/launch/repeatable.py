"""``train.deterministic``: the same bits each time, or an error that names the op that cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.core.errors import ConfigError

REFUSED = re.compile(r"(?:^|: )([^:\n]+) does not have a deterministic implementation")
"""What torch says of an op that gives other bits each time; its name may be several words, such as "median CUDA with
indices output".
"""


@contextmanager
def repeatable(device: torch.device, wanted: bool) -> Iterator[None]:
    """Where it is ``wanted``, ops give the same bits each time; :class:`ConfigError` names one of the model that
    cannot.
    """
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
    """Meanwhile torch computes with kernels that give the same bits each time, and raises where it has none."""
    memory: Any = torch.utils.deterministic
    before, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # It would fill all new memory with NaN: time for nothing, since every element that is read has been written.
    memory.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(
            before, warn_only=warned
        )  # which tells torch.compile too; the debug mode does not
        memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fill, benchmark
