"""Ranks exchange messages while they train, through a process group that does not disturb the step's collectives."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwise.core.communicators import groups
from shardwise.core.errors import ShardwiseError
from shardwise.runtime.communicator import START_TIMEOUT, Communicator
from shardwise.runtime.rendezvous import rendezvous
from shardwise.runtime.threads import ThreadCommunicator

PATIENCE = 1800.0  # seconds that ranks wait for each other: the speeds of their disks may differ much
LANE = "background"


class Background:
    """This gathers small messages of all ranks; one thread at a time calls it, in the same order on all ranks.

    All ranks make it together.  It uses gloo, whatever the training uses; ranks that are threads use their own backend.
    """

    def __init__(self, comm: Communicator) -> None:
        self._size = comm.mesh.size
        self._group: dist.ProcessGroup | None = None
        self._owns_default = False
        self._comm = comm
        if isinstance(comm, ThreadCommunicator):
            comm.host.prepare(groups(comm.mesh, comm.mesh.names, LANE))
        elif self._size > 1:
            self._connect()

    def _connect(self) -> None:
        patience = timedelta(seconds=PATIENCE)
        if not dist.is_initialized():  # training goes through shared memory
            met = rendezvous("background", START_TIMEOUT)
            store = PrefixStore("torch", met.store)
            dist.init_process_group("gloo", store=store, rank=met.rank, world_size=met.size, timeout=patience)
            self._owns_default = True
        self._group = dist.new_group(backend="gloo", timeout=patience)

    def gather(self, data: bytes, everywhere: bool = True) -> list[bytes]:
        """Return the ``data`` of every rank, in rank order.  Without ``everywhere`` only rank 0 gets it; the others get
        an empty list, and hold no more than their own data."""
        if self._size == 1:
            return [data]
        sizes = torch.zeros(self._size, dtype=torch.int64)
        self._all_gather(sizes, torch.tensor([len(data)]))
        longest = max(1, int(sizes.max()))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        takes = everywhere or self._comm.rank == 0
        found = torch.empty(self._size * longest if takes or self._group is None else 0, dtype=torch.uint8)
        if everywhere or self._group is None:  # ranks that are threads share their memory anyway
            self._all_gather(found, mine)
        else:
            dist.gather(mine, list(found.chunk(self._size)) if takes else None, group=self._group, group_dst=0)
        if not takes:
            return []
        return [
            row[:size].numpy().tobytes()
            for row, size in zip(found.view(self._size, longest), sizes.tolist(), strict=True)
        ]

    def _all_gather(self, out: Tensor, x: Tensor) -> None:
        if isinstance(self._comm, ThreadCommunicator):
            self._comm.host.all_gather(out, x, self._comm.mesh.names, lane=LANE, what="background").wait()
        elif self._group is not None:
            dist.all_gather(list(out.chunk(self._size)), x, group=self._group)
        else:
            raise ShardwiseError("the background process group is closed")

    def close(self) -> None:
        """Leave the process group; all ranks call it together."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(None if self._owns_default else self._group)
        self._group = None
