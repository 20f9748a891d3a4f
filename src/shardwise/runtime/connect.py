"""Which communicator a process gets: by the devices that train, and by what torchrun's environment says of its peers."""

from __future__ import annotations

import os
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.mesh import Mesh
from shardwise.runtime.communicator import BaseCommunicator, Call, Communicator, Handle, OnWait
from shardwise.runtime.distributed import DistributedCommunicator
from shardwise.runtime.shared import SharedMemoryCommunicator, available

Transport = Literal["auto", "gloo", "nccl", "shared"]


def ranks_of_a_host(comm: Communicator) -> int:
    """The least number of ranks that torchrun started on one host, the same for all ranks, which call this together; without it all are on one."""
    told = torch.zeros(comm.mesh.size, dtype=torch.float64, device=comm.device)
    told[comm.rank] = int(os.environ.get("LOCAL_WORLD_SIZE", comm.mesh.size))
    comm.all_reduce(told, comm.mesh.names, what="the ranks of a host").wait()
    return int(told.min())


class LoneCommunicator(BaseCommunicator):
    """The communicator of a mesh of one rank: there is nobody to communicate with."""

    def _refuse(self, call: Call, *tensors: Any) -> NoReturn:
        raise ShardwiseError(f"{call}: a lone rank has no peers")

    def _all_reduce(self, call: Call, x: Tensor) -> Handle:
        self._refuse(call)

    def _all_gather(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        self._refuse(call)

    def _reduce_scatter(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        self._refuse(call)

    def _all_to_all(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        self._refuse(call)

    def _broadcast(self, call: Call, x: Tensor, root: int) -> Handle:
        self._refuse(call)

    def _send(self, call: Call, x: Tensor, to_rank: int) -> Handle:
        self._refuse(call)

    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Handle:
        self._refuse(call)

    def _barrier(self, call: Call) -> None:
        self._refuse(call)


def connect(
    mesh: Mesh,
    device: torch.device | None = None,
    *,
    backend: Transport = "auto",
    timeout: float = 300.0,
    on_wait: OnWait | None = None,
) -> BaseCommunicator:
    """Join the ranks of ``mesh``; under torchrun (or with its variables set) one process is one rank.

    ``auto`` is NCCL between GPUs, shared memory between CPU ranks of one host, and gloo otherwise.
    :class:`ConfigError` where the number of processes is not that of the mesh.
    """
    device = device or Backend.here().device()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes != mesh.size:
        raise ConfigError(
            f"mesh: {mesh.size} ranks on {mesh.shape}, but {processes} processes; start one process a rank with "
            "`shardwise launch` or torchrun"
        )
    if mesh.size == 1:
        return LoneCommunicator(mesh, 0, device, timeout, on_wait)
    if backend == "auto":
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        shared = device.type == "cpu" and one_host and available(mesh) is None
        backend = "shared" if shared else "auto"
    if backend == "shared":
        return SharedMemoryCommunicator.from_environment(mesh, timeout, on_wait)
    return DistributedCommunicator.from_environment(mesh, device, timeout, on_wait)
