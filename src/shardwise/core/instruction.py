"""This module defines the instructions of a training step.

A :class:`Program` is a flat list of these records.  They are data: the runtime executes them, `estimate` prices them,
`report` draws them and :func:`shardwise.core.check.check` proves that they neither race nor deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """The op of an instruction says what it does."""

    COUNT = "COUNT"  # Weigh the microbatches: count their targets and sum them over ranks.
    FORWARD = "FORWARD"
    RECOMPUTE = "RECOMPUTE"  # Run forward again from the kept inputs, just before backward.
    BACKWARD = "BACKWARD"
    BACKWARD_INPUT = "BACKWARD_INPUT"  # Run backward without the weight gradients of products, and keep their operands.
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"  # Compute the weight gradients from these operands; this reads no parameters.
    GATHER = "GATHER"  # All-gather parameters from their shards, into a slot or their own buffer.
    PUSH = "PUSH"  # Send each server its range of a gradient; servers add up what comes.
    PULL = "PULL"  # Receive parameters from the servers, each of which sends its range.
    ROUND = "ROUND"  # Cast a gradient buffer into a slot of the dtype in which it is summed over ranks.
    REDUCE = "REDUCE"  # Sum a gradient buffer or a slot over mesh axes, or the loss, or the norms.
    ADD = "ADD"  # Add this rank's shard of a slot, or the gradient of a tied bucket from another rank.
    NORM = "NORM"  # Compute the norm of this rank's shards of all gradients.
    DECIDE = "DECIDE"  # Compute from all norms the global one, the clipping coefficient, skip flag and loss scale.
    COMMIT = "COMMIT"  # Let servers apart apply what has been pushed, unless the norm is not finite.
    STASH = "STASH"  # Copy parameters to a slot before their update, because microbatches under way still use them.
    BACKUP = "BACKUP"  # Copy all that STEP changes of a bucket, in case VALIDATE finds the update wrong.
    STEP = "STEP"  # Update one bucket with the optimizer.
    DIFFER = "DIFFER"  # Take how far this island's masters have moved since the last outer step.
    OUTER = "OUTER"  # Take the outer step of one bucket, by the sum of these differences over islands.
    # Check the update that used the norm of this stage alone against the norm of all stages; undo it if it was wrong.
    VALIDATE = "VALIDATE"
    REPORT = "REPORT"  # Report the loss and the norm of a batch, which are known now.
    SEND = "SEND"  # Send live tensors or their gradients to another stage, or the gradients of a bucket.
    RECEIVE = "RECEIVE"


@dataclass(frozen=True, slots=True)
class OpInfo:
    """This holds for every instruction of an op."""

    does: str  # what it does, in words
    task: str = ""  # the kind of timetable task that it is part of: F, B, I or W (a RECOMPUTE may be part of I)
    carries: str = ""  # what it communicates, inside its unit, for a bucket or for a batch
    runs_unit: bool = False  # whether it runs the graph of its unit, which reads parameters and may communicate
    repeats: bool = False  # whether it may run again when VALIDATE finds an update wrong


OP_INFO: Mapping[Op, OpInfo] = {
    Op.COUNT: OpInfo("counting the targets", carries="targets", repeats=True),
    Op.FORWARD: OpInfo("forward", task="F", carries="forward", runs_unit=True, repeats=True),
    Op.RECOMPUTE: OpInfo("forward again", task="B", carries="recompute", runs_unit=True),
    Op.BACKWARD: OpInfo("backward", task="B", carries="backward", runs_unit=True),
    Op.BACKWARD_INPUT: OpInfo("backward to the inputs", task="I", carries="backward", runs_unit=True),
    Op.BACKWARD_WEIGHT: OpInfo("backward to the weights", task="W"),
    Op.GATHER: OpInfo("gathering the parameters", carries="parameters", repeats=True),
    Op.PUSH: OpInfo("pushing gradients to servers", carries="gradients"),
    Op.PULL: OpInfo("pulling parameters from servers", carries="parameters", repeats=True),
    Op.ROUND: OpInfo("rounding the gradient"),
    Op.REDUCE: OpInfo("summing", carries="gradients"),
    Op.ADD: OpInfo("adding the summed gradient"),
    Op.NORM: OpInfo("taking the norm of the gradient"),
    Op.DECIDE: OpInfo("deciding on the step"),
    Op.COMMIT: OpInfo("committing a push"),
    Op.STASH: OpInfo("keeping parameters as they are"),
    Op.BACKUP: OpInfo("keeping states as they are"),
    Op.STEP: OpInfo("updating the parameters", repeats=True),
    Op.DIFFER: OpInfo("taking how far parameters have moved"),
    Op.OUTER: OpInfo("taking the outer step"),
    Op.VALIDATE: OpInfo("validating the step"),
    Op.REPORT: OpInfo("reporting loss and norm"),
    Op.SEND: OpInfo("sending", carries="tied gradients", repeats=True),
    Op.RECEIVE: OpInfo("receiving", carries="tied gradients", repeats=True),
}


class Lane(StrEnum):
    """Lanes run concurrently; within a lane, each :attr:`Instruction.queue` runs in the order of issue."""

    COMPUTE = "compute"
    MOVE = "move"  # what units exchange: live tensors and their gradients
    GATHER = "gather"
    REDUCE = "reduce"
    SEND = "send"
    RECEIVE = "receive"


class Category(StrEnum):
    """A category says what memory is held for.  The first three are model states, the others residual states."""

    PARAMETERS = "parameters"  # parameters at rest and in slots, and the model's buffers
    GRADIENTS = "gradients"  # gradients at rest, and whole ones in slots
    OPTIMIZER = "optimizer"  # optimizer state, and the fp32 masters of parameters in lower precision
    # the batch, live, saved and kept tensors, and the gradients that wait for their unit
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"  # memory that an instruction needs only while it runs, and scalars of the step
    RESERVE = "reserve"  # rounding and fragmentation of the allocator


class BufferKind(StrEnum):
    """The kind of a buffer says what it holds."""

    # These belong to a bucket and last from step to step.
    PARAM = "param"
    GRAD = "grad"
    STATE = "state"
    BACKUP = "backup"  # the values before an update by the norm of this stage alone
    OUTER = "outer"  # masters after the last outer step, and its momentum
    DIFFERENCE = "difference"  # how far masters have moved since then, where fragments of the parameters stream
    # These are memory of a pool, which buckets use in turn.
    SLOT = "slot"  # whole parameters
    UNREDUCED = "unreduced"  # whole gradients that wait for their reduction
    INBOX = "inbox"  # of a server: what ranks have pushed of a bucket
    STASH = "stash"  # parameters as they were before an update
    # These belong to a unit and a microbatch.
    ACTIVATION = "activation"  # the unit's live outputs
    SAVED = "saved"  # the tensors that autograd saves inside the unit
    KEPT = "kept"  # the tensors that selective recomputation keeps
    GRADIENT = "gradient"  # the gradients of the unit's outputs
    # what a unit of moves has under way; in backward the ``version`` is 1
    MOVING = "moving"
    RECEIVED = "received"  # gradients from another rank, whose coordinate on ``pp`` is the ``version``
    # the inputs and output gradients of products, which a BACKWARD_INPUT leaves for its BACKWARD_WEIGHT
    DEFERRED = "deferred"
    # These belong to the batch whose number is the ``version``.
    BATCH = "batch"  # this rank's rows
    WEIGHT = "weight"  # the weights of the microbatches
    LOSS = "loss"
    NORM = "norm"
    VERDICT = "verdict"  # the decision that follows from the norm
    # No instruction names these.
    BUFFER = "buffer"  # all buffers of the model
    UPDATE = "update"  # new values of the model's buffers that a unit writes
    UNUSED = "unused"  # parameters that no unit reads
    SCALAR = "scalar"  # flags and the loss scale

    def of(self, index: int = -1, microbatch: int = -1, version: int = 0) -> Buffer:
        """Return the buffer of this kind with this index, microbatch and version."""
        return Buffer(self, index, microbatch, version)


CATEGORY: Mapping[BufferKind, Category] = {
    **dict.fromkeys((BufferKind.PARAM, BufferKind.SLOT, BufferKind.STASH), Category.PARAMETERS),
    **dict.fromkeys((BufferKind.BUFFER, BufferKind.UNUSED), Category.PARAMETERS),
    **dict.fromkeys(
        (BufferKind.GRAD, BufferKind.UNREDUCED, BufferKind.INBOX, BufferKind.DIFFERENCE), Category.GRADIENTS
    ),
    **dict.fromkeys((BufferKind.STATE, BufferKind.BACKUP, BufferKind.OUTER), Category.OPTIMIZER),
    **dict.fromkeys(
        (BufferKind.ACTIVATION, BufferKind.SAVED, BufferKind.KEPT, BufferKind.DEFERRED), Category.ACTIVATIONS
    ),
    **dict.fromkeys(
        (BufferKind.GRADIENT, BufferKind.MOVING, BufferKind.RECEIVED, BufferKind.UPDATE, BufferKind.BATCH),
        Category.ACTIVATIONS,
    ),
    **dict.fromkeys((BufferKind.LOSS, BufferKind.NORM, BufferKind.VERDICT), Category.TEMPORARY),
    **dict.fromkeys((BufferKind.WEIGHT, BufferKind.SCALAR), Category.TEMPORARY),
}


@dataclass(frozen=True, slots=True, order=True)
class Buffer:
    """A buffer is a named piece of a rank's memory; instructions conflict when they access the same buffer.

    ``index`` is the bucket, slot or unit, or -1; ``microbatch`` is -1 if the buffer does not belong to one.
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
"""Messages have two channels: "tensors" for units, and "gradients" for those of buckets, exchanged once per batch."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction is one operation of one class of ranks."""

    op: Op
    unit: int = -1
    bucket: int = -1  # the number of a flat buffer of parameters
    microbatch: int = -1
    # the slot that a GATHER or STASH fills with parameters, or that has the whole gradient for a ROUND, REDUCE or ADD
    slot: int = -1
    # For units and STASH this is the version of the weights: the number of updates since the program began.  For COUNT,
    # NORM, DECIDE, BACKUP, STEP, VALIDATE and REPORT it is the number of the batch, for ADD the RECEIVED buffer's.
    version: int = 0
    peer: tuple[str, int] | None = None  # (axis, offset) of the other side of a SEND or RECEIVE
    tensors: tuple[str, ...] = ()  # the names of the tensors that a SEND or RECEIVE carries
    # the axes of the communicator of a collective, also of one inside a unit on the compute lane (a synchronised
    # BatchNorm)
    axes: tuple[str, ...] = ()
    lane: Lane = Lane.COMPUTE
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    # A BACKWARD (or a part of one), REDUCE or ADD overwrites the gradients of these buckets, because it is the first to
    # write them, and adds to all others.  Elements that nothing has written when the gradient is read are zero.
    first: tuple[int, ...] = ()
    slots: tuple[tuple[int, int], ...] = ()  # (bucket, slot) of gradients that a BACKWARD or its part writes to slots
    scatters: bool = False  # whether this REDUCE leaves each rank only its shard of the sum
    # Whether the message of this RECEIVE was sent before the sender's VALIDATE and is received after the receiver's: if
    # the update was wrong, the message is dropped and comes again.
    crosses: bool = False
    frees: tuple[Buffer, ...] = ()  # the buffers whose content ends with this instruction
    waits: tuple[int, ...] = ()  # the positions of earlier instructions, in other queues, that must be complete

    @property
    def channel(self) -> str:
        """Return the channel of a message, and "" for other instructions."""
        return CHANNELS[self.bucket >= 0] if self.peer is not None else ""

    @property
    def queue(self) -> Queue:
        """Return the key of the queue in whose order the instruction runs: its lane and, off the compute lane, its
        communicator: the axes of a collective, or the peer and the channel of a message.  Queues run independently."""
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
