"""When each instruction of a step began and ended on a rank: recorded for the steps that are asked for, at no cost to
the others.
"""

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
"""The folder of recorded steps in that of a run: a file of JSON lines for each rank, a line for each step."""


def trace_name(rank: int) -> str:
    """The file of a rank in :data:`TRACE`."""
    return f"rank_{rank}.jsonl"


class Event(NamedTuple):
    """An instruction from ``start`` to ``stop``, in seconds since the recording began on its rank.

    What is only posted, such as a collective, stops where it has been waited for.  What is run again has an event for
    each time. ``peer`` is the rank at the other side of a message, else -1; ``text`` the instruction in words.
    ``lasting``: it was not run again later.
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
    """A step of one rank, ``seconds`` long.

    ``wall`` is when its recording began by its host's clock, in seconds since the epoch: it puts the ranks of a host on
    one axis. Ranks of several hosts began after a barrier.  ``pipeline`` is the first rank of those that have the
    stages of one model together. ``memory`` is the most that the rank has held so far, in bytes.
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
        """As JSON; :meth:`from_dict` reads it back unchanged."""
        return vars(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RankStep:
        """What :meth:`to_dict` gave; KeyError, TypeError or ValueError where it is something else."""
        return RankStep(**{**values, "events": tuple(Event(Op(op), *rest) for op, *rest in values["events"])})


class Recorder:
    """Records the step that is taken inside of ``with``; all ranks of the interpreter's mesh record it together.

    On a GPU times are those of the compute stream, read after the step.  ``stage`` says which stage of the model an
    instruction is of.
    """

    def __init__(self, interpreter: Interpreter, stage: Callable[[Instruction], int] | None = None) -> None:
        self._interpreter, self._comm = interpreter, interpreter.comm
        self._stage = stage or (lambda one: 0 if one.unit >= 0 else -1)
        self._backend = Backend.of(self._comm.device)
        self._stamps: list[tuple[Instruction, Any, Any]] = []
        self._latest: dict[int, int] = {}  # place in there by position

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
        """What an instruction had posted has been waited for."""
        place = self._latest[position]
        one, start, _ = self._stamps[place]
        self._stamps[place] = one, start, self._stamp()

    def found(self, step: int, memory: int) -> RankStep:
        """The step that is over; on a GPU the host waits for it."""
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
        """Now: nanoseconds, or an event in the compute stream."""
        if not self._backend.asynchronous:
            return time.perf_counter_ns()
        return self._backend.event(self._comm.device, timing=True)

    def _since(self, stamp: Any) -> float:
        """Seconds from the begin to a stamp."""
        return (
            float(self._begun.elapsed_time(stamp)) / 1e3 if self._backend.asynchronous else (stamp - self._begun) / 1e9
        )
