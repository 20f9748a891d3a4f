"""Training, one instruction at a time.

A :class:`Program` is a flat list of these records.  They are data: the runtime executes them, `estimate`
prices them, `report` draws them and :func:`shardwise.core.check.check` proves that they neither race nor
deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """What an instruction does."""

    COUNT = "COUNT"  # weights of the microbatches: count the targets, sum over the ranks
    FORWARD = "FORWARD"
    RECOMPUTE = "RECOMPUTE"  # forward again, from the kept inputs, just before backward
    BACKWARD = "BACKWARD"
    BACKWARD_INPUT = "BACKWARD_INPUT"  # BACKWARD without the weight gradients of products, whose operands it leaves
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"  # the weight gradients of products, from these operands; reads no parameters
    GATHER = "GATHER"  # make parameters whole from their shards, in a slot or in their own buffer
    ROUND = "ROUND"  # a gradient buffer into a slot of the dtype in which it is summed over ranks
    REDUCE = "REDUCE"  # sum a gradient buffer or a slot over mesh axes, or the loss, or the norms
    ADD = "ADD"  # a reduced slot's own shard to the gradient
    NORM = "NORM"  # norms of this rank's shards of all gradients
    DECIDE = "DECIDE"  # from all norms: the global one, clipping coefficient, skip flag, loss scale
    STASH = "STASH"  # a copy of parameters in a slot, before they are updated: microbatches under way use them still
    BACKUP = "BACKUP"  # a copy of all that STEP changes of a bucket, in case that VALIDATE finds it wrong
    STEP = "STEP"  # optimizer update of one bucket
    # the norm over all stages is here: if the update by this one's alone was wrong, go back to before it
    VALIDATE = "VALIDATE"
    REPORT = "REPORT"  # the loss and the norm of a batch are known
    SEND = "SEND"  # live tensors, or their gradients, to another stage
    RECEIVE = "RECEIVE"


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What is true of every instruction of an op."""

    does: str  # in words
    task: str = (
        ""  # the kind of task in a timetable that it is a part of: F, B, I or W (a RECOMPUTE may be a part of I)
    )
    carries: str = ""  # what it communicates: inside of its unit, of a bucket, or of a batch
    runs_unit: bool = False  # it runs the graph of its unit, which reads parameters and may communicate
    repeats: bool = False  # it may be run again where an update turns out to be wrong


OP_INFO: Mapping[Op, OpInfo] = {
    Op.COUNT: OpInfo("counting the targets", carries="targets", repeats=True),
    Op.FORWARD: OpInfo("forward", task="F", carries="forward", runs_unit=True, repeats=True),
    Op.RECOMPUTE: OpInfo("forward again", task="B", carries="recompute", runs_unit=True),
    Op.BACKWARD: OpInfo("backward", task="B", carries="backward", runs_unit=True),
    Op.BACKWARD_INPUT: OpInfo("backward to the inputs", task="I", carries="backward", runs_unit=True),
    Op.BACKWARD_WEIGHT: OpInfo("backward to the weights", task="W"),
    Op.GATHER: OpInfo("gathering the parameters", carries="parameters", repeats=True),
    Op.ROUND: OpInfo("rounding the gradient"),
    Op.REDUCE: OpInfo("summing", carries="gradients"),
    Op.ADD: OpInfo("adding the summed gradient"),
    Op.NORM: OpInfo("taking the norm of the gradient"),
    Op.DECIDE: OpInfo("deciding on the step"),
    Op.STASH: OpInfo("keeping parameters as they are"),
    Op.BACKUP: OpInfo("keeping states as they are"),
    Op.STEP: OpInfo("updating the parameters", repeats=True),
    Op.VALIDATE: OpInfo("validating the step"),
    Op.REPORT: OpInfo("REPORT"),
    Op.SEND: OpInfo("sending", carries="tied gradients", repeats=True),
    Op.RECEIVE: OpInfo("receiving", carries="tied gradients", repeats=True),
}


