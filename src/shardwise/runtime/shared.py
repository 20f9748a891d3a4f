"""The CPU processes of one host communicate through memory that all of them map.

There is no background thread: posting publishes where an input lies, ``wait()`` does this rank's part of all pending
operations (a rank that waits for one owes the others its part of the rest), and ``progress()`` does a bounded bit of
it.  :mod:`shardwise.runtime.channel` is the protocol between the ranks; here are the collectives in its terms, and
waiting.
"""

from __future__ import annotations

import json
import os
import select
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.errors import ShardwiseError
from shardwise.core.mesh import Axes, Mesh
from shardwise.runtime.call import Call, CommunicationTimeout
from shardwise.runtime.channel import ASLEEP, CLOSED, CONTROL_BYTES, Board, Channel, Operation, Source, Work
from shardwise.runtime.communicator import START_TIMEOUT, Communicator, OnWait, as_bytes, ordered_sum
from shardwise.runtime.handles import Handle
from shardwise.runtime.rendezvous import Rendezvous, rendezvous
from shardwise.runtime.segments import SharedSegment, map_segment, unsupported
from shardwise.runtime.wakeup import Waker, WakeupPipe

CHUNK = 256 << 10  # bytes that are summed and written back at a time, while they are in the cache
LINE = 64  # bytes of a cache line: two ranks never write to the same one
# How often a waiting rank looks at the counters before it sleeps; the second, where another rank needs its core.
SPINS, FEW_SPINS = 300, 10
NAP = 0.01  # the most seconds that it sleeps before it looks at the counters, the clock and the peers


def available(mesh: Mesh) -> str | None:
    """Return why ``mesh`` cannot communicate through shared memory, or None."""
    reason = unsupported()
    if reason is not None:
        return reason
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) < mesh.size:
        return f"shared memory needs all ranks on one host; of {mesh.size} only {local} are on this one"
    return None


