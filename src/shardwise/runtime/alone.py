"""A rank that nobody talks to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.runtime.communicator import BaseCommunicator, Call, Completed


class AloneCommunicator(BaseCommunicator):
    """The communicator of a rank that is by itself on a mesh of several: what it sends is lost, what it receives is zeros, sums are its
    own.  A program runs as ever, so that the times of what it computes can be taken without waiting for others; its results mean nothing.
    """

    def _done(self, call: Call, *_: Any) -> Completed:
        return Completed()

    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Completed:
        x.zero_()
        return Completed()

    def _barrier(self, call: Call) -> None:
        return None

    _all_reduce = _all_gather = _reduce_scatter = _all_to_all = _broadcast = _send = _done
