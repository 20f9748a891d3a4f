"""This records when each instruction of a step began and ended on a rank; steps that are not recorded cost nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from shardwise.backend import Backend
from shardwise.core.instruction import Instruction, Op
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.interpreter import Interpreter

TRACE = "trace"
"""This folder in a run's folder has recorded steps: a file of JSON lines for each rank, with a line for each step."""


def trace_name(rank: int) -> str:
    """Return the name of a rank's file in :data:`TRACE`."""
    return f"rank_{rank}.jsonl"


class Event(NamedTuple):
    """An event is an instruction from ``start`` to ``stop``, in seconds since the recording began on its rank.

    An operation that is only posted, such as a collective, stops where it has been waited for.  An instruction that is
    run again has an event for each time, and ``lasting`` says that it was not run again later.  ``peer`` is the rank at
    the other side of a message, else -1; ``text`` is the instruction in words.
    """

    op: Op
    lane: str
    stage: int
    microbatch: int
    peer: int
    start: float
    stop: float
    text: str
    lasting: bool = True


@dataclass(frozen=True)
class RankStep:
    """This is one rank's part of a step, which took ``seconds``; ``ranks`` is the number of all ranks.

    ``wall`` is when its recording began by its host's clock, in seconds since the epoch: it puts the ranks of a host on
    one time axis.  Ranks of several hosts began after a barrier.  ``pipeline`` is the first of the ranks that have the
    stages of one model together.  ``memory`` is the most bytes that the rank has held so far.
    """

    step: int
    rank: int
    ranks: int
    pipeline: int
    host: str
    wall: float
    seconds: float
    memory: int
    events: tuple[Event, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the step as values for JSON; :meth:`from_dict` reads them back unchanged."""
        return vars(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RankStep:
        """Return the step that :meth:`to_dict` was called on; other values raise KeyError, TypeError or ValueError."""
        return RankStep(**{**values, "events": tuple(Event(Op(op), *rest) for op, *rest in values["events"])})


class Recorder:
    """This records the step that is taken inside of ``with``; all ranks of the interpreter's mesh record it together.

    On a GPU times are those of the compute stream, read after the step.  ``stage`` gives the model's stage to which an
    instruction belongs.
    """

    def __init__(self, interpreter: Interpreter, stage: Callable[[Instruction], int] | None = None) -> None:
        self._interpreter, self._comm = interpreter, interpreter.comm
        self._stage = stage or (lambda one: 0 if one.unit >= 0 else -1)
        self._backend = Backend.of(self._comm.device)
        self._stamps: list[tuple[Instruction, Any, Any]] = []
        self._latest: dict[int, int] = {}  # the index there of the latest run of each position

    def __enter__(self) -> Self:
        self._comm.barrier(what="the begin of a recorded step")
        self._settle()
        self._wall, self._begun = time.time(), self._stamp()
        self._interpreter.recorder = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interpreter.recorder = None
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
        )

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
