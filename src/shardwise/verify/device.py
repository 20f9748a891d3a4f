"""Use one device for a model whose forward, or loss, also holds tensors of the host, or makes some there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.intercept import Proceed
from shardwise.graph.schema import tensors_in


class Together:
    """This layer moves tensors of the host to ``device`` where a call mixes them with tensors that are there.

    ``module.to(device)`` leaves such tensors behind, and a plan takes them along: plain attributes, literals, weights
    of a loss.  What a call writes to stays where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if len({x.device.type for x in tensors_in((args, kwargs))}) > 1:
            kept = 1 if _writes(getattr(func, "__name__", "")) else 0
            args = [*args[:kept], *self._moved(list(args[kept:]))]
            kwargs = {name: value if name == "out" else self._moved(value) for name, value in kwargs.items()}
        return proceed(func, args, kwargs)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.device.type == self.device.type else value.to(self.device)
        if isinstance(value, list):
            return [self._moved(one) for one in value]
        if type(value) is tuple:
            return tuple(self._moved(one) for one in value)
        return value


def _writes(name: str) -> bool:
    """Return whether a function, by its name, writes to its first argument: ``add_``, ``__iadd__``, ``__setitem__``."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
