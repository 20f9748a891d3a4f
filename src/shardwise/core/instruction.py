"""One step of training, one instruction at a time.

A :class:`Program` is a flat list of these records.  They are data: the runtime executes them, `estimate`
prices them, `report` draws them and :func:`shardwise.core.check.check` proves that they neither race nor
deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What an instruction does."""

    COUNT = "COUNT"  # weights of the microbatches: count the targets, sum over the ranks
    FORWARD = "FORWARD"
    RECOMPUTE = "RECOMPUTE"  # forward again, from the kept inputs, just before backward
    BACKWARD = "BACKWARD"
    REDUCE = "REDUCE"  # sum a gradient buffer over mesh axes
    NORM = "NORM"  # global gradient norm, clipping coefficient, skip flag
    STEP = "STEP"  # optimizer update of one bucket
    SEND = "SEND"
    RECEIVE = "RECEIVE"


class Lane(StrEnum):
    """The queue that an instruction occupies; lanes run concurrently, each in issue order."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    SEND = "send"
    RECEIVE = "receive"
    HOST = "host"


@dataclass(frozen=True, slots=True, order=True)
class Buffer:
    """A named piece of a rank's memory: the unit of conflict between instructions.

    ``kind`` is one of ``param grad state saved activation gradient loss weight norm``; ``index`` is the
    bucket or unit, or -1; ``microbatch`` is -1 for what outlives a microbatch; ``version`` numbers weight
    versions.
    """

    kind: str
    index: int = -1
    microbatch: int = -1
    version: int = 0

    def __str__(self) -> str:
        text = self.kind if self.index < 0 else f"{self.kind}{self.index}"
        text += f".m{self.microbatch}" if self.microbatch >= 0 else ""
        return text + (f"@v{self.version}" if self.version else "")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation of one class of ranks.

    ``unit`` is a unit (FORWARD, BACKWARD, …) and ``bucket`` a flat buffer of parameters (REDUCE, STEP).
    ``axes`` are the mesh axes of the communicator that it uses, if any: a collective, also one inside a
    unit (a synchronised BatchNorm). ``peer`` is (axis, offset) of the other side of a SEND or RECEIVE.
    ``first`` lists the buckets whose gradient this BACKWARD writes first in the step and so overwrites; to
    all others it adds.  ``frees`` are the buffers that end with it.  ``waits`` are the positions of earlier instructions of the same program, on other
    lanes, that must be complete.
    """

    op: Op
    unit: int = -1
    bucket: int = -1
    microbatch: int = -1
    slot: int = -1
    version: int = 0
    peer: tuple[str, int] | None = None
    axes: tuple[str, ...] = ()
    lane: Lane = Lane.COMPUTE
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    first: tuple[int, ...] = ()
    frees: tuple[Buffer, ...] = ()
    waits: tuple[int, ...] = ()

    def __str__(self) -> str:
        words = [str(self.op)]
        words += [f"u{self.unit}"] if self.unit >= 0 else []
        words += [f"b{self.bucket}"] if self.bucket >= 0 else []
        words += [f"m{self.microbatch}"] if self.microbatch >= 0 else []
        words += [f"slot{self.slot}"] if self.slot >= 0 else []
        words += [f"v{self.version}"] if self.version else []
        if self.peer is not None:
            words.append(f"{'to' if self.op is Op.SEND else 'from'} {self.peer[0]}{self.peer[1]:+d}")
        words += [f"over {','.join(self.axes)}"] if self.axes else []
        words += [f"wait {','.join(map(str, self.waits))}"] if self.waits else []
        return " ".join(words)
