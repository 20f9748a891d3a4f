"""Prove that programs neither race nor deadlock, on the worst backend that the rules allow.

The deadlock check assumes this of a backend:

* The interpreter issues the instructions of a rank in order.  It blocks on ``waits`` before it issues an instruction,
  and on the compute lane until the instruction is done.
* It blocks before the first use of a communicator that was not made beforehand, until all members have come to their
  first use of it.  Starting an NCCL communicator does this, also one for messages between two ranks.
* Every other lane runs its instructions one at a time in the order of issue.  Messages are ordered like this only among
  those with the same peer on the same channel.
* A SEND and its RECEIVE are done only when both have started, and a collective is done when all members have started.
  Nothing is buffered: a program that needs small messages to be buffered is wrong.

The race check assumes less *order*: on another backend compute is asynchronous too, and every communicator has its own
queue.  So one access happens before another only if both are on one lane and one communicator, in that order, or if
``waits`` lead from the second to the first.

The result does not depend on timing, so one simulation decides.  Ranks of one class run the same program, so one rank
of each class is simulated: a deadlock of the classes is a deadlock of the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shardwise.core.communicators import Members, communicators, groups, pair_of
from shardwise.core.deadlocks import DeadlockSimulation, Event, Position, describe
from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Buffer, Instruction, Lane, Op
from shardwise.core.mesh import Mesh
from shardwise.core.program import Program, class_of
from shardwise.core.repeat import unrepeatable

_Channel = tuple[list[Position], list[Position]]
"""A channel holds the SENDs and the RECEIVEs from one rank to another, each in the order of issue."""


class ProgramError(ShardwiseError):
    """Programs race, deadlock or do not fit together; the message names the instructions."""


def check(programs: Sequence[Program], mesh: Mesh, made: Collection[Members] | None = None) -> None:
    """Check the ``programs`` of all classes of ranks of ``mesh`` together.

    ``made`` lists the communicators that exist before the first step; by default these are all that the programs need.

    Time and memory are linear in the number of instructions of all classes.

    Raises:
        ProgramError: a rank has no program or several; a wait is not for an earlier instruction; two conflicting
            accesses of a buffer are not ordered; a buffer is read or freed after it was freed; members of a group do
            not run the same collectives in the same order; a message is not received, or is received as another; an
            instruction that may have to run again cannot; or instructions wait for each other in a circle.
    """
    classes = _classes(programs, mesh)
    for program in {id(program): program for program in classes}.values():
        _check_races(program)
    collectives, messages = _collectives(classes, mesh), _messages(classes, mesh)
    flat = [[event for one in each.values() for event in one] for each in (collectives, messages)]
    for (number, position), why in unrepeatable(classes, *flat):
        raise ProgramError(f"{describe(classes[number], position)} {why}")
    needed = [*collectives.values(), *messages.values()]
    known = frozenset(communicators(programs, mesh) if made is None else made)
    ranks = [mesh.rank(dict(place)) for place in mesh.classes(_fixed(classes))]
    starts = [each[0] for each in needed if not _is_made(classes, ranks, mesh, each[0][0], known)]
    if problem := DeadlockSimulation(classes, flat[0] + flat[1], starts).run():
        raise ProgramError(problem)


def _classes(programs: Sequence[Program], mesh: Mesh) -> list[Program]:
    """Return the program of each class of ranks that the fixed axes of all programs tell apart, in rank order."""
    for program in programs:
        for axis, at in program.coordinates:
            if not 0 <= at < mesh.axis_size(axis):
                size = mesh.axis_size(axis)
                raise ProgramError(f"{program.name} is for {axis}={at}; legal: 0 to {size - 1}")
    try:
        ranks = [mesh.rank(dict(place)) for place in mesh.classes(_fixed(programs))]
        classes = [class_of(programs, mesh, rank) for rank in ranks]
    except ShardwiseError as error:
        raise ProgramError(str(error)) from error
    used = {id(program) for program in classes}
    for program in programs:
        if id(program) not in used:
            raise ProgramError(f"{program.name} is for {program.coordinates}, where there is no rank")
    return classes


def _fixed(programs: Sequence[Program]) -> tuple[str, ...]:
    """Return the axes that at least one of the programs fixes."""
    return tuple({axis: None for program in programs for axis, _ in program.coordinates})


# Races


@dataclass(slots=True)
class _Accesses:
    """This holds the accesses of a buffer that a new one may conflict with: the last ``change``, which is a "write" or
    a "free", and by the number of the queue the last read since then.  The position of the change is ``at``."""

    change: str = ""
    queue: int = 0
    at: int = -1
    reads: dict[int, int] = field(default_factory=dict)

    def unordered(self, access: str, clock: Sequence[int]) -> tuple[str, int] | None:
        """Return the kind and position of an earlier access that has to be done first and, by ``clock``, may not be."""
        if self.change and clock[self.queue] < self.at:
            return self.change, self.at
        reads = self.reads.items() if access != "read" else ()
        return next((("read", read) for queue, read in reads if clock[queue] < read), None)

    def note(self, access: str, queue: int, position: int) -> None:
        """Take note of an access that is ordered after those before it."""
        if access == "read":
            self.reads[queue] = position
        else:
            self.change, self.queue, self.at, self.reads = access, queue, position, {}


def _check_races(program: Program) -> None:
    """Check that every two conflicting accesses are ordered.

    The vector clock of an instruction holds, for each queue, the last position that is known to be done when the
    instruction is done.  Only the latest accesses matter: earlier ones have been found to be ordered before them.
    """
    queues = {queue: number for number, queue in enumerate({one.queue: None for one in program.instructions})}
    latest = [(-1,) * len(queues)] * len(queues)  # the clock of the last instruction in each queue
    clocks: list[tuple[int, ...]] = []
    accesses: dict[Buffer, _Accesses] = defaultdict(_Accesses)
    for position, one in enumerate(program.instructions):
        queue = queues[one.queue]
        known = latest[queue]
        for wait in one.waits:
            if not 0 <= wait < position:
                raise ProgramError(f"{describe(program, position)} waits for {wait}: no earlier instruction")
            known = tuple(map(max, known, clocks[wait]))
        clock = (*known[:queue], position, *known[queue + 1 :])
        clocks.append(clock)
        latest[queue] = clock
        for access, buffers in (("read", one.reads), ("write", one.writes), ("free", one.frees)):
            for buffer in buffers:
                held = accesses[buffer]
                if held.change == "free" and access != "write":
                    first, second = describe(program, held.at), describe(program, position)
                    raise ProgramError(f"{second} {access}s {buffer}, which {first} has freed")
                if earlier := held.unordered(access, clock):
                    raise _race(program, f"{access}-after-{earlier[0]}", buffer, earlier[1], position)
                held.note(access, queue, position)


def _race(program: Program, kind: str, buffer: Buffer, first: int, second: int) -> ProgramError:
    lanes = [program.instructions[position].lane for position in (first, second)]
    return ProgramError(
        f"{kind} race on {buffer}: {describe(program, second)} (lane {lanes[1]}) does not wait for "
        f"{describe(program, first)} (lane {lanes[0]})"
    )


# Matching instructions across ranks


def _collectives(classes: Sequence[Program], mesh: Mesh) -> Mapping[object, list[Event]]:
    """Return the collectives of each communicator in the order of issue, with a member for each class in its group."""
    places = mesh.classes(_fixed(classes))
    issued: dict[tuple[object, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[tuple[object, ...], list[int]] = {}
    known: dict[tuple[int, tuple[str, ...]], tuple[object, ...]] = {}
    for number, program in enumerate(classes):
        for position, instruction in enumerate(program.instructions):
            axes = instruction.axes
            if not axes:
                continue
            if (number, axes) not in known:
                rest = tuple(pair for pair in places[number] if pair[0] not in axes)
                known[number, axes] = (axes, rest)
                groups[axes, rest] = [n for n, place in enumerate(places) if set(rest) <= set(place)]
            issued[*known[number, axes], instruction.lane][number].append(position)
    found: dict[object, list[Event]] = {}
    for key, sequences in issued.items():
        members = groups[key[:2]]
        for member in members[1:]:
            _check_same_order(classes, members[0], sequences[members[0]], member, sequences[member])
        rows = zip(*(sequences[member] for member in members), strict=True)
        found[key] = [tuple(zip(members, row, strict=True)) for row in rows]
    return found


def _is_made(
    classes: Sequence[Program], ranks: Sequence[int], mesh: Mesh, first: Position, made: frozenset[Members]
) -> bool:  # fmt: skip
    """Return whether the communicator of an instruction exists already; ``ranks`` has one rank of each class.  One that
    is used inside a unit counts as made, because such an instruction blocks the compute lane anyway."""
    number, position = first
    one, rank = classes[number].instructions[position], ranks[number]
    if one.lane is Lane.COMPUTE:
        return True
    needed = [pair_of(mesh, rank, one)] if one.peer is not None else groups(mesh, one.axes, str(one.lane), (rank,))
    return made.issuperset(needed)


def _label(instruction: Instruction) -> tuple[object, ...]:
    """Return what has to be the same on all members of a collective."""
    return instruction.op, instruction.bucket, instruction.unit, instruction.microbatch


def _check_same_order(classes: Sequence[Program], a: int, ours: list[int], b: int, theirs: list[int]) -> None:
    """Check that classes ``a`` and ``b`` run the same collectives at ``ours`` and ``theirs``."""
    first = [_label(classes[a].instructions[position]) for position in ours]
    second = [_label(classes[b].instructions[position]) for position in theirs]
    if first == second:
        return
    for k, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            raise ProgramError(
                f"mismatched collectives: as number {k} of their communicator, "
                f"{describe(classes[a], ours[k])} meets {describe(classes[b], theirs[k])}"
            )
    longer, shorter = (a, b) if len(ours) > len(theirs) else (b, a)
    position = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
    raise ProgramError(
        f"mismatched collectives: {describe(classes[longer], position)} "
        f"on lane {classes[longer].instructions[position].lane} is not joined by {classes[shorter].name}"
    )


def _messages(classes: Sequence[Program], mesh: Mesh) -> Mapping[object, list[Event]]:
    """Return the pairs of a SEND and its RECEIVE by communicator; messages from one rank to another on one channel
    match in the order of issue.

    Offsets wrap around.  On an axis that does not tell classes apart, the other side is another rank of the same class.
    """
    places = mesh.classes(_fixed(classes))
    numbers = {place: number for number, place in enumerate(places)}
    channels: dict[tuple[int, str, int, str], _Channel] = defaultdict(lambda: ([], []))
    for number, program in enumerate(classes):
        for position, instruction in enumerate(program.instructions):
            sends = instruction.op is Op.SEND
            if instruction.peer is None and not sends and instruction.op is not Op.RECEIVE:
                continue
            axis, step = _peer(program, position, mesh)
            size = mesh.axis_size(axis)
            there = tuple((name, (at + step) % size if name == axis else at) for name, at in places[number])
            ends = (number, axis, step) if sends else (numbers[there], axis, -step % size)
            channel = (*ends, instruction.channel)
            channels[channel][0 if sends else 1].append((number, position))
    found: dict[object, list[Event]] = {}
    for key, (sent, received) in channels.items():
        found[key] = []
        _check_one_lane(classes, sent)
        _check_one_lane(classes, received)
        for out, into in zip(sent, received, strict=False):
            ours, theirs = (classes[number].instructions[position] for number, position in (out, into))
            if _label(ours)[1:] != _label(theirs)[1:]:
                names = [describe(classes[number], position) for number, position in (out, into)]
                raise ProgramError(f"mismatched messages: {names[0]} arrives at {names[1]}")
            found[key].append((out, into))
        if len(sent) != len(received):
            number, position = max(sent, received, key=len)[min(len(sent), len(received))]
            verb = "received" if len(sent) > len(received) else "sent"
            raise ProgramError(f"{describe(classes[number], position)} is never {verb} by its peer")
    return found


def _check_one_lane(classes: Sequence[Program], messages: Sequence[Position]) -> None:
    """Check that one queue has all messages from one rank to another on a channel: in two, their order would be left to
    chance."""
    for (number, first), (_, second) in pairwise(messages):
        program = classes[number]
        if program.instructions[first].queue != program.instructions[second].queue:
            raise ProgramError(
                f"{describe(program, second)} is on lane {program.instructions[second].lane}, and "
                f"{describe(program, first)}, with the same peer, on {program.instructions[first].lane}"
            )


def _peer(program: Program, position: int, mesh: Mesh) -> tuple[str, int]:
    """Return the peer of a message as (axis, offset), with the offset reduced to 1 … size-1."""
    instruction = program.instructions[position]
    if instruction.op not in (Op.SEND, Op.RECEIVE) or instruction.peer is None or instruction.axes:
        name = describe(program, position)
        raise ProgramError(f"{name}: a SEND or RECEIVE has a peer and no axes, and nothing else has a peer")
    axis, offset = instruction.peer
    step = offset % mesh.axis_size(axis)
    if not step:
        size = mesh.axis_size(axis)
        raise ProgramError(f"{describe(program, position)} has itself for a peer: {axis} has size {size}")
    return axis, step
