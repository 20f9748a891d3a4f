"""Communication through ``torch.distributed``: gloo between CPU ranks, NCCL between CUDA ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.runtime.communicator import (
    CHANNELS,
    Axes,
    BaseCommunicator,
    Call,
    CommunicationError,
    CommunicationTimeout,
    Group,
    Handle,
    OnWait,
    as_bytes,
)
from shardwise.runtime.network import choose_interfaces
from shardwise.runtime.rendezvous import rendezvous

Start: TypeAlias = Callable[..., dist.Work | None]

START_TIMEOUT = 300.0  # seconds for all processes to come up: imports may take long where many share a disk
REPORT_TIME = 2.0  # seconds that a rank whose wait has failed gives the others to say that they are there too

# torch 2.13 renamed the first two and warns at the old names.
_all_gather_into: Start = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_into: Start = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_to_all_into: Start = dist.all_to_all_single


class DistributedCommunicator(BaseCommunicator):
    """One process per rank.  Each (axes, lane) has a process group of its own, so that lanes cannot block
    each other.

    Making a group is itself a collective operation, and torch names groups by how many a process has made:
    all ranks of the mesh must first use, or :meth:`prepare`, the same (axes, lane) in the same order.  With
    gloo the time-out of a collective also counts from its post; with NCCL waits happen on the device, and
    the time-out is that of torch's watchdog, which ends the process.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        timeout: float = 300.0,
        on_wait: OnWait | None = None,
        store: Store | None = None,
    ) -> None:
        """Use the default process group, which must exist.

        ``store`` serves to tell which ranks are missing when a wait fails.
        """
        if dist.get_world_size() != mesh.size:
            raise ConfigError(f"mesh: {mesh.size} ranks on {mesh.shape}, but {dist.get_world_size()} processes.")
        super().__init__(mesh, dist.get_rank(), device, timeout, on_wait)
        self._store = store
        self._owns_default = False
        self._process_groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._posted: dict[tuple[tuple[int, ...], str], int] = {}
        self._patience = timedelta(seconds=timeout)
        # NCCL serialises what a pair of ranks exchanges in one group.  So there is one group per direction and channel,
        # or a send that waits for its receive would block the receive that its peer waits for.
        ways = [(channel, up) for channel in CHANNELS for up in (False, True)] if Backend.of(device).asynchronous else []
        self._directions = {way: dist.new_group(timeout=self._patience) for way in ways}

    @classmethod
    def from_environment(
        cls, mesh: Mesh, device: torch.device, timeout: float = 300.0, on_wait: OnWait | None = None
    ) -> DistributedCommunicator:
        """Join the processes that torchrun's environment variables name; :meth:`close` leaves them again."""
        met = rendezvous("distributed", max(timeout, START_TIMEOUT))
        choose_interfaces(met, os.environ)
        Backend.of(device).select(device)
        dist.init_process_group(
            Backend.of(device).transport,
            store=PrefixStore("torch", met.store),
            rank=met.rank,
            world_size=met.size,
            timeout=timedelta(seconds=max(timeout, START_TIMEOUT)),
        )
        communicator = cls(mesh, device, timeout, on_wait, met.store)
        communicator._owns_default = True
        return communicator

    def prepare(self, groups: Iterable[tuple[Axes, str]]) -> None:
        for axes, lane in groups:
            group = self.group(axes)
            if group.size > 1:
                self._process_group(group, lane)

    def close(self) -> None:
        if self._owns_default:
            self._owns_default = False
            dist.destroy_process_group()
        else:
            for process_group in [*self._process_groups.values(), *self._directions.values()]:
                dist.destroy_process_group(process_group)
        self._process_groups.clear()
        self._directions.clear()

    def _all_reduce(self, call: Call, x: Tensor) -> Handle:
        return self._start(call, lambda group: dist.all_reduce(x, group=group, async_op=True))

    def _all_gather(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        order = _places(call.group)
        target = out if order is None else torch.empty_like(out)

        def post(group: dist.ProcessGroup) -> dist.Work | None:
            return _all_gather_into(as_bytes(target), as_bytes(x), group=group, async_op=True)

        return self._start(call, post, None if order is None else lambda: _permute(out, target, order))

    def _reduce_scatter(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        order = _places(call.group)
        source = x if order is None else _permute(torch.empty_like(x), x, order.argsort())
        return self._start(call, lambda group: _reduce_scatter_into(out, source, group=group, async_op=True))

    def _all_to_all(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        order = _places(call.group)
        target, source = out, x
        if order is not None:
            target, source = torch.empty_like(out), _permute(torch.empty_like(x), x, order.argsort())

        def post(group: dist.ProcessGroup) -> dist.Work | None:
            return _all_to_all_into(as_bytes(target), as_bytes(source), group=group, async_op=True)

        return self._start(call, post, None if order is None else lambda: _permute(out, target, order))

    def _broadcast(self, call: Call, x: Tensor, root: int) -> Handle:
        source = call.group.ranks[root]
        return self._start(call, lambda group: dist.broadcast(as_bytes(x), source, group=group, async_op=True))

    def _send(self, call: Call, x: Tensor, to_rank: int) -> Handle:
        return self._exchange(call, lambda group, tag: dist.isend(as_bytes(x), to_rank, group=group, tag=tag))

    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Handle:
        return self._exchange(call, lambda group, tag: dist.irecv(as_bytes(x), from_rank, group=group, tag=tag))

    def _barrier(self, call: Call) -> None:
        self._all_reduce(call, torch.zeros(1, dtype=torch.int32, device=self.device)).wait()
        Backend.of(self.device).synchronize(self.device)

    def _start(
        self,
        call: Call,
        post: Callable[[dist.ProcessGroup], dist.Work | None],
        finish: Callable[[], object] | None = None,
    ) -> Handle:
        position = self._count(call.group.ranks, call.lane)
        try:
            work = post(self._process_group(call.group, call.lane))
        except RuntimeError as error:
            raise self._failure(call, position, error) from error
        return _WorkHandle(self, work, call, position, finish)

    def _exchange(self, call: Call, post: Callable[[dist.ProcessGroup | None, int], dist.Work | None]) -> Handle:
        """Messages between two ranks are matched by their number, which is the tag with gloo; NCCL knows no
        tags."""
        position = self._count(call.group.ranks, f"message {call.channel}")
        group = self._directions.get((call.channel, call.group.ranks[0] < call.group.ranks[1]))
        tag = (position * len(CHANNELS) + CHANNELS.index(call.channel)) % 2**31
        try:
            work = post(group, tag if group is None else 0)
        except RuntimeError as error:
            raise self._failure(call, position, error) from error
        return _WorkHandle(self, work, call, position, None)

    def _count(self, ranks: tuple[int, ...], lane: str) -> int:
        position = self._posted[ranks, lane] = self._posted.get((ranks, lane), -1) + 1
        return position

    def _process_group(self, group: Group, lane: str) -> dist.ProcessGroup:
        key = (tuple(sorted(group.ranks)), lane)
        found = self._process_groups.get(key)
        if found is None:
            made = dist.new_group(list(key[0]), timeout=self._patience, use_local_synchronization=True)
            found = self._process_groups[key] = made
        return found

    def _wait(self, work: dist.Work, call: Call, position: int) -> None:
        if Backend.of(self.device).asynchronous:
            work.wait()  # the current stream waits, not the host
            return
        if self.on_wait is not None:
            self.on_wait(str(call))
        try:
            work.wait(self._patience)
        except RuntimeError as error:
            raise self._failure(call, position, error) from error
        finally:
            if self.on_wait is not None:
                self.on_wait(None)

    def _failure(self, call: Call, position: int, error: RuntimeError) -> CommunicationError:
        timed_out = "timed out" in str(error).lower()
        reason = f"no end after {self.timeout:g} s" if timed_out else f"failed: {error}"
        kind = CommunicationTimeout if timed_out else CommunicationError
        missing = self._missing(call, position)
        return kind(reason, rank=self.rank, operation=str(call), what=call.what, missing=missing)

    def _missing(self, call: Call, position: int) -> list[int]:
        """The members that do not say within REPORT_TIME that they are stuck at the same operation."""
        if self._store is None:
            return []
        lane = f"message {call.channel}" if call.kind in ("send", "receive") else call.lane
        place = f"stuck/{'-'.join(map(str, call.group.ranks))}/{lane}/{position}"
        silent, asked = [rank for rank in call.group.ranks if rank != self.rank], False
        with suppress(RuntimeError):  # the store goes down with the process that hosts it
            self._store.set(f"{place}/{self.rank}", "here")
            deadline = time.monotonic() + REPORT_TIME
            while silent and time.monotonic() < deadline:
                silent = [rank for rank in silent if not self._store.check([f"{place}/{rank}"])]
                asked = True
                time.sleep(0.02)
        return silent if asked else []


class _WorkHandle:
    def __init__(
        self,
        communicator: DistributedCommunicator,
        work: dist.Work | None,
        call: Call,
        position: int,
        finish: Callable[[], object] | None,
    ) -> None:
        self._communicator, self._work, self._call = communicator, work, call
        self._position, self._finish = position, finish

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        self._communicator._wait(work, self._call, self._position)
        if self._finish is not None:
            self._finish()


def _places(group: Group) -> Tensor | None:
    """Where each member stands in the process group, which torch orders by rank; None where the order is
    the same."""
    if list(group.ranks) == sorted(group.ranks):
        return None
    return torch.tensor(group.ranks).argsort().argsort()


def _permute(out: Tensor, x: Tensor, order: Tensor) -> Tensor:
    """Put part ``order[i]`` of ``x`` in part i of ``out``."""
    out.view(order.numel(), -1).copy_(x.view(order.numel(), -1)[order.to(x.device)])
    return out
