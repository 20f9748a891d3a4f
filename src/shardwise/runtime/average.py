"""The moving average of the weights that a rank updates, which lies where they lie and is sharded as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.averaging import Averages, Averaging

CHUNK = 1 << 22  # elements of what is exchanged at a time


class Average:
    """The ``average`` of the masters ``master`` of a bucket, 1-d, and the ``count`` of steps that it has, 0-d."""

    def __init__(self, master: Tensor, choice: Averaging) -> None:
        assert choice.ema is not None
        self.master, self._decay, self._warmup = master, choice.ema, choice.ema_warmup
        self.average = master.detach().clone()
        self.count = torch.zeros((), dtype=torch.float32, device=master.device)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew where the masters are now."""
        self.average.copy_(self.master)
        self.count.zero_()

    @torch.no_grad()
    def follow(self) -> None:
        """Take the masters, which have been set, for the average unless it has steps already."""
        torch.where(self.count == 0, self.master, self.average, out=self.average)

    @torch.no_grad()
    def update(self, kind: Averages, skip: Tensor) -> None:
        """Take up the masters after an update, unless ``skip``, a 0-d tensor, is not 0; the host does not read it.

        The average of a skipped step keeps its bits, which adding a zero would not do to a negative zero.
        """
        if not kind:
            return
        skipped, weight = skip.to(self.count.device) != 0, self._weight(kind)
        torch.where(skipped, self.average, torch.lerp(self.average, self.master, weight), out=self.average)
        if kind == "average":
            self.count += ~skipped

    def _weight(self, kind: Averages) -> Tensor:
        """Return how much of the masters the average takes, a 0-d tensor."""
        one = torch.ones((), dtype=self.master.dtype, device=self.master.device)
        if kind == "copy":
            return one
        weight = one * (1 - self._decay)
        if self._warmup:
            weight = torch.maximum(weight, 9 / (10 + self.count.to(one.dtype)))
        return torch.where(self.count == 0, one, weight)

    @torch.no_grad()
    def exchange(self) -> None:
        """Let the masters be the average, and the average the masters."""
        for average, master in zip(*(torch.split(one, CHUNK) for one in (self.average, self.master)), strict=True):
            kept = average.clone()
            average.copy_(master)
            master.copy_(kept)
