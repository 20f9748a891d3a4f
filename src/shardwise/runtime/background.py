"""A way for ranks to talk while they train: its own process group, for threads that must not disturb the step's
collectives.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwise.core.communicators import groups
from shardwise.core.errors import ShardwiseError
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.rendezvous import rendezvous
from shardwise.runtime.threads import ThreadCommunicator

PATIENCE = 1800.0  # seconds that ranks wait for each other: their disks may differ much in speed
START_TIMEOUT = 300.0
LANE = "background"


class Background:
    """Gathers small messages of all ranks, from one thread at a time, in the same order on all of them.

    Made by all ranks together; CPU tensors over gloo, whatever the training uses.
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
        """The ``data`` of every rank, in rank order; without ``everywhere`` on rank 0 alone, and nothing on the others,
        which hold no more than their own then."""
        if self._size == 1:
            return [data]
        sizes = torch.zeros(self._size, dtype=torch.int64)
        self._all_gather(sizes, torch.tensor([len(data)]))
        longest = max(1, int(sizes.max()))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        takes = everywhere or self._comm.rank == 0
        found = torch.empty(self._size * longest if takes or self._group is None else 0, dtype=torch.uint8)
        if everywhere or self._group is None:  # ranks that are threads have their memory in common
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
        """Leave the others; all ranks together."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(None if self._owns_default else self._group)
        self._group = None
