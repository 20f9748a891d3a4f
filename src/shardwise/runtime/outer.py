"""The outer optimizer of islands that train apart: stochastic gradient descent with Nesterov momentum, whose gradient
is the mean over islands of how far their parameters have moved (DiLoCo, arXiv 2311.08105, algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.local_options import LocalOptions


class OuterBucket:
    """The outer step of the range of a bucket that a rank updates, whose masters are ``master``.

    ``base`` are the masters after the last outer step, which are the same on all islands, and ``momentum`` is the outer
    optimizer's; both lie where the masters do, and begin when this is made.  ``difference``, on the device, is what
    islands sum; ``here`` is the same memory, or memory for it where the masters are, if that is the host.  All are 1-d.
    """

    def __init__(self, master: Tensor, difference: Tensor, here: Tensor, options: LocalOptions, islands: int) -> None:
        self.master, self.difference = master, difference
        self._here, self._options, self._islands = here, options, islands
        self.base = master.detach().clone()
        self.momentum = torch.zeros_like(self.base)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew where the masters are now."""
        self.base.copy_(self.master)
        self.momentum.zero_()

    @property
    def _elsewhere(self) -> bool:
        """Return whether the masters are on the host, and what is summed on a device."""
        return self._here.data_ptr() != self.difference.data_ptr()

    @torch.no_grad()
    def differ(self) -> None:
        """Take this island's part of the mean difference."""
        torch.sub(self.base, self.master, out=self._here).div_(self._islands)
        if self._elsewhere:
            self.difference.copy_(self._here)

    @torch.no_grad()
    def step(self) -> None:
        """Take the outer step by the difference, which has been summed over islands, and set the masters."""
        here, lr, momentum = self._here, self._options.outer_lr, self._options.outer_momentum
        if self._elsewhere:
            here.copy_(self.difference)
        self.momentum.mul_(momentum).add_(here)
        self.base.add_(here, alpha=-lr).add_(self.momentum, alpha=-lr * momentum)
        if self._options.streams:
            self.master.lerp_(self.base, 1 - self._options.mix)
        else:
            self.master.copy_(self.base)
