"""This records when each instruction of a step began and ended on a rank; steps that are not recorded cost nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from shardwise.backend import Backend
from shardwise.core.instruction import Instruction
from shardwise.core.recording import Event, Operation, RankStep
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.call import Call
from shardwise.runtime.handles import Handle
from shardwise.runtime.interpreter import Interpreter

TRACE = "trace"
"""This folder in a run's folder has recorded steps: a file of JSON lines for each rank, with a line for each step."""


def trace_name(rank: int) -> str:
    """Return the name of a rank's file in :data:`TRACE`."""
    return f"rank_{rank}.jsonl"


class _Waited:
    """This is the handle of a recorded operation: its first wait is stamped before and after."""

    def __init__(self, recorder: Recorder, place: int, handle: Handle) -> None:
        self._recorder, self._place, self._handle = recorder, place, handle

    def wait(self) -> None:
        self._recorder.wait(self._place, self._handle)


class Recorder:
    """This records the step that is taken inside of ``with``; all ranks of the interpreter's mesh record it together:
    the instructions, and every operation between ranks, also those inside of a unit.

    On a GPU times are those of the compute stream, read after the step.  ``stage`` gives the model's stage to which an
    instruction belongs.
    """

    def __init__(self, interpreter: Interpreter, stage: Callable[[Instruction], int] | None = None) -> None:
        self._interpreter, self._comm = interpreter, interpreter.comm
        self._stage = stage or (lambda one: 0 if one.unit >= 0 else -1)
        self._backend = Backend.of(self._comm.device)
        self._stamps: list[tuple[Instruction, Any, Any]] = []
        self._latest: dict[int, int] = {}  # the index there of the latest run of each position
        self._operations: list[tuple[Call, Any]] = []
        self._waits: dict[int, tuple[Any, Any]] = {}  # of the operations at these places
        self._moves: list[tuple[Any, Any]] = []

    def __enter__(self) -> Self:
        self._comm.barrier(what="the begin of a recorded step")
        self._settle()
        self._wall, self._begun = time.time(), self._stamp()
        self._interpreter.recorder = self._comm.recorder = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interpreter.recorder = self._comm.recorder = None
        self._ended = self._stamp()

    def run(self, position: int, one: Instruction, operate: Callable[[Instruction], None]) -> None:
        """Execute an instruction between two stamps."""
        start = self._stamp()
        operate(one)
        self._latest[position] = len(self._stamps)
        self._stamps.append((one, start, self._stamp()))

    def arrived(self, position: int) -> None:
        """Note that what an instruction had posted has been waited for."""
        place = self._latest[position]
        one, start, _ = self._stamps[place]
        self._stamps[place] = one, start, self._stamp()

    def posted(self, call: Call, handle: Handle) -> Handle:
        """Note that an operation between ranks has been posted; return the handle by which it is to be waited for."""
        self._operations.append((call, self._stamp()))
        return _Waited(self, len(self._operations) - 1, handle)

    def wait(self, place: int, handle: Handle) -> None:
        """Wait for the operation at ``place``, the first time between two stamps."""
        if self._interpreter.recorder is not self or place in self._waits:
            handle.wait()
            return
        start = self._stamp()
        handle.wait()
        self._waits[place] = start, self._stamp()

    def move(self, work: Callable[[], None]) -> None:
        """Let the host do its ``work`` for operations under way between two stamps."""
        start = self._stamp()
        work()
        self._moves.append((start, self._stamp()))

    def found(self, step: int, memory: int) -> RankStep:
        """Return the recorded step, which is over; on a GPU the host waits for it.  ``memory`` is in bytes."""
        self._settle()
        comm = self._comm
        lasting = set(self._latest.values())
        events = tuple(self._event(*stamps, place in lasting) for place, stamps in enumerate(self._stamps))
        pipeline = comm.mesh.group(comm.rank, PIPELINE)[0]
        return RankStep(
            step,
            comm.rank,
            comm.mesh.size,
            pipeline,
            socket.gethostname(),
            self._wall,
            self._since(self._ended),
            memory,
            events,
            tuple(map(self._operation, range(len(self._operations)))),
            sum(self._since(stop) - self._since(start) for start, stop in self._moves),
        )

    def _operation(self, place: int) -> Operation:
        call, posted = self._operations[place]
        ranks = call.group.ranks if call.pair else tuple(sorted(call.group.ranks))
        waited, arrived = self._waits.get(place, (posted, posted))
        return Operation(call.kind, ranks, call.queue, *map(self._since, (posted, waited, arrived)))

    def _event(self, one: Instruction, start: Any, stop: Any, lasting: bool) -> Event:
        peer = -1 if one.peer is None else self._comm.mesh.offset(self._comm.rank, *one.peer, wrap=True)
        times = self._since(start), self._since(stop)
        return Event(one.op, str(one.lane), self._stage(one), one.microbatch, peer, *times, str(one), lasting)

    def _settle(self) -> None:
        self._backend.synchronize(self._comm.device)

    def _stamp(self) -> Any:
        """Return a stamp of now: nanoseconds, or an event in the compute stream."""
        if not self._backend.asynchronous:
            return time.perf_counter_ns()
        return self._backend.event(self._comm.device, timing=True)

    def _since(self, stamp: Any) -> float:
        """Return the seconds from the start of the recording to a stamp."""
        return (
            float(self._begun.elapsed_time(stamp)) / 1e3 if self._backend.asynchronous else (stamp - self._begun) / 1e9
        )
