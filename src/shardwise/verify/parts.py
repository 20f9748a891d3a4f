"""BatchNorm on one device whose batch is in several parts: the statistics of each part are its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.capture.intercept import Proceed
from shardwise.core.layout import shard_sizes


class BatchNormInParts:
    """This layer lets each BatchNorm that trains see the rows of a batch in parts, one after the other.

    Everything else sees the whole batch.  A BatchNorm whose dim 0 is no multiple of the rows sees the whole, too."""

    def __init__(self) -> None:
        self.parts, self.rows = 1, 0
        self._signature = inspect.signature(F.batch_norm)

    def begin(self, rows: int, parts: int) -> None:
        """Begin a forward of a batch of ``rows`` rows in ``parts`` parts."""
        self.rows, self.parts = rows, parts

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
        for piece in x.split([each * n for n in shard_sizes(self.rows, self.parts) if n]):
            bound.arguments["input"] = piece
            found.append(proceed(func, bound.args, bound.kwargs))
        return torch.cat(found)
