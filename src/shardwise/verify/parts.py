"""BatchNorm on one device whose batch is in several parts: the statistics of each part are its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.capture.intercept import Proceed
from shardwise.core.layout import shard_sizes

_Seen = tuple[float, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A momentum, the running mean and variance that it updates, and those of the rows that were seen."""


class BatchNormInParts:
    """This layer lets each BatchNorm that trains see the rows of a batch in parts, one after the other.

    Running statistics are updated at the end, by part and then by call, as microbatches one after the other do.
    Everything else sees the whole batch.  A BatchNorm whose dim 0 is no multiple of the rows sees the whole, too."""

    def __init__(self) -> None:
        self.parts, self.rows = 1, 0
        self._signature = inspect.signature(F.batch_norm)

    def begin(self, rows: int, parts: int) -> None:
        """Begin a forward of a batch of ``rows`` rows in ``parts`` parts."""
        self.rows, self.parts = rows, parts
        self._seen: list[list[_Seen]] = [[] for _ in range(parts)]

    @torch.no_grad()
    def end(self) -> None:
        """Update the running statistics of what a forward has seen."""
        for momentum, running, own in (one for part in self._seen for one in part):
            for old, new in zip(running, own, strict=True):
                old.lerp_(new, momentum)

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func is not F.batch_norm or self.parts == 1:
            return proceed(func, args, kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        x = bound.arguments["input"]
        if not bound.arguments["training"] or x.shape[0] % self.rows:
            return proceed(func, args, kwargs)
        each = x.shape[0] // self.rows
        found = []
        running = bound.arguments["running_mean"], bound.arguments["running_var"]
        momentum = bound.arguments["momentum"]
        for part, piece in enumerate(x.split([each * n for n in shard_sizes(self.rows, self.parts) if n])):
            bound.arguments["input"] = piece
            if isinstance(running[0], torch.Tensor):
                own = torch.zeros_like(running[0]), torch.zeros_like(running[1])
                self._seen[part].append((momentum, running, own))
                bound.arguments |= {"running_mean": own[0], "running_var": own[1], "momentum": 1.0}
            found.append(proceed(func, bound.args, bound.kwargs))
        return torch.cat(found)
