"""A rank that runs by itself has this communicator."""

from __future__ import annotations

from torch import Tensor

from shardwise.runtime.call import Call
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.handles import Completed, Handle


class AloneCommunicator(Communicator):
    """This communicator is for a rank that runs by itself.  On a mesh of one rank there is nothing to communicate.

    On a mesh of several ranks, what it sends is lost, what it receives is zeros, a sum is the rank's own input, and a
    gather repeats the rank's own part for every other rank.  A program runs as usual, so that its computation can be
    timed without waiting for other ranks; its results mean nothing.
    """

    def _all_reduce(self, call: Call, x: Tensor) -> Handle:
        return Completed()

    def _all_gather(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        for part in out.chunk(call.group.size):
            self._copied(part, x)
        return Completed()

    def _reduce_scatter(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        return self._copied(out, x.chunk(call.group.size)[call.group.index])

    def _all_to_all(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        return self._copied(out, x)

    def _shift(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        return self._copied(out, x)

    def _broadcast(self, call: Call, x: Tensor, root: int) -> Handle:
        return Completed()

    def _send(self, call: Call, x: Tensor, to_rank: int) -> Handle:
        return Completed()

    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Handle:
        x.zero_()
        return Completed()

    def _barrier(self, call: Call) -> None:
        return None
