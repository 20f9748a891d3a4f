"""This backend runs all ranks of a mesh as threads of one process, for tests and for ``verify``.

It is strict where real backends are lenient, so that a missing wait shows: outputs are filled with 0xFF bytes (NaN)
while an operation is pending and are written only by ``wait()``; inputs are copied when the operation is posted and
must be unchanged at ``wait()``; it is an error if members disagree on an operation, or if a rank ends while others
still need it.

On a device with streams all ranks share the device, each with a stream of its own, and no host waits for it.  Whether a
tensor was written too early is then checked when the rank has ended.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.communicators import CONTROL, Members, groups
from shardwise.core.mesh import Mesh
from shardwise.runtime.call import Call, CommunicationTimeout
from shardwise.runtime.communicator import Communicator, as_bytes, ordered_sum
from shardwise.runtime.handles import Handle
from shardwise.runtime.stream_tensors import StreamTensors

T = TypeVar("T")
Combine: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
Channel: TypeAlias = tuple[str, tuple[int, ...], str]

END = 5.0  # the most seconds that ranks take to end once they are interrupted
MAX_DELAY = 2e-3  # the most seconds that the delay mode adds to a post or a wait


def run_ranks(
    mesh: Mesh,
    fn: Callable[[ThreadCommunicator], T],
    *,
    timeout: float = 60.0,
    delay_seed: int | None = None,
    sends_wait: bool = False,
    first_use_blocks: bool = False,
    device: torch.device | str = "cpu",
    on_wait: Callable[[int, str | None], None] | None = None,
) -> list[T]:
    """Run ``fn`` once per rank of the mesh, each in a thread of its own, and return the results in rank order.

    ``timeout`` is in seconds; ``delay_seed`` delays posts and waits at random; ``sends_wait`` lets a send complete only
    once its receive is posted; ``first_use_blocks`` lets the first use of an unprepared communicator block its rank
    until all members have reached theirs, as NCCL's does; ``on_wait`` is called with the rank and what :data:`OnWait`
    gets.  The first exception stops the other ranks at their next communication, or where they are if they reach none,
    and is raised here with a note naming its rank.
    """
    state = _SharedState(mesh.size, timeout, first_use_blocks)
    results: dict[int, T] = {}
    device = torch.device(device)
    backend = Backend.of(device)

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        heard = None if on_wait is None else lambda text: on_wait(rank, text)
        communicator = ThreadCommunicator(mesh, rank, state, device, delay_seed, sends_wait, heard)
        try:
            # One backward at a time per thread: autograd's shared worker threads would run it without this
            # thread's state.
            with backend.queue(device), torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(communicator)
                communicator.check_intact()
        except BaseException as error:  # SystemExit too: the other ranks must not wait for this one
            state.fail(rank, error)
        else:
            state.leave(rank)

    backend.synchronize(device)  # the ranks' inputs are complete, whatever stream they were made in
    threads_before = torch.get_num_threads()
    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(mesh.size)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not state.expired():
                thread.join(0.05)
    except BaseException as error:
        state.fail(-1, error)
        raise
    finally:
        torch.set_num_threads(threads_before)
        _interrupt([thread for thread in threads if thread.is_alive()])
    state.raise_failure()
    backend.synchronize(device)  # and so are their results
    return [results[rank] for rank in range(mesh.size)]


def _interrupt(threads: Sequence[threading.Thread]) -> None:
    """End threads that still compute after a failure, such as captures: they would disturb what runs next in this
    process, for torch keeps some modes of a capture for all threads. One that waits in code that is not Python's
    stays."""
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    end = time.monotonic() + END
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


class ThreadCommunicator(Communicator):
    """The communicator of one rank of :func:`run_ranks` sums in group order, and fp16 and bf16 in fp32."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        state: _SharedState,
        device: torch.device,
        delay_seed: int | None,
        sends_wait: bool,
        on_wait: Callable[[str | None], None] | None,
    ) -> None:
        super().__init__(mesh, rank, device, state.timeout, on_wait)
        self._state, self._sends_wait, self._delay_seed = state, sends_wait, delay_seed
        self._posted: dict[Channel, int] = {}
        self._random: dict[str, random.Random] = {}
        # (whether the operation's tensor is intact, operation): the flag has not been read from the device yet.
        self._unseen: list[tuple[Tensor | bool, Call]] = []
        self.first_use_blocks = state.first_use_blocks
        self.shares_objects = mesh.size > 1
        self._prepared.update(groups(mesh, mesh.names, CONTROL))

    def _host(self) -> ThreadCommunicator:
        return ThreadCommunicator(
            self.mesh, self.rank, self._state, torch.device("cpu"), self._delay_seed, self._sends_wait, self.on_wait
        )

    def _prepare(self, new: Sequence[Members]) -> None:
        """Make nothing, but check that all ranks ask for the same communicators."""
        if self.mesh.size > 1:
            call, host = Call("prepare", self.group(self.mesh.names), CONTROL, ""), self.host
            listed = f"of {len(new)} communicators, {zlib.crc32(repr(new).encode()):08x},"
            assert isinstance(host, ThreadCommunicator)
            host._post(call, torch.empty(0), None, lambda inputs: inputs, listed).wait()

    def _all_reduce(self, call: Call, x: Tensor) -> Handle:
        return self._post(call, x, x, lambda inputs: [ordered_sum(inputs)] * len(inputs))

    def _all_gather(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        return self._post(call, x, out, lambda inputs: [torch.cat(inputs)] * len(inputs))

    def _reduce_scatter(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        return self._post(call, x, out, lambda inputs: list(ordered_sum(inputs).chunk(len(inputs))))

    def _all_to_all(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        def combine(inputs: list[Tensor]) -> list[Tensor]:
            parts = [x.chunk(len(inputs)) for x in inputs]
            return [torch.cat([part[member] for part in parts]) for member in range(len(inputs))]

        return self._post(call, x, out, combine)

    def _shift(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        return self._post(call, x, out, lambda inputs: [inputs[-1], *inputs[:-1]])

    def _broadcast(self, call: Call, x: Tensor, root: int) -> Handle:
        out = None if call.group.index == root else x
        return self._post(call, x, out, lambda inputs: [inputs[root]] * len(inputs), f"from index {root}")

    def _send(self, call: Call, x: Tensor, to_rank: int) -> Handle:
        return self._post(call, x, None, _message, buffered=not self._sends_wait)

    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Handle:
        return self._post(call, x, x, _message)

    def _barrier(self, call: Call) -> None:
        self._post(call, torch.empty(0, device=self.device), None, lambda inputs: inputs).wait()

    def _post(
        self,
        call: Call,
        x: Tensor,
        out: Tensor | None,
        combine: Combine,
        detail: str = "",
        buffered: bool = False,
    ) -> Handle:
        self._pause(call.lane)
        if self.first_use_blocks and call.members not in self._prepared:
            self._state.start(call, self.rank)
            self._prepared.add(call.members)
        channel = (self.device.type, call.group.ranks, call.queue)
        position = self._posted[channel] = self._posted.get(channel, -1) + 1
        agreed = f"{'message' if call.pair else call.kind} {detail} of {x.numel()} elements of {x.dtype}"
        snapshot = x.clone()
        if out is not None:
            as_bytes(out).fill_(0xFF)
        brought = StreamTensors([snapshot], self.device)
        posted = self._state.enter((channel, position), call, self.rank, brought, agreed, combine)
        return _ThreadHandle(self, posted, call, x, snapshot, out, buffered)

    def _pause(self, lane: str) -> None:
        if self._delay_seed is None:
            return
        source = self._random.get(lane)
        if source is None:
            source = self._random[lane] = random.Random(f"{self._delay_seed}/{self.rank}/{lane}")
        time.sleep(source.choice((0.0, source.uniform(0.0, MAX_DELAY))))

    def _expect_intact(self, intact: Tensor | bool, call: Call) -> None:
        self._unseen.append((intact, call))
        if not Backend.of(self.device).asynchronous:
            self.check_intact()

    def check_intact(self) -> None:
        """Raise :class:`CommunicationError` if an operation's tensor was written before ``wait()``."""
        while self._unseen:
            intact, call = self._unseen.pop(0)
            if not bool(intact):
                raise call.error("a tensor of a pending operation was written before wait()", self.rank)

    def _await(self, posted: _Posted, call: Call) -> None:
        self._pause(call.lane)
        if posted.over.is_set():
            self._state.wait(posted, call, self.rank)
        else:
            self._noted(call, self._state.wait, posted, call, self.rank)


class _ThreadHandle:
    def __init__(
        self,
        communicator: ThreadCommunicator,
        posted: _Posted,
        call: Call,
        x: Tensor,
        snapshot: Tensor,
        out: Tensor | None,
        buffered: bool,
    ) -> None:
        self._communicator, self._posting, self._call = communicator, posted, call
        self._x, self._snapshot, self._out, self._buffered = x, snapshot, out, buffered
        self._complete = False

    def wait(self) -> None:
        if self._complete:
            return
        if not self._buffered:
            self._communicator._await(self._posting, self._call)
        self._complete = True
        if self._out is not None:
            intact: Tensor | bool = (as_bytes(self._out) == 0xFF).all()
        elif Backend.of(self._x.device).asynchronous:
            intact = (as_bytes(self._x) == as_bytes(self._snapshot)).all()
        else:
            intact = torch.equal(as_bytes(self._x), as_bytes(self._snapshot))
        self._communicator._expect_intact(intact, self._call)
        if self._out is not None:
            assert self._posting.outputs is not None
            self._out.copy_(self._posting.outputs.read(self._call.group.index))


class _Posted:
    """This is an operation with the inputs of the ranks that have posted it."""

    def __init__(self, agreed: str) -> None:
        self.agreed = agreed
        self.inputs: dict[int, StreamTensors] = {}
        self.outputs: StreamTensors | None = None
        self.complete = False
        self.over = threading.Event()  # set once it is complete, or never can be


class _SharedState:
    """This is the state that the threads of all ranks share."""

    def __init__(self, size: int, timeout: float, first_use_blocks: bool) -> None:
        self.size, self.timeout, self.first_use_blocks = size, timeout, first_use_blocks
        self._lock = threading.Lock()
        self._started: dict[Members, set[int]] = {}  # the ranks that have reached the first use of each
        self._come = threading.Condition(self._lock)
        self._under_way: dict[tuple[Channel, int], tuple[_Posted, Call]] = {}
        self._ended: set[int] = set()
        self._failure: tuple[int, BaseException] | None = None
        self._failed_at = 0.0

    def enter(
        self, key: tuple[Channel, int], call: Call, rank: int, x: StreamTensors, agreed: str, combine: Combine
    ) -> _Posted:
        """Add ``x`` as the rank's input of the operation; the last rank to arrive computes the outputs for all."""
        ranks = call.group.ranks
        with self._lock:
            self._stop_if_failed(call, rank)
            if key not in self._under_way:
                self._under_way[key] = _Posted(agreed), call
            posted, _ = self._under_way[key]
            if posted.agreed != agreed:
                others = ", ".join(map(str, posted.inputs))
                raise call.error(f"rank {rank} has {agreed} where rank {others} has {posted.agreed}", rank)
            posted.inputs[rank] = x
            last = len(posted.inputs) == len(ranks)
            if last:
                del self._under_way[key]
            elif self._ended.intersection(ranks) - posted.inputs.keys():
                posted.over.set()
        if last:
            outputs = combine([posted.inputs[member].read() for member in ranks])
            posted.outputs = StreamTensors(outputs, x.device)
            posted.complete = True
            posted.over.set()
        return posted

    def start(self, call: Call, rank: int) -> None:
        """Block until all members of a communicator have reached its first use."""
        ranks = set(call.group.ranks)
        with self._come:
            come = self._started.setdefault(call.members, set())
            come.add(rank)
            self._come.notify_all()
            self._come.wait_for(
                lambda: come == ranks or self._failure is not None or self._ended & (ranks - come), self.timeout
            )
            self._stop_if_failed(call, rank)
            if come != ranks:
                reason = f"stuck in the start of its communicator ({call.members})"
                raise call.error(reason, rank, sorted(ranks - come), CommunicationTimeout)

    def wait(self, posted: _Posted, call: Call, rank: int) -> None:
        on_time = posted.over.wait(self.timeout)
        with self._lock:
            self._stop_if_failed(call, rank)
            missing = [member for member in call.group.ranks if member not in posted.inputs]
            ended = sorted(self._ended.intersection(missing))
        if posted.complete:
            return
        if ended:
            raise call.error(f"rank {', '.join(map(str, ended))} has ended", rank, missing)
        assert not on_time
        raise call.error(f"no end after {self.timeout:g} s", rank, missing, CommunicationTimeout)

    def leave(self, rank: int) -> None:
        """Note that the rank is done, and end the waits for what it has not posted."""
        with self._come:
            self._come.notify_all()
            self._ended.add(rank)
            for posted, call in self._under_way.values():
                if rank in call.group.ranks and rank not in posted.inputs:
                    posted.over.set()

    def fail(self, rank: int, error: BaseException) -> None:
        with self._come:
            self._come.notify_all()
            if self._failure is None:
                self._failure, self._failed_at = (rank, error), time.monotonic()
            for posted, _ in self._under_way.values():
                posted.over.set()

    def expired(self) -> bool:
        """Return whether a rank failed so long ago that a rank still running evidently does not communicate."""
        return self._failure is not None and time.monotonic() - self._failed_at > min(self.timeout, 10.0)

    def raise_failure(self) -> None:
        if self._failure is not None:
            rank, error = self._failure
            error.add_note(f"raised on rank {rank} of {self.size}")
            raise error

    def _stop_if_failed(self, call: Call, rank: int) -> None:
        if self._failure is not None:
            raise call.error(f"rank {self._failure[0]} has failed", rank)


def _message(inputs: list[Tensor]) -> list[Tensor]:
    return [inputs[0], inputs[0]]
