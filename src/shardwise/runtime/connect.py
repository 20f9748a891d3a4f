"""The devices that train, and what torchrun's variables say of its peers, decide which communicator a process gets."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.communicator import Communicator, OnWait, host_gather
from shardwise.runtime.distributed import HOSTS, DistributedCommunicator
from shardwise.runtime.shared import SharedMemoryCommunicator, available
from shardwise.runtime.staged import StagedCommunicator

AUTO, SHARED = "auto", "shared"
TEXT = 1024  # the most bytes that a rank tells the others


def ranks_of_a_host(comm: Communicator) -> int:
    """Return the least number of ranks that torchrun started on a host; all ranks call this together and get the same.
    Without torchrun, all ranks are on one host.
    """
    local = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", comm.mesh.size)))
    return int(host_gather(comm, local, "the ranks of a host").min())


def gather_texts(comm: Communicator, text: str, what: str) -> list[str]:
    """Return at most :data:`TEXT` bytes of each rank's text, in rank order; all ranks call this together."""
    mine = torch.tensor(list(text.encode()[:TEXT].ljust(TEXT, b"\0")), dtype=torch.uint8)
    rows = host_gather(comm, mine, what).tolist()
    return [bytes(code for code in row if code).decode(errors="ignore") for row in rows]


def check_apart(comm: Communicator) -> None:
    """Raise :class:`ConfigError`, on all ranks, where several use the same card, as when a launcher lets all ranks see
    only that card.

    Only NVIDIA's cards can be told apart; for others the backend's library reports it at their first communicator.
    """
    backend = Backend.of(comm.device)
    cards = gather_texts(comm, backend.uuid(comm.device), "the devices of all ranks")
    for card in dict.fromkeys(filter(None, cards)):
        ranks = [rank for rank, one in enumerate(cards) if one == card]
        if len(ranks) > 1:
            raise ConfigError(
                f"devices: {len(cards)} ranks have {len({one or rank for rank, one in enumerate(cards)})} cards, for "
                "ranks "
                f"{', '.join(map(str, ranks))} have the same, {card}; legal: one rank a card, so fewer ranks, more "
                "cards for each host or more "
                f'hosts, or, in a script of your own, connect(backend="{HOSTS}"), by which ranks share a card'
            )


def connect(
    mesh: Mesh,
    device: torch.device | None = None,
    *,
    backend: str = AUTO,
    timeout: float = 300.0,
    on_wait: OnWait | None = None,
) -> Communicator:
    """Join the ranks of ``mesh``; under torchrun (or with its variables set) one process is one rank.

    ``backend`` is "auto", "shared" (memory that the ranks of one host share), "gloo", or torch's backend for devices of
    that type, such as "nccl".  "auto" is the last between GPUs, shared memory between CPU ranks of one host, and gloo
    otherwise.  Between GPUs "gloo" and "shared" copy through the host's memory; then several ranks may have one device.
    A default process group of ``torch.distributed`` that exists already is used, and stays.  ``timeout`` is in seconds.

    Raises :class:`ConfigError` where the number of processes is not that of the mesh, or where this torch or this host
    cannot communicate in this way (before any rank is waited for), or where several ranks have one card.
    """
    device = device or Backend.here().device()
    met = dist.is_available() and dist.is_initialized()
    processes = dist.get_world_size() if met else int(os.environ.get("WORLD_SIZE", "1"))
    if processes != mesh.size:
        raise ConfigError(
            f"mesh: {mesh.size} ranks on {mesh.shape}, but {processes} processes; start one process a rank with "
            "`shardwise launch` or torchrun"
        )
    on_device = Backend.of(device)
    if mesh.size == 1:
        on_device.select(device)
        return AloneCommunicator(mesh, 0, device, timeout, on_wait)
    chosen = _chosen(mesh, device, backend, met)
    if chosen not in (SHARED, HOSTS):
        found = DistributedCommunicator.from_environment(mesh, device, timeout, on_wait)
        try:
            check_apart(found)
        except ConfigError:
            found.close()
            raise
        return found
    on_device.select(device)
    inner: Communicator
    if chosen == SHARED:
        inner = SharedMemoryCommunicator.from_environment(mesh, timeout, on_wait)
    else:
        inner = DistributedCommunicator.from_environment(mesh, torch.device("cpu"), timeout, on_wait)
    return StagedCommunicator(inner, device) if on_device.asynchronous else inner


def _chosen(mesh: Mesh, device: torch.device, backend: str, met: bool) -> str:
    """Return what to communicate through, if that is possible; ``met`` says that a process group exists already."""
    own = Backend.of(device)
    if backend == AUTO:
        local = os.environ.get("LOCAL_WORLD_SIZE")
        one_host = not met and local is not None and local == os.environ.get("WORLD_SIZE")
        backend = SHARED if not own.asynchronous and one_host and available(mesh) is None else own.transport or ""
    legal = tuple(dict.fromkeys((AUTO, SHARED, HOSTS, *([own.transport] if own.transport else []))))
    if backend not in legal:
        found = f'backend: "{backend}" is' if backend else "backend: torch has none, so it is"
        raise ConfigError(f"{found} not possible between devices of type {device.type}; legal: {', '.join(legal[1:])}")
    if backend != SHARED:
        check_possible(own, backend, mesh.size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return backend


def check_possible(own: Backend, backend: str, ranks: int, local: int) -> None:
    """Raise :class:`ConfigError` where this torch, or this host, cannot let ``ranks`` ranks, ``local`` of them here,
    communicate by ``backend``.
    """
    through = f'; connect(backend="{HOSTS}") would copy through the host\'s memory' if backend != HOSTS else ""
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise ConfigError(
            f'backend: torch {torch.__version__} is built without "{backend}", by which {ranks} ranks on devices of '
            f"type {own.type} "
            f"communicate; install a build of torch that has it (those for Linux have), or use one rank{through}"
        )
    devices = own.count
    if backend != HOSTS and local > devices > 1:  # if only one is seen, it may be this rank's own
        wrong = f"{local} ranks on this host and {devices} devices of type {own.type}"
        legal = f"one rank a device, so at most {devices} here, and more on other hosts{through}"
        raise ConfigError.on("backend", wrong, legal)
