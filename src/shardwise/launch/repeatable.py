"""``train.deterministic``: the same bits each time, or an error that names the op that cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.backend import Backend
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
        with Backend.of(device).repeatable():
            yield
    except RuntimeError as error:
        found = REFUSED.search(str(error))
        if found is None:
            raise
        op = f"{found[1]}, an op of the model, gives other bits each time on devices of type {device.type}"
        wrong = f"{op}, and torch has no other kernel for it"
        raise ConfigError.on("train.deterministic", wrong, "false, or a model without it") from error
