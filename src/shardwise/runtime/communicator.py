"""All communication goes through a :class:`Communicator`: this is what every backend promises, and what all share.

A communicator belongs to one rank of a mesh.  Every operation is *posted* and gives a :class:`Handle`; from the post
until ``handle.wait()`` has returned, the tensors belong to the operation: an output may hold anything, and an input
must not be written.

Operations of one (axes, lane) run in the order in which they were posted, which must be the same on all members;
different lanes are independent of each other.  Messages from one rank to another are matched in the order of posting,
whatever their lane, in each of two CHANNELS.  A send may complete only once its receive has been posted: some backends
buffer small messages, but a program that relies on that hangs on the others.

The first use of a communicator (of one group and lane, or of messages one way) may block the host until all its members
have reached theirs.  So :meth:`Communicator.prepare` starts them beforehand, on all ranks together;
``shardwise/core/communicators.py`` says which a run needs.

Backends derive from :class:`Communicator`, which checks the arguments and resolves the group, so that a backend sees
only flat, contiguous tensors of the right sizes and groups of at least two ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.communicators import CONTROL, Members, groups
from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import CHANNELS
from shardwise.core.mesh import Axes, Mesh
from shardwise.runtime.call import Call, Group
from shardwise.runtime.handles import Completed, Handle, Then

Sizes: TypeAlias = Sequence[Sequence[int]]
"""How many elements each member of a group sends to each."""

START_TIMEOUT = 300.0  # seconds for all processes to come up: imports may take long where many share a disk

OnWait: TypeAlias = Callable[[str | None], None]
"""It is called with an operation in words when the host begins to wait for it, and with None when the wait ends."""

# Every backend can sum these: gloo and NCCL lack int16, bool and fp8.
REDUCIBLE = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8,
})  # fmt: skip


class Recording(Protocol):
    """A recorder is told of each operation between ranks."""

    def posted(self, call: Call, handle: Handle) -> Handle:
        """Note that an operation has been posted, and return the handle by which it is to be waited for."""


class Communicator(ABC):
    """A communicator is one rank's access to the others.  Tensors are contiguous and on ``device``; n is the size of
    the group over ``axes``.

    Axes that the mesh lacks count as of size 1; with n = 1 a collective is a local copy or nothing.  ``lane`` names the
    queue, and ``what`` names the operation in error messages; ``timeout`` is in seconds.  This class checks arguments
    (it raises :class:`ShardwiseError`), resolves groups and answers trivial cases; backends have the private methods.
    """

    shares_memory = False  # whether :meth:`common` gives memory to groups of more than one rank
    first_use_blocks = False  # whether all that is used must have been prepared
    shares_objects = False  # whether other ranks are in this process, with the same objects of the user's

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        timeout: float = 300.0,
        on_wait: OnWait | None = None,
    ) -> None:
        if not 0 <= rank < mesh.size:
            raise ShardwiseError(f"rank {rank} is not on a mesh of {mesh.size} ranks")
        self.mesh, self.rank, self.device, self.timeout, self.on_wait = mesh, rank, device, timeout, on_wait
        self.recorder: Recording | None = None
        self._groups: dict[Axes, Group] = {}
        self._prepared: set[Members] = set()

    @cached_property
    def host(self) -> Communicator:
        """Return a communicator of CPU tensors between the same ranks, for numbers on the host; it uses no device.

        Only the thread that trains may use it.  Over the whole mesh on lane :data:`CONTROL` it needs no preparing.
        """
        return self if self.device.type == "cpu" else self._host()

    def _host(self) -> Communicator:
        """Make a communicator like this one for CPU tensors."""
        return type(self)(self.mesh, self.rank, torch.device("cpu"), self.timeout, self.on_wait)

    def group(self, axes: Axes) -> Group:
        """Return the group of this rank over ``axes``; axes of size 1 are left out."""
        known = self._groups.get(axes)
        if known is None:
            names = (axes,) if isinstance(axes, str) else tuple(axes)
            names = tuple(name for name in names if self.mesh.axis_size(name) > 1)
            ranks = self.mesh.group(self.rank, names) if names else (self.rank,)
            known = self._groups[axes] = Group(names, ranks, ranks.index(self.rank))
        return known

    def all_reduce(
        self, x: Tensor, axes: Axes, lane: str = "compute", what: str = "", out: Tensor | None = None
    ) -> Handle:
        """Replace ``x`` by its sum over the group, or put the sum in ``out``, which has as many elements.  Complex
        numbers are summed as pairs of real ones; fp16 and bf16 are rounded as the backend does."""
        call = Call("all_reduce", self.group(axes), lane, what)
        x, out = _real(x), out if out is None else _real(out)
        self._check(call, x, out, out is None or out.numel() == x.numel(), reducing=True)
        if call.group.size == 1 or x.numel() == 0:
            return Completed() if out is None else self._copied(out, x)
        x = _flat(x)
        handle = self._all_reduce(call, x) if out is None else self._all_reduce_into(call, _flat(out), x)
        return self._recorded(call, handle)

    def all_gather(self, out: Tensor, x: Tensor, axes: Axes, lane: str = "compute", what: str = "") -> Handle:
        """Concatenate the members' ``x`` in group order; ``out`` has n times as many elements.

        ``x`` may be its own part of ``out``.
        """
        call = Call("all_gather", self.group(axes), lane, what)
        self._check(call, x, out, out.numel() == call.group.size * x.numel())
        return self._moved(call, out, x, self._all_gather)

    def reduce_scatter(self, out: Tensor, x: Tensor, axes: Axes, lane: str = "compute", what: str = "") -> Handle:
        """Sum ``x`` over the group and put the part of this rank's index in ``out``.

        ``x`` has n times as many elements; ``out`` may be that part of it.
        """
        call = Call("reduce_scatter", self.group(axes), lane, what)
        x, out = _real(x), _real(out)
        self._check(call, x, out, x.numel() == call.group.size * out.numel(), reducing=True)
        return self._moved(call, out, x, self._reduce_scatter)

    def all_to_all(
        self, out: Tensor, x: Tensor, axes: Axes, lane: str = "compute", what: str = "", sizes: Sizes | None = None
    ) -> Handle:
        """Send the i-th of n parts of ``x`` to member i, and put member i's part in the i-th part of ``out``.

        Parts are equal, or member i sends ``sizes[i][j]`` elements to member j, which all members know."""
        call = Call("all_to_all", self.group(axes), lane, what)
        if sizes is not None:
            sent, received = sizes[call.group.index], [row[call.group.index] for row in sizes]
            self._check(call, x, out, x.numel() == sum(sent) and out.numel() == sum(received))
            if call.group.size == 1 or not any(map(any, sizes)):
                return self._copied(out, x)
            return self._recorded(call, self._all_to_all_uneven(call, _flat(out), _flat(x), sizes))
        self._check(call, x, out, x.numel() == out.numel() and x.numel() % call.group.size == 0)
        return self._moved(call, out, x, self._all_to_all)

    def push(
        self, x: Tensor, ranges: Sequence[tuple[int, int]], axes: Axes, lane: str = "compute", what: str = ""
    ) -> Handle | None:
        """Replace elements ``ranges[i]`` = (start, stop) of ``x``, on member i, by their sums over all members, where
        each can read what the others have; return None where it cannot, and they have to send it.  What else is in
        ``x`` stays, or is lost."""
        call = Call("push", self.group(axes), lane, what)
        self._check(call, x, reducing=True)
        handle = self._push(call, _flat(x), ranges)
        return None if handle is None else self._recorded(call, handle)

    def shift(self, out: Tensor, x: Tensor, axes: Axes, lane: str = "compute", what: str = "") -> Handle:
        """Send ``x`` to the next member of the group, the last to the first, and put what the one before sends in
        ``out``, which has as many elements on all members."""
        call = Call("shift", self.group(axes), lane, what)
        self._check(call, x, out, x.numel() == out.numel())
        return self._moved(call, out, x, self._shift)

    def broadcast(self, x: Tensor, axes: Axes, root: int = 0, lane: str = "compute", what: str = "") -> Handle:
        """Replace ``x`` by the ``x`` of the member with index ``root`` in the group."""
        call = Call("broadcast", self.group(axes), lane, what)
        self._check(call, x)
        if not 0 <= root < call.group.size:
            raise ShardwiseError(f"{call}: root {root} is not an index in a group of {call.group.size}")
        if call.group.size == 1 or x.numel() == 0:
            return Completed()
        return self._recorded(call, self._broadcast(call, _flat(x), root))

    def send(self, x: Tensor, to_rank: int, lane: str = "send", what: str = "", channel: str = CHANNELS[0]) -> Handle:
        """Send ``x`` to a rank of the mesh."""
        call = self._pair("send", to_rank, lane, what, channel)
        self._check(call, x)
        return self._recorded(call, self._send(call, _flat(x), to_rank)) if x.numel() else Completed()

    def receive(
        self, x: Tensor, from_rank: int, lane: str = "receive", what: str = "", channel: str = CHANNELS[0]
    ) -> Handle:
        """Fill ``x`` with what ``from_rank`` sends to this rank."""
        call = self._pair("receive", from_rank, lane, what, channel)
        self._check(call, x)
        return self._recorded(call, self._receive(call, _flat(x), from_rank)) if x.numel() else Completed()

    def barrier(self, what: str = "") -> None:
        """Return when all ranks have called it."""
        call = Call("barrier", self.group(self.mesh.names), CONTROL, what)
        if call.group.size > 1:
            Backend.of(self.device).synchronize(self.device)
            self._barrier(call)

    def prepare(self, wanted: Iterable[Members]) -> None:
        """Make, and use once, those of these communicators that are not there yet.

        All ranks call it together with the same communicators in the same order, also those that they do not
        belong to; no operation may be under way.
        """
        new = [one for one in dict.fromkeys(wanted) if one not in self._prepared]
        if new:
            self._prepare(new)
            self._prepared.update(new)

    def _prepare(self, new: Sequence[Members]) -> None:
        """Make these communicators, in this order; a backend whose first use never blocks has nothing to do."""
        return

    def progress(self) -> None:
        """Do a bounded bit of pending work, if any, without blocking; backends without a thread need this."""
        return

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat buffer of ``numel`` elements, 64-byte aligned, on which collectives need no copies.

        All ranks must call it with the same arguments in the same order.
        """
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def common(self, numel: int, dtype: torch.dtype, axes: Axes) -> Tensor | None:
        """Return a zeroed flat buffer of ``numel`` elements that is one piece of memory for the whole group, or None
        where ranks have no memory in common.

        The members see each other's writes; an :meth:`all_gather` into it, of each member's own part, copies nothing
        and only waits until all have posted it.  All members must call it with the same arguments in the same order.
        """
        return None

    def close(self) -> None:
        """Release what the communicator holds; it may be called more than once, and buffers stay readable."""
        return

    def abort(self) -> None:
        """Leave after an error, just before the process ends, without waiting, so that the error can be reported: what
        is pending on a device may never end, and leaving its groups would wait for that."""
        if not Backend.of(self.device).asynchronous:
            self.close()

    def _pair(self, kind: str, peer: int, lane: str, what: str, channel: str) -> Call:
        if channel not in CHANNELS:
            raise ShardwiseError(f"{kind} {what}: there is no channel {channel!r}; legal: {', '.join(CHANNELS)}")
        if not 0 <= peer < self.mesh.size or peer == self.rank:
            raise ShardwiseError(
                f"{kind} {what}: rank {self.rank} has no peer {peer} on a mesh of {self.mesh.size} ranks"
            )
        ranks = (self.rank, peer) if kind == "send" else (peer, self.rank)
        return Call(kind, Group((), ranks, ranks.index(self.rank)), lane, what, channel)

    def _check(
        self, call: Call, x: Tensor, out: Tensor | None = None, sizes_fit: bool = True, reducing: bool = False
    ) -> None:
        """Raise before anything is posted: some backends poison the whole group on a bad argument."""
        for tensor in (x,) if out is None else (x, out):
            if not tensor.is_contiguous():
                raise ShardwiseError(f"{call}: the tensor of shape {tuple(tensor.shape)} is not contiguous")
            if tensor.device.type != self.device.type:
                raise ShardwiseError(f"{call}: the tensor is on {tensor.device}, the communicator on {self.device}")
        if reducing and x.dtype not in REDUCIBLE:
            raise ShardwiseError(f"{call}: cannot sum {x.dtype}")
        if out is not None and (not sizes_fit or out.dtype != x.dtype):
            raise ShardwiseError(
                f"{call}: sizes or dtypes do not fit {call.group.size} ranks: "
                f"{x.numel()} elements of {x.dtype} into {out.numel()} of {out.dtype}"
            )

    def _moved(self, call: Call, out: Tensor, x: Tensor, post: Callable[[Call, Tensor, Tensor], Handle]) -> Handle:
        """Post an operation from ``x`` to ``out``; with nobody or nothing to communicate it is a copy."""
        if call.group.size == 1 or x.numel() == 0:
            return self._copied(out, x)
        return self._recorded(call, post(call, _flat(out), _flat(x)))

    def _recorded(self, call: Call, handle: Handle) -> Handle:
        return handle if self.recorder is None else self.recorder.posted(call, handle)

    def _copied(self, out: Tensor, x: Tensor) -> Handle:
        if out.data_ptr() != x.data_ptr():
            _flat(out).copy_(_flat(x))
        return Completed()

    def _limit(self, call: Call) -> float:
        """Return the time-out in seconds: on the control lane a rank may be late by what it does outside of a step."""
        return max(self.timeout, START_TIMEOUT) if call.lane == CONTROL else self.timeout

    def _noted(self, call: Call, wait: Callable[..., object], *arguments: object) -> None:
        """Call ``wait``, which blocks the host until an operation is complete, and tell ``on_wait`` of it."""
        if self.on_wait is None:
            wait(*arguments)
            return
        self.on_wait(str(call))
        try:
            wait(*arguments)
        finally:
            self.on_wait(None)

    @abstractmethod
    def _all_reduce(self, call: Call, x: Tensor) -> Handle: ...

    def _all_reduce_into(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        return self._all_reduce(call, out.copy_(x))

    @abstractmethod
    def _all_gather(self, call: Call, out: Tensor, x: Tensor) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, call: Call, out: Tensor, x: Tensor) -> Handle: ...

    @abstractmethod
    def _all_to_all(self, call: Call, out: Tensor, x: Tensor) -> Handle: ...

    def _all_to_all_uneven(self, call: Call, out: Tensor, x: Tensor, sizes: Sizes) -> Handle:
        """Exchange parts as long as the longest of all."""
        most, own = max(map(max, sizes)), call.group.index
        padded = x.new_zeros(call.group.size, most)
        for part, place in zip(x.split_with_sizes(list(sizes[own])), padded, strict=True):
            place[: len(part)].copy_(part)
        got = torch.empty_like(padded)
        handle = self._all_to_all(call, got.view(-1), padded.view(-1))
        cut = [row[own] for row in sizes]
        return Then([handle], lambda: torch.cat([part[:n] for part, n in zip(got, cut, strict=True)], out=out))

    def _push(self, call: Call, x: Tensor, ranges: Sequence[tuple[int, int]]) -> Handle | None:
        return None

    @abstractmethod
    def _shift(self, call: Call, out: Tensor, x: Tensor) -> Handle: ...

    @abstractmethod
    def _broadcast(self, call: Call, x: Tensor, root: int) -> Handle: ...

    @abstractmethod
    def _send(self, call: Call, x: Tensor, to_rank: int) -> Handle: ...

    @abstractmethod
    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Handle: ...

    @abstractmethod
    def _barrier(self, call: Call) -> None: ...


