"""Ranks communicate through ``torch.distributed``: CPU ranks by gloo, others by NCCL or torch's backend for them."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.backend import Backend
from shardwise.core.communicators import CONTROL, Members, groups
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import CHANNELS
from shardwise.core.mesh import Mesh
from shardwise.runtime.call import Call, CommunicationError, CommunicationTimeout, Group
from shardwise.runtime.communicator import START_TIMEOUT, Communicator, OnWait, Sizes, as_bytes
from shardwise.runtime.handles import Handle
from shardwise.runtime.network import choose_interfaces
from shardwise.runtime.rendezvous import rendezvous

Start: TypeAlias = Callable[..., dist.Work | None]

HOSTS = "gloo"  # torch's backend for CPU tensors
WARM = (64, 1 << 18, 1 << 23)  # fp32 elements: by size a backend chooses how ranks communicate, and connects for that
REPORT_TIME = 2.0  # seconds that a rank whose wait has failed gives the others to report that they are stuck too

# torch 2.13 renamed the first two and warns at the old names.
_all_gather_into: Start = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_into: Start = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_to_all_into: Start = dist.all_to_all_single


class DistributedCommunicator(Communicator):
    """Each rank is a process.  Each communicator (a group and lane, or the messages from one rank to another in one
    channel) is a process group of its own, so that they cannot block each other: NCCL does in order whatever is posted
    in one.

    All of them are made by :meth:`prepare`; what was not prepared cannot be used.  Torch names a group by how many the
    process has asked for, so each rank asks for all groups, also for those that it does not belong to.

    With gloo the time-out of a collective also counts from its post; with NCCL waits happen on the device, and the
    time-out is that of torch's watchdog, which ends the process.
    """

    first_use_blocks = True

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        timeout: float = 300.0,
        on_wait: OnWait | None = None,
        store: Store | None = None,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        """Communicate beside the default process group, which must exist and is left alone; all ranks call it together.

        By ``store`` ranks find out who is missing when a wait fails; ``everyone`` is a process group of all ranks for
        CPU tensors, by default a new one.
        """
        if dist.get_world_size() != mesh.size:
            raise ConfigError(f"mesh: {mesh.size} ranks on {mesh.shape}, but {dist.get_world_size()} processes.")
        super().__init__(mesh, dist.get_rank(), device, timeout, on_wait)
        self._store, self._owns_default = store, False
        self._process_groups: dict[Members, dist.ProcessGroup] = {}
        self._posted: dict[tuple[tuple[int, ...], str], int] = {}
        self._orders: dict[tuple[int, ...], _Order] = {}
        self._made = everyone is None
        patience = timedelta(seconds=max(timeout, START_TIMEOUT))
        self._everyone = dist.new_group(timeout=patience, backend=HOSTS) if everyone is None else everyone
        if not Backend.of(device).asynchronous:
            control = groups(mesh, mesh.names, CONTROL)
            self._process_groups |= dict.fromkeys(control, self._everyone)
            self._prepared.update(control)

    @classmethod
    def from_environment(
        cls, mesh: Mesh, device: torch.device, timeout: float = 300.0, on_wait: OnWait | None = None
    ) -> DistributedCommunicator:
        """Join the processes that torchrun's environment variables name; :meth:`close` leaves them again.

        A default process group that exists already is used, and stays.
        """
        backend = Backend.of(device)
        backend.select(device)
        if dist.is_initialized():
            return cls(mesh, device, timeout, on_wait)
        met = rendezvous("distributed", max(timeout, START_TIMEOUT))
        choose_interfaces(met, os.environ)
        dist.init_process_group(
            f"cpu:{HOSTS},{backend.type}:{backend.transport}" if backend.asynchronous else HOSTS,
            store=PrefixStore("torch", met.store),
            rank=met.rank,
            world_size=met.size,
            timeout=timedelta(seconds=max(timeout, START_TIMEOUT)),
        )
        communicator = cls(mesh, device, timeout, on_wait, met.store, dist.group.WORLD)
        communicator._owns_default = True
        return communicator

    def _host(self) -> DistributedCommunicator:
        cpu = torch.device("cpu")
        return DistributedCommunicator(self.mesh, cpu, self.timeout, self.on_wait, self._store, self._everyone)

    def close(self) -> None:
        if self.host is not self:
            self.host.close()
        if not dist.is_initialized():
            return
        if self._owns_default:
            self._owns_default = False
            dist.destroy_process_group()
        else:
            own = [*self._process_groups.values(), self._everyone]
            for process_group in dict.fromkeys(one for one in own if self._made or one is not self._everyone):
                dist.destroy_process_group(process_group)
        self._made = False
        self._process_groups.clear()

    # ---- starting communicators --------------------------------------------------------------------------------------

    def _prepare(self, new: Sequence[Members]) -> None:
        # This wait is patient: the time-outs of what follows are those of a step.
        self.host.barrier(what="the start of communicators")
        for one in new:
            self._make(one)
        for one in new:
            if self.rank in one.ranks:
                self._tell(f"the start of {one}")
                self._use(one)
        self._tell(None)

    def _make(self, one: Members) -> None:
        backend = Backend.of(self.device)
        # Tags tell gloo's messages apart, which do not wait for each other: they need no group of their own.
        if one.pair and not backend.asynchronous:
            self._process_groups[one] = self._everyone
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that options have a time-out too, which it does not use
            patience, urgent = timedelta(seconds=self.timeout), backend.urgent_group()
            made = dist.new_group(sorted(one.ranks), timeout=patience, backend=backend.transport, pg_options=urgent)
        if self.rank in one.ranks:
            assert made is not None
            self._process_groups[one] = made

    def _use(self, one: Members) -> None:
        """Use a communicator once: a backend connects at the first use, and again for other sizes and operations."""
        backend, number = Backend.of(self.device), len(one.ranks)
        for numel in WARM if backend.asynchronous else WARM[:1]:
            if one.pair:
                call = Call(
                    "send" if self.rank == one.ranks[0] else "receive",
                    self._of(one),
                    one.lane,
                    "a first message",
                    one.lane,
                )
                x = torch.zeros(numel, device=self.device)
                (
                    self._send(call, x, one.ranks[1]) if call.kind == "send" else self._receive(call, x, one.ranks[0])
                ).wait()
                continue
            call = Call("all_reduce", self._of(one), one.lane, "a first sum")
            whole = torch.zeros(number * (numel // number or 1), device=self.device)
            part = torch.zeros(whole.numel() // number, device=self.device)
            self._all_reduce(call, whole).wait()
            if backend.asynchronous:
                self._all_gather(call, whole, part).wait()
                self._reduce_scatter(call, part, whole).wait()
        backend.synchronize(self.device)

    def _of(self, one: Members) -> Group:
        return Group((), one.ranks, one.ranks.index(self.rank))

    def _tell(self, what: str | None) -> None:
        if self.on_wait is not None:
            self.on_wait(what)

    # ---- operations --------------------------------------------------------------------------------------------------

    def _all_reduce(self, call: Call, x: Tensor) -> Handle:
        return self._start(call, lambda group: dist.all_reduce(x, group=group, async_op=True))

    def _all_gather(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        order = self._order(call.group)
        target = out if order is None else torch.empty_like(out)

        def post(group: dist.ProcessGroup) -> dist.Work | None:
            return _all_gather_into(as_bytes(target), as_bytes(x), group=group, async_op=True)

        return self._start(call, post, None if order is None else lambda: _permute(out, target, order.places))

    def _reduce_scatter(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        order = self._order(call.group)
        source = x if order is None else _permute(torch.empty_like(x), x, order.members)
        return self._start(call, lambda group: _reduce_scatter_into(out, source, group=group, async_op=True))

    def _all_to_all(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        order = self._order(call.group)
        target, source = out, x
        if order is not None:
            target, source = torch.empty_like(out), _permute(torch.empty_like(x), x, order.members)

        def post(group: dist.ProcessGroup) -> dist.Work | None:
            return _all_to_all_into(as_bytes(target), as_bytes(source), group=group, async_op=True)

        return self._start(call, post, None if order is None else lambda: _permute(out, target, order.places))

    def _all_to_all_uneven(self, call: Call, out: Tensor, x: Tensor, sizes: Sizes) -> Handle:
        if self._order(call.group) is not None:
            return super()._all_to_all_uneven(call, out, x, sizes)
        sent = [size * x.itemsize for size in sizes[call.group.index]]
        received = [row[call.group.index] * x.itemsize for row in sizes]

        def post(group: dist.ProcessGroup) -> dist.Work | None:
            return _all_to_all_into(as_bytes(out), as_bytes(x), received, sent, group=group, async_op=True)

        return self._start(call, post)

    def _shift(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        ends = (dist.isend, x, call.group.after), (dist.irecv, out, call.group.before)

        def post(group: dist.ProcessGroup, tag: int) -> _Both:
            each = [dist.P2POp(op, as_bytes(one), call.group.ranks[peer], group, tag) for op, one, peer in ends]
            return _Both(dist.batch_isend_irecv(each))  # apart, NCCL would do one after the other, and none would end

        return self._exchange(call, post)

    def _broadcast(self, call: Call, x: Tensor, root: int) -> Handle:
        source = call.group.ranks[root]
        return self._start(call, lambda group: dist.broadcast(as_bytes(x), source, group=group, async_op=True))

    def _send(self, call: Call, x: Tensor, to_rank: int) -> Handle:
        return self._exchange(call, lambda group, tag: dist.isend(as_bytes(x), to_rank, group=group, tag=tag))

    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Handle:
        return self._exchange(call, lambda group, tag: dist.irecv(as_bytes(x), from_rank, group=group, tag=tag))

    def _barrier(self, call: Call) -> None:
        if self.host is not self:
            self.host._barrier(call)
        else:
            self._all_reduce(call, torch.zeros(1, dtype=torch.int32)).wait()

    def _order(self, group: Group) -> _Order | None:
        """Return a group's order, None if it is by rank; it is on the device, as no collective may wait for a copy."""
        if list(group.ranks) == sorted(group.ranks):
            return None
        if group.ranks not in self._orders:
            members = torch.tensor(group.ranks).argsort()
            self._orders[group.ranks] = _Order(members.argsort().to(self.device), members.to(self.device))
        return self._orders[group.ranks]

    def _start(
        self,
        call: Call,
        post: Callable[[dist.ProcessGroup], dist.Work | _Both | None],
        finish: Callable[[], object] | None = None,
    ) -> Handle:
        key = (call.group.ranks, call.queue)
        position = self._posted[key] = self._posted.get(key, -1) + 1
        try:
            work = post(self._process_group(call))
        except RuntimeError as error:
            raise self._failure(call, position, error) from error
        return _WorkHandle(self, work, call, position, finish)

    def _exchange(self, call: Call, post: Callable[[dist.ProcessGroup, int], dist.Work | _Both | None]) -> Handle:
        """Post a message, or a shift: gloo matches messages by a tag, their number; NCCL has no tags, but a process
        group for each channel and direction."""
        number = self._posted.get((call.group.ranks, call.queue), -1) + 1
        channel = CHANNELS.index(call.channel) if call.pair else 0
        tag = (number * len(CHANNELS) + channel) % 2**31
        return self._start(call, lambda group: post(group, 0 if Backend.of(self.device).asynchronous else tag))

    def _process_group(self, call: Call) -> dist.ProcessGroup:
        found = self._process_groups.get(call.members)
        if found is None:
            reason = f"its communicator ({call.members}) was not prepared, and to start it now could block ranks"
            raise call.error(f"{reason} for ever", self.rank)
        return found

    def _wait(self, work: dist.Work | _Both, call: Call, position: int) -> None:
        if Backend.of(self.device).asynchronous:
            work.wait()  # the current stream waits, not the host
            return
        try:
            self._noted(call, work.wait, timedelta(seconds=self._limit(call)))
        except RuntimeError as error:
            raise self._failure(call, position, error) from error

    def _failure(self, call: Call, position: int, error: RuntimeError) -> CommunicationError:
        timed_out = "timed out" in str(error).lower()
        reason = f"no end after {self._limit(call):g} s" if timed_out else f"failed: {error}"
        kind = CommunicationTimeout if timed_out else CommunicationError
        return call.error(reason, self.rank, self._missing(call, position), kind)

    def _missing(self, call: Call, position: int) -> list[int]:
        """Return the members that do not report within REPORT_TIME that they are stuck at the same operation."""
        if self._store is None:
            return []
        place = f"stuck/{'-'.join(map(str, call.group.ranks))}/{call.queue}/{position}"
        silent, asked = [rank for rank in call.group.ranks if rank != self.rank], False
        with suppress(RuntimeError):  # the store goes down with the process that hosts it
            self._store.set(f"{place}/{self.rank}", "here")
            deadline = time.monotonic() + REPORT_TIME
            while silent and time.monotonic() < deadline:
                silent = [rank for rank in silent if not self._store.check([f"{place}/{rank}"])]
                asked = True
                time.sleep(0.02)
        return silent if asked else []


class _Both:
    """The two messages of a shift, or the one work that a backend has made of them."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, *patience: timedelta) -> None:
        for work in self._works:
            work.wait(*patience)


class _WorkHandle:
    def __init__(
        self,
        communicator: DistributedCommunicator,
        work: dist.Work | _Both | None,
        call: Call,
        position: int,
        finish: Callable[[], object] | None,
    ) -> None:
        self._communicator, self._work, self._call = communicator, work, call
        self._position, self._finish = position, finish

    def wait(self) -> None:
        if self._work is None:
            return
        self._communicator._wait(self._work, self._call, self._position)
        self._work = None
        if self._finish is not None:
            self._finish()


class _Order(NamedTuple):
    """This is the order of a group's members in their process group, which torch sorts by rank: the place of each
    member, and the member in each place.
    """

    places: Tensor
    members: Tensor


def _permute(out: Tensor, x: Tensor, order: Tensor) -> Tensor:
    """Put part ``order[i]`` of ``x`` in part i of ``out``."""
    out.view(order.numel(), -1).copy_(x.view(order.numel(), -1)[order])
    return out
