"""A communicator that sends nothing, for graphs that run where no peer answers."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Silent:
    """A communicator, which is also the handle of its operations; results become ``fill``, or stay as they are."""

    def __init__(self, fill: float | None = None) -> None:
        self.fill = fill

    def all_reduce(self, x: Tensor, *args: Any, out: Tensor, **kwargs: Any) -> Silent:
        return self.all_gather(out)

    def all_gather(self, out: Tensor, *args: Any, **kwargs: Any) -> Silent:
        if self.fill is not None and (out.dtype.is_floating_point or out.dtype.is_complex):
            out.fill_(self.fill)
        return self

    reduce_scatter = all_to_all = shift = all_gather

    def wait(self) -> None:
        """Return at once."""