def host_sum(comm: Communicator, numbers: Tensor, what: str, axes: Axes | None = None) -> Tensor:
    """Sum ``numbers``, a CPU tensor, over all ranks in place, and return it; all ranks call it.  It uses no device.

    With ``axes``, whose groups :func:`host_groups` has prepared, it is summed over these, by the ranks of a group."""
    comm.host.all_reduce(numbers, comm.mesh.names if axes is None else axes, lane=CONTROL, what=what).wait()
    return numbers


def host_groups(comm: Communicator, axes: Axes) -> None:
    """Prepare sums of hosts over ``axes``; all ranks call it together."""
    comm.host.prepare(groups(comm.mesh, axes, CONTROL))


def host_gather(comm: Communicator, numbers: Tensor, what: str) -> Tensor:
    """Return the ``numbers``, a CPU tensor, of every rank, in rank order; all ranks call it.  It uses no device."""
    found = torch.zeros(comm.mesh.size, *numbers.shape, dtype=numbers.dtype)
    found[comm.rank] = numbers
    return host_sum(comm, found, what)


def host_gather_bytes(comm: Communicator, data: bytes, what: str) -> list[bytes]:
    """Return the ``data`` of every rank, in rank order; all ranks call it.  It uses no device."""
    sizes = [int(size) for size in host_gather(comm, torch.tensor(len(data)), what)]
    mine = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = host_gather(comm, mine, what)
    return [row[:size].numpy().tobytes() for row, size in zip(found, sizes, strict=True)]


def _real(x: Tensor) -> Tensor:
    """Return an alias that has complex numbers as pairs of real ones, which can be summed instead."""
    return torch.view_as_real(x.detach()) if x.is_complex() else x


def _flat(x: Tensor) -> Tensor:
    """Return a one-dimensional alias outside autograd."""
    return x.detach().as_strided((x.numel(),), (1,))  # a single element may be contiguous in steps of several


def as_bytes(x: Tensor) -> Tensor:
    """Return a flat tensor as uint8: data that is only moved can then have any dtype on any backend."""
    return x.view(torch.uint8)


def ordered_sum(inputs: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order given, as a new tensor; fp16 and bf16 are added in fp32 and rounded once."""
    narrow = inputs[0].dtype in (torch.float16, torch.bfloat16)
    total = inputs[0].float() if narrow else inputs[0].clone()
    for x in inputs[1:]:
        total += x
    return total.to(inputs[0].dtype)
