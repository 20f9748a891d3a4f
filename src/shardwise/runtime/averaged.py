"""The weights of a rank are exchanged with their averages, for an evaluation or to be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator


@contextmanager
def averaged(memory: RankMemory, comm: Communicator) -> Iterator[None]:
    """Let the weights of all ranks, which enter and leave together, be their averages inside the context."""
    _exchange(memory, comm, True)
    try:
        yield
    except BaseException:
        _exchange(memory, None, False)  # the other ranks may be elsewhere
        raise
    _exchange(memory, comm, False)


def _exchange(memory: RankMemory, comm: Communicator | None, is_averaged: bool) -> None:
    if comm is not None:  # others may still read the parameters that are in memory which they have in common
        comm.barrier(what="the average of the weights")
    for bucket in memory.buckets.values():
        if bucket.average is not None:
            bucket.average.exchange()
        if bucket.learns:  # also where others update it all: all ranks send and receive it whole once
            bucket.publish()
    memory.is_averaged = is_averaged
