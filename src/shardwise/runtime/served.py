"""What ranks push to parameter servers and pull from them (``parallel/server.py``), over an ordinary communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.core.flat import FlatShard
from shardwise.parallel.data import SHARDS
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.handles import Handle, Then


def push(comm: Communicator, x: Tensor, ranges: Sequence[FlatShard], lane: str, what: str) -> Handle:
    """Post ``x``, a whole bucket, to the servers, which have these ``ranges`` of it; when the handle has been waited
    for, the range of a server is the sum over all ranks."""
    direct = comm.push(x, [(held.start, held.stop) for held in ranges], SHARDS, lane=lane, what=what)
    if direct is not None:
        return direct
    group = comm.group(SHARDS)
    sent = [held.numel for held in ranges] + [0] * (group.size - len(ranges))
    mine = ranges[group.index] if group.index < len(ranges) else FlatShard(0, 0)
    inbox = torch.empty(group.size, mine.numel, dtype=x.dtype, device=x.device)
    handle = comm.all_to_all(inbox.view(-1), x, SHARDS, lane=lane, what=what, sizes=[sent] * group.size)
    own = x[mine.start : mine.stop]
    # when all has come, a server adds it up, in the order of ranks, in place of its own part
    return Then([handle], lambda: torch.sum(inbox, 0, out=own) if own.numel() else None)


def pull(comm: Communicator, x: Tensor, ranges: Sequence[FlatShard], lane: str, what: str) -> Handle:
    """Post the receipt of each server's range of ``x``, a whole bucket."""
    return Then([
        comm.broadcast(x[held.start : held.stop], SHARDS, root, lane=lane, what=f"{what} of server {root}")
        for root, held in enumerate(ranges)
    ])  # fmt: skip