class Lane(StrEnum):
    """The queue that an instruction occupies; lanes run concurrently, each in issue order."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    SEND = "send"
    RECEIVE = "receive"
    HOST = "host"


class Category(StrEnum):
    """What memory is held for.  The first three are model states, the others residual states."""

    PARAMETERS = "parameters"  # at rest and in slots, and the model's buffers
    GRADIENTS = "gradients"  # and whole ones in slots
    OPTIMIZER = "optimizer"  # its state, and the fp32 masters of parameters in lower precision
    ACTIVATIONS = (
        "activations"  # the batch, live tensors, saved and kept ones, and the gradients that wait for their unit
    )
    TEMPORARY = "temporary"  # what an instruction needs beyond what it leaves, and scalars of the step
    RESERVE = "reserve"  # of the allocator: rounding and fragmentation


class BufferKind(StrEnum):
    """What a buffer holds."""

    # Of a bucket, from step to step.
    PARAM = "param"
    GRAD = "grad"
    STATE = "state"
    BACKUP = "backup"  # what an update by this stage's norm alone has changed
    # Memory of a pool, which buckets take in turn.
    SLOT = "slot"  # whole parameters
    UNREDUCED = "unreduced"  # whole gradients on their way to their shard
    STASH = "stash"  # parameters as they were before an update
    # Of a unit and microbatch.
    ACTIVATION = "activation"  # its live outputs
    SAVED = "saved"  # what autograd keeps inside of it
    KEPT = "kept"  # what selective recomputation keeps
    GRADIENT = "gradient"  # of its outputs
    RECEIVED = "received"  # the same from another rank, whose coordinate on ``pp`` is the ``version``
    DEFERRED = (
        "deferred"  # what a BACKWARD_INPUT leaves for its BACKWARD_WEIGHT: inputs and output gradients of products
    )
    # Of a batch, whose number is the ``version``.
    BATCH = "batch"  # this rank's rows
    WEIGHT = "weight"  # of the microbatches
    LOSS = "loss"
    NORM = "norm"
    VERDICT = "verdict"  # what follows from the norm
    # What no instruction names.
    BUFFER = "buffer"  # all of the model's
    UPDATE = "update"  # new values of those that a unit writes
    UNUSED = "unused"  # parameters that no unit reads
    SCALAR = "scalar"  # flags, loss scale

    def of(self, index: int = -1, microbatch: int = -1, version: int = 0) -> Buffer:
        """The buffer of this kind that belongs to them."""
        return Buffer(self, index, microbatch, version)


CATEGORY: Mapping[BufferKind, Category] = {
    **dict.fromkeys((BufferKind.PARAM, BufferKind.SLOT, BufferKind.STASH), Category.PARAMETERS),
    **dict.fromkeys((BufferKind.BUFFER, BufferKind.UNUSED), Category.PARAMETERS),
    **dict.fromkeys((BufferKind.GRAD, BufferKind.UNREDUCED), Category.GRADIENTS),
    **dict.fromkeys((BufferKind.STATE, BufferKind.BACKUP), Category.OPTIMIZER),
    **dict.fromkeys(
        (BufferKind.ACTIVATION, BufferKind.SAVED, BufferKind.KEPT, BufferKind.DEFERRED), Category.ACTIVATIONS
    ),
    **dict.fromkeys(
        (BufferKind.GRADIENT, BufferKind.RECEIVED, BufferKind.UPDATE, BufferKind.BATCH), Category.ACTIVATIONS
    ),
    **dict.fromkeys((BufferKind.LOSS, BufferKind.NORM, BufferKind.VERDICT), Category.TEMPORARY),
    **dict.fromkeys((BufferKind.WEIGHT, BufferKind.SCALAR), Category.TEMPORARY),
}


@dataclass(frozen=True, slots=True, order=True)
class Buffer:
    """A named piece of a rank's memory: the unit of conflict between instructions.

    ``index`` is the bucket, slot or unit, or -1; ``microbatch`` is -1 for what outlives a microbatch.
    """

    kind: BufferKind
    index: int = -1
    microbatch: int = -1
    version: int = 0

    def __str__(self) -> str:
        text = self.kind if self.index < 0 else f"{self.kind}{self.index}"
        text += f".m{self.microbatch}" if self.microbatch >= 0 else ""
        return text + (f"@v{self.version}" if self.version else "")


Queue = tuple[Lane, tuple[str, ...], tuple[str, int] | None, str]

CHANNELS = ("tensors", "gradients")
"""The channels of messages: one for what units exchange, one for the gradients of buckets, exchanged once a batch."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation of one class of ranks."""

    op: Op
    unit: int = -1
    bucket: int = -1  # a flat buffer of parameters
    microbatch: int = -1
    slot: int = (
        -1
    )  # where a GATHER puts whole parameters, or where the whole gradient is that a ROUND, REDUCE or ADD handles
    # Of the weights that a unit uses, or that a STASH keeps: the number of updates since the begin of the program.  Of
    # what is done for a batch (COUNT, NORM, DECIDE, BACKUP, STEP, VALIDATE, REPORT): the number of the batch.
    version: int = 0
    peer: tuple[str, int] | None = None  # (axis, offset) of the other side of a SEND or RECEIVE
    tensors: tuple[str, ...] = ()  # the names of what a SEND or RECEIVE carries
    axes: tuple[
        str, ...
    ] = ()  # of the communicator of a collective, also of one inside a unit (a synchronised BatchNorm)
    lane: Lane = Lane.COMPUTE
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    # The buckets whose gradient this BACKWARD (or part of one), REDUCE or ADD writes first and so overwrites; to all
    # others it adds.  What none has written when the gradient is first read is zero.
    first: tuple[int, ...] = ()
    slots: tuple[
        tuple[int, int], ...
    ] = ()  # (bucket, slot) of the whole gradients that a BACKWARD or its part writes to slots
    scatters: bool = False  # this REDUCE leaves each rank its shard of the sum
    # The sender sends before a VALIDATE what this RECEIVE gets after its own: if that finds the update wrong, what has
    # been sent is dropped, and comes once more.
    crosses: bool = False
    frees: tuple[Buffer, ...] = ()  # whose content ends with this instruction
    waits: tuple[int, ...] = ()  # the positions of earlier instructions, in other queues, that must be complete

    @property
    def channel(self) -> str:
        """That of a message, else empty."""
        return CHANNELS[self.bucket >= 0] if self.peer is not None else ""

    @property
    def queue(self) -> Queue:
        """What it is done in the order of: its lane, and what communicates its communicator.  That of a collective has
        its axes; that of messages the peer and the channel.  Different ones do not wait for each other."""
        axes = self.axes if self.lane is not Lane.COMPUTE else ()
        return self.lane, axes, self.peer, self.channel

    def __str__(self) -> str:
        words = [str(self.op)]
        words += [f"u{self.unit}"] if self.unit >= 0 else []
        words += [f"b{self.bucket}"] if self.bucket >= 0 else []
        words += [f"m{self.microbatch}"] if self.microbatch >= 0 else []
        words += [f"slot{self.slot}"] if self.slot >= 0 else []
        words += [f"b{bucket}→slot{slot}" for bucket, slot in self.slots]
        words += [f"v{self.version}"] if self.version else []
        if self.peer is not None:
            words.append(f"{'to' if self.op is Op.SEND else 'from'} {self.peer[0]}{self.peer[1]:+d}")
        words += [f"over {','.join(self.axes)}"] if self.axes else []
        words += [f"wait {','.join(map(str, self.waits))}"] if self.waits else []
        return " ".join(words)