class SharedMemoryCommunicator(Communicator):
    """Each rank is a CPU process, all on one host, and uses its communicator from one thread at a time.

    Sums are made in group order, those of more than two fp16 or bf16 values in fp32, so that all ranks get the same
    bits.
    """

    shares_memory = True

    def __init__(self, mesh: Mesh, met: Rendezvous, timeout: float = 300.0, on_wait: OnWait | None = None) -> None:
        """Meet the other ranks.  Raises :class:`ShardwiseError`, on all of them, where they cannot share memory."""
        reason = available(mesh)
        if reason is not None or met.size != mesh.size:
            raise ShardwiseError(reason or f"mesh: {mesh.size} ranks on {mesh.shape}, but {met.size} processes")
        super().__init__(mesh, met.rank, torch.device("cpu"), timeout, on_wait)
        self._store = met.store  # rank 0 may host it: it must outlive the start of the others
        self._control = SharedSegment(CONTROL_BYTES)
        self._spins = SPINS if mesh.size <= len(os.sched_getaffinity(0)) else FEW_SPINS
        self._pipe = WakeupPipe()
        self._board, self._health = _meet(met, self._control, self._pipe)
        self._channels: dict[tuple[tuple[int, ...], str], Channel] = {}
        self._active: dict[Channel, None] = {}
        self._common: set[int] = set()  # addresses of buffers that are one piece of memory for all members of a group
        self.barrier(what="the start")

    @classmethod
    def from_environment(
        cls, mesh: Mesh, timeout: float = 300.0, on_wait: OnWait | None = None
    ) -> SharedMemoryCommunicator:
        """Meet the other processes that torchrun's environment variables name."""
        return cls(mesh, rendezvous("shared", max(timeout, START_TIMEOUT)), timeout, on_wait)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate as :meth:`Communicator.allocate` says, but ranks need not agree, and memory is never given back.

        Raises :class:`ShardwiseError` where the machine has too little memory.
        """
        return self._board.arena.allocate(numel * dtype.itemsize).view(dtype)

    def common(self, numel: int, dtype: torch.dtype, axes: Axes) -> Tensor | None:
        group, nbytes = self.group(axes), numel * dtype.itemsize
        if group.size == 1 or not numel:
            return None
        place = torch.zeros(2, dtype=torch.int64)
        if group.index == 0:
            memory = self._board.arena.allocate(nbytes)
            place.copy_(torch.tensor(self._board.arena.locate(memory)))
        self.broadcast(place, axes, what="the place of common memory").wait()
        if group.index:
            fd, start = place.tolist()
            memory = self._board.segment(group.ranks[0], fd)[start : start + nbytes]
        self._common.add(memory.data_ptr())
        return memory.view(dtype)

    def progress(self) -> None:
        if self._active:
            self._advance()

    def close(self) -> None:
        self._board.controls[self.rank][CLOSED] = 1
        self._board.wake(range(self.mesh.size))
        self._health.close()
        self._control.close()
        self._board.close()
        self._pipe.close()
        for channel in self._channels.values():
            channel.close()

    def _all_reduce(self, call: Call, x: Tensor) -> Handle:
        return self._post(call, x, 1, x, _sum_everywhere(call, x), result=x)

    def _all_reduce_into(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        if call.group.size > 2:  # otherwise each would read the inputs of all, and not only its part
            return self._post(call, x, 1, x, _sum_everywhere(call, x), result=out)

        def work(source: Source, start: int, stop: int) -> None:
            _sum_into([out[start:stop]], [source(member, 0) for member in range(call.group.size)])

        return self._post(call, x, 1, x, work, detail="apart")

    def _all_gather(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        if out.data_ptr() in self._common:
            return self._post(call, None, 1, as_bytes(x), _nothing, detail="in common memory")
        target = as_bytes(out).view(call.group.size, -1)
        in_place = target[call.group.index].data_ptr() == x.data_ptr()

        def work(source: Source, start: int, stop: int) -> None:
            for member in range(call.group.size):
                if member != call.group.index or not in_place:
                    target[member, start:stop].copy_(source(member, 0))

        return self._post(call, as_bytes(x), 1, as_bytes(x), work)

    def _reduce_scatter(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        def work(source: Source, start: int, stop: int) -> None:
            inputs = [source(member, call.group.index) for member in range(call.group.size)]
            _sum_into([out[start:stop]], inputs)

        return self._post(call, x, call.group.size, x, work)

    def _push(self, call: Call, x: Tensor, ranges: Sequence[tuple[int, int]]) -> Handle:
        own = dict(enumerate(ranges)).get(call.group.index, (0, 0))

        def work(source: Source, start: int, stop: int) -> None:
            first, last = max(start, own[0]), min(stop, own[1])
            if first < last:
                inputs = [source(member, 0)[first - start : last - start] for member in range(call.group.size)]
                _sum_into([x[first:last]], inputs)

        return self._post(call, x, 1, x, work, detail=str(ranges))

    def _all_to_all(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        target = as_bytes(out).view(call.group.size, -1)

        def work(source: Source, start: int, stop: int) -> None:
            for member in range(call.group.size):
                target[member, start:stop].copy_(source(member, call.group.index))

        return self._post(call, as_bytes(x), call.group.size, as_bytes(x), work)

    def _shift(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        target = as_bytes(out)

        def work(source: Source, start: int, stop: int) -> None:
            target[start:stop].copy_(source(call.group.before, 0))

        return self._post(call, as_bytes(x), 1, as_bytes(x), work)

    def _broadcast(self, call: Call, x: Tensor, root: int) -> Handle:
        target = as_bytes(x)

        def work(source: Source, start: int, stop: int) -> None:
            if call.group.index != root:
                target[start:stop].copy_(source(root, 0))

        return self._post(call, target if call.group.index == root else None, 1, target, work, detail=f"{root}")

    def _send(self, call: Call, x: Tensor, to_rank: int) -> Handle:
        return self._post(call, as_bytes(x), 1, as_bytes(x), _nothing)

    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Handle:
        target = as_bytes(x)

        def work(source: Source, start: int, stop: int) -> None:
            target[start:stop].copy_(source(0, 0))

        return self._post(call, None, 1, target, work, reads_only=True)

    def _barrier(self, call: Call) -> None:
        self._post(call, None, 1, torch.empty(0, dtype=torch.uint8), _nothing).wait()

    def _post(
        self,
        call: Call,
        shared: Tensor | None,
        parts: int,
        x: Tensor,
        work: Work,
        *,
        result: Tensor | None = None,
        reads_only: bool = False,
        detail: str = "",
    ) -> Handle:
        """Post an :class:`Operation`: ``x`` gives its size and dtype, and ``shared`` is what the others may read."""
        key = (call.group.ranks, call.queue)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(self._board, *key)
        kind = "message" if call.pair else call.kind
        signature = zlib.crc32(f"{kind} {detail} {x.dtype} {x.numel()}".encode())
        operation = Operation(call, shared, parts, x.numel() // parts, x.dtype, signature, work, result, reads_only)
        channel.post(operation)
        self._active[channel] = None
        return _SharedHandle(self, channel, operation)

    def _advance(self) -> bool:
        moved = False
        for channel in list(self._active):
            moved |= channel.advance()
            if channel.idle:
                del self._active[channel]
        return moved

    def _wait(self, channel: Channel, operation: Operation) -> None:
        """Work on everything pending until the operation is complete; look often at first, and then when woken."""
        seconds = self._limit(operation.call)
        deadline, idle = time.monotonic() + seconds, 0
        try:
            while operation.remaining:
                if self._advance():
                    continue
                if idle == 0 and self.on_wait is not None:
                    self.on_wait(str(operation.call))
                idle += 1
                if idle < self._spins:
                    os.sched_yield()
                else:
                    self._sleep()
                    self._give_up(channel, operation.call, deadline)
        finally:
            if idle and self.on_wait is not None:
                self.on_wait(None)

    def _sleep(self) -> None:
        """Sleep until another rank has published something, but no longer than a moment."""
        own = self._board.controls[self.rank]
        own[ASLEEP] = 1
        try:
            if not self._advance():  # what came before others could see that this rank sleeps
                self._pipe.sleep(NAP)
        finally:
            own[ASLEEP] = 0

    def _give_up(self, channel: Channel, call: Call, deadline: float) -> None:
        """Raise if a member that is waited for is gone, or the time is up."""
        gone = self._health.gone() | {
            rank for rank, control in enumerate(self._board.controls) if control[CLOSED] and rank != self.rank
        }
        late = channel.late()  # after `gone`: what a rank has posted before it went still counts
        lost = gone.intersection(late)
        if lost:
            raise call.error(f"rank {', '.join(map(str, sorted(lost)))} is gone", self.rank, late)
        if time.monotonic() > deadline:
            raise call.error(f"no end after {self._limit(call):g} s", self.rank, late, CommunicationTimeout)


class _SharedHandle:
    def __init__(self, communicator: SharedMemoryCommunicator, channel: Channel, operation: Operation) -> None:
        self._communicator, self._channel, self._operation = communicator, channel, operation

    def wait(self) -> None:
        if self._operation.remaining:
            self._communicator._wait(self._channel, self._operation)


class _Health:
    """This tells which of the other processes have ended, also if their parent has not yet reaped them."""

    def __init__(self, pids: dict[int, int]) -> None:
        self._ranks: dict[int, int] = {}
        self._poll = select.poll()
        for rank, pid in pids.items():
            with suppress(OSError):  # a kernel or container without pidfds: then only the time-out tells
                handle = os.pidfd_open(pid)
                self._ranks[handle] = rank
                self._poll.register(handle, select.POLLIN)

    def gone(self) -> set[int]:
        return {self._ranks[handle] for handle, _ in self._poll.poll(0)}

    def close(self) -> None:
        for handle in self._ranks:
            self._poll.unregister(handle)
            os.close(handle)
        self._ranks.clear()


def _meet(met: Rendezvous, control: SharedSegment, pipe: WakeupPipe) -> tuple[Board, _Health]:
    """Exchange addresses through the store, map the control segments of all ranks, and open a waker of each.

    If this fails on any rank, all ranks raise :class:`ShardwiseError`, so that all can choose another backend.
    """
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    met.store.set(f"address/{met.rank}", json.dumps([host, os.getpid(), control.fd, pipe.fd]))
    pids, controls, wakers, verdict = [], [], {}, ""
    for rank in range(met.size):
        peer_host, pid, fd, pipe_fd = json.loads(met.store.get(f"address/{rank}"))
        pids.append(pid)
        try:
            if peer_host != host:
                raise OSError("it runs on another host or in another container")
            memory = control.memory if rank == met.rank else map_segment(pid, fd)
            controls.append(memoryview(memory).cast("B").cast("q"))
            if rank != met.rank:
                wakers[rank] = Waker(pid, pipe_fd)
        except OSError as error:
            verdict = f"rank {met.rank} cannot map the memory of rank {rank}: {error}"
    met.store.set(f"verdict/{met.rank}", verdict)
    verdicts = [met.store.get(f"verdict/{rank}").decode() for rank in range(met.size)]
    if any(verdicts):
        raise ShardwiseError("shared memory: " + "; ".join(filter(None, verdicts)))
    health = _Health({rank: pid for rank, pid in enumerate(pids) if rank != met.rank})
    return Board(met.rank, pids, controls, wakers), health


def _sum_everywhere(call: Call, x: Tensor) -> Work:
    """Return the work of an all-reduce: each member sums its part of the cache lines and writes the sum to all."""
    size, me, step = call.group.size, call.group.index, max(1, LINE // x.itemsize)

    def work(source: Source, start: int, stop: int) -> None:
        lines = -(-(stop - start) // step)
        mine = slice(lines * me // size * step, min(lines * (me + 1) // size * step, stop - start))
        inputs = [source(member, 0)[mine] for member in range(size)]
        _sum_into(inputs, inputs)

    return work


def _sum_into(outs: list[Tensor], inputs: list[Tensor]) -> None:
    """Put the sum of ``inputs``, in that order, into all ``outs`` chunk by chunk; an out may be an input."""
    step = CHUNK // inputs[0].itemsize
    if inputs[0].numel() <= step:
        _sum_chunk(outs, inputs)
        return
    for chunks in zip(*(torch.split(x, step) for x in (*outs, *inputs)), strict=True):
        _sum_chunk(chunks[: len(outs)], chunks[len(outs) :])


def _sum_chunk(outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if len(inputs) == 2:
        total = torch.add(inputs[0], inputs[1], out=outs[0])
    else:
        total = ordered_sum(inputs)
        outs[0].copy_(total)
    for out in outs[1:]:
        out.copy_(total)


def _nothing(source: Source, start: int, stop: int) -> None:
    """Do nothing: this is the work of a rank that only provides its input."""
