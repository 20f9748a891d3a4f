"""Prove that programs neither race nor deadlock, on the worst backend that the rules allow.

What is assumed of a backend:

* The interpreter issues the instructions of a rank in order.  It blocks on ``waits`` before it issues, and
  on the compute lane until the instruction is done.
* Each other lane runs what was issued to it in order, one at a time; messages only if they are with the same peer
  and both of buckets, or neither.
* A SEND and its RECEIVE are done only when both have started; a collective, when all members have.
  Nothing is buffered: a program that needs small messages to be buffered is wrong.

What is assumed to be *ordered* is less: on another backend compute is asynchronous too, so an access
happens before another only if they are on one lane (and with one peer) in that order, or ``waits`` lead from the second to the
first.

All of this is deterministic, whatever the timing: one simulation decides.  Ranks of one class run the same
program, so one rank for each class is simulated: a deadlock of the classes is one of the ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Buffer, Instruction, Lane, Op
from shardwise.core.mesh import Mesh
from shardwise.core.program import Program, class_of
from shardwise.core.repeat import unrepeatable

Position = tuple[int, int]
"""An instruction: the class that runs it and its position in the program."""

Event = tuple[Position, ...]
"""The instructions that only complete together."""

_Channel = tuple[list[Position], list[Position]]
"""What is sent and what is received between two ranks, each in the order of issue."""


class ProgramError(ShardwiseError):
    """Programs race, deadlock or do not fit together; the message names the instructions."""


def check(programs: Sequence[Program], mesh: Mesh) -> None:
    """Check the ``programs`` of all classes of ranks of ``mesh`` together.

    Time and memory are linear in the number of instructions of all classes.

    Raises:
        ProgramError: a rank has no program or several; a wait is not for an earlier instruction; two
            conflicting accesses of a buffer are not ordered; a buffer is read after it was freed; members of a group do not run the same
            collectives in the same order; a message is not received, or is received as another; what may be run again
            cannot be; or instructions wait for each other in a circle.
    """
    classes = _classes(programs, mesh)
    for program in {id(program): program for program in classes}.values():
        _check_races(program)
    collectives, messages = _collectives(classes, mesh), _messages(classes, mesh)
    for (number, position), why in unrepeatable(classes, collectives, messages):
        raise ProgramError(f"{_describe(classes[number], position)} {why}")
    _Simulation(classes, collectives + messages).run()


def _classes(programs: Sequence[Program], mesh: Mesh) -> list[Program]:
    """The program of each class that the fixed axes of all programs tell apart, in rank order."""
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
    """The axes that any of the programs fixes."""
    return tuple({axis: None for program in programs for axis, _ in program.coordinates})


def _describe(program: Program, position: int) -> str:
    return f"{program.name} [{position}] {program.instructions[position]}"


# Races


@dataclass(slots=True)
class _Accesses:
    """What an access of a buffer may conflict with: the last write, and the last read on each lane since."""

    write: tuple[int, int] | None
    reads: dict[int, int]


def _check_races(program: Program) -> None:
    """Check that every two conflicting accesses are ordered.

    A vector clock holds, for each lane, the last position known to be done when an instruction is.  Of the
    earlier accesses only the last ones matter: those before were found to be ordered before these.
    """
    lanes = {queue: number for number, queue in enumerate({one.queue: None for one in program.instructions})}
    start = (-1,) * len(lanes)
    latest = [start] * len(lanes)  # the clock of the last instruction of each lane
    clocks: list[tuple[int, ...]] = []
    accesses: dict[Buffer, _Accesses] = defaultdict(lambda: _Accesses(None, {}))
    freed: dict[Buffer, int] = {}
    for position, instruction in enumerate(program.instructions):
        lane = lanes[instruction.queue]
        known = latest[lane]
        for wait in instruction.waits:
            if not 0 <= wait < position:
                raise ProgramError(f"{_describe(program, position)} waits for {wait}: no earlier instruction")
            known = tuple(map(max, known, clocks[wait]))
        clock = (*known[:lane], position, *known[lane + 1 :])
        clocks.append(clock)
        latest[lane] = clock
        for buffer in instruction.reads:
            held = accesses[buffer]
            if buffer in freed:
                raise ProgramError(
                    f"{_describe(program, position)} reads {buffer}, which {_describe(program, freed[buffer])} has freed"
                )
            if held.write and clock[held.write[0]] < held.write[1]:
                raise _race(program, "read-after-write", buffer, held.write[1], position)
            held.reads[lane] = position
        for buffer in instruction.writes:
            held = accesses[buffer]
            if held.write and clock[held.write[0]] < held.write[1]:
                raise _race(program, "write-after-write", buffer, held.write[1], position)
            for reader, read in held.reads.items():
                if clock[reader] < read:
                    raise _race(program, "write-after-read", buffer, read, position)
            held.write = (lane, position)
            held.reads.clear()
            freed.pop(buffer, None)
        for buffer in instruction.frees:
            for reader, read in accesses[buffer].reads.items():
                if clock[reader] < read:
                    raise _race(program, "free-after-read", buffer, read, position)
            freed[buffer] = position


def _race(program: Program, kind: str, buffer: Buffer, first: int, second: int) -> ProgramError:
    lanes = [program.instructions[position].lane for position in (first, second)]
    return ProgramError(
        f"{kind} race on {buffer}: {_describe(program, second)} (lane {lanes[1]}) does not wait for "
        f"{_describe(program, first)} (lane {lanes[0]})"
    )


# Which instructions belong together


def _collectives(classes: Sequence[Program], mesh: Mesh) -> list[Event]:
    """The collectives, each with one member for each class in its group."""
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
    found: list[Event] = []
    for key, sequences in issued.items():
        members = groups[key[:2]]
        for member in members[1:]:
            _check_same_order(classes, members[0], sequences[members[0]], member, sequences[member])
        rows = zip(*(sequences[member] for member in members), strict=True)
        found += [tuple(zip(members, row, strict=True)) for row in rows]
    return found


def _label(instruction: Instruction) -> tuple[object, ...]:
    """What has to be the same on all members of a collective."""
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
                f"{_describe(classes[a], ours[k])} meets {_describe(classes[b], theirs[k])}"
            )
    longer, shorter = (a, b) if len(ours) > len(theirs) else (b, a)
    position = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
    raise ProgramError(
        f"mismatched collectives: {_describe(classes[longer], position)} "
        f"on lane {classes[longer].instructions[position].lane} is not joined by {classes[shorter].name}"
    )


def _messages(classes: Sequence[Program], mesh: Mesh) -> list[Event]:
    """The pairs of a SEND and its RECEIVE: those between two ranks match in the order of issue, gradients of buckets apart.

    Offsets wrap around; on an axis that does not tell classes apart, the other side is another rank of the
    same class.
    """
    places = mesh.classes(_fixed(classes))
    numbers = {place: number for number, place in enumerate(places)}
    channels: dict[tuple[int, str, int, bool], _Channel] = defaultdict(lambda: ([], []))
    for number, program in enumerate(classes):
        for position, instruction in enumerate(program.instructions):
            sends = instruction.op is Op.SEND
            if instruction.peer is None and not sends and instruction.op is not Op.RECEIVE:
                continue
            axis, step = _peer(program, position, mesh)
            size = mesh.axis_size(axis)
            there = tuple((name, (at + step) % size if name == axis else at) for name, at in places[number])
            kind = instruction.bucket >= 0
            channel = (number, axis, step, kind) if sends else (numbers[there], axis, -step % size, kind)
            channels[channel][0 if sends else 1].append((number, position))
    found: list[Event] = []
    for sent, received in channels.values():
        _check_one_lane(classes, sent)
        _check_one_lane(classes, received)
        for out, into in zip(sent, received, strict=False):
            ours, theirs = (classes[number].instructions[position] for number, position in (out, into))
            if _label(ours)[1:] != _label(theirs)[1:]:
                names = [_describe(classes[number], position) for number, position in (out, into)]
                raise ProgramError(f"mismatched messages: {names[0]} arrives at {names[1]}")
            found.append((out, into))
        if len(sent) != len(received):
            number, position = max(sent, received, key=len)[min(len(sent), len(received))]
            verb = "received" if len(sent) > len(received) else "sent"
            raise ProgramError(f"{_describe(classes[number], position)} is never {verb} by its peer")
    return found


def _check_one_lane(classes: Sequence[Program], messages: Sequence[Position]) -> None:
    """Check that one lane has all messages between two ranks: on two, their order would be left to chance."""
    for (number, first), (_, second) in pairwise(messages):
        program = classes[number]
        if program.instructions[first].queue != program.instructions[second].queue:
            raise ProgramError(
                f"{_describe(program, second)} is on lane {program.instructions[second].lane}, and "
                f"{_describe(program, first)}, with the same peer, on {program.instructions[first].lane}"
            )


def _peer(program: Program, position: int, mesh: Mesh) -> tuple[str, int]:
    """The peer of a message as (axis, offset), the offset taken into 1 … size-1."""
    instruction = program.instructions[position]
    if instruction.op not in (Op.SEND, Op.RECEIVE) or instruction.peer is None or instruction.axes:
        name = _describe(program, position)
        raise ProgramError(f"{name}: a SEND or RECEIVE has a peer and no axes, and nothing else has a peer")
    axis, offset = instruction.peer
    step = offset % mesh.axis_size(axis)
    if not step:
        size = mesh.axis_size(axis)
        raise ProgramError(f"{_describe(program, position)} has itself for a peer: {axis} has size {size}")
    return axis, step


# Deadlocks


class _Simulation:
    """One step of all classes: every instruction runs as soon as the rules allow, until nothing more can."""

    def __init__(self, classes: Sequence[Program], events: Sequence[Event]) -> None:
        self.classes = classes
        self.events = events
        self.event = [[-1] * len(program.instructions) for program in classes]
        for number, event in enumerate(events):
            for member, position in event:
                self.event[member][position] = number
        self.missing = [len(event) for event in events]  # the members that have not started
        self.done = [bytearray(len(program.instructions)) for program in classes]
        self.next = [0] * len(classes)  # the instruction that each interpreter is at
        self.blocker = [-1] * len(classes)  # what each interpreter is blocked on
        self.queues: list[dict[object, deque[int]]] = [
            {one.queue: deque() for one in program.instructions} for program in classes
        ]
        self.runnable = list(range(len(classes)))

    def run(self) -> None:
        """Run to the end, or raise ProgramError naming a circle of instructions that wait for each other."""
        while self.runnable:
            self._interpret(self.runnable.pop())
        for number, done in enumerate(self.done):
            if not all(done):
                raise ProgramError(self._explain((number, done.index(0))))

    def _interpret(self, number: int) -> None:
        """Issue the instructions of a class until its interpreter blocks."""
        instructions, done, queues = self.classes[number].instructions, self.done[number], self.queues[number]
        self.blocker[number] = -1
        for position in range(self.next[number], len(instructions)):
            instruction = instructions[position]
            self.next[number] = position
            for wait in instruction.waits:
                if not done[wait]:
                    self.blocker[number] = wait
                    return
            queue = queues[instruction.queue]
            if instruction.lane is not Lane.COMPUTE:
                queue.append(position)
                if len(queue) == 1:
                    self._start(number, position)
            elif not done[position]:
                queue.append(position)
                self._start(number, position)
                if not done[position]:
                    self.blocker[number] = position
                    return
        self.next[number] = len(instructions)

    def _start(self, number: int, position: int) -> None:
        """Start an instruction, complete what only lacked this, and start what is next on those lanes."""
        started = [(number, position)]
        while started:
            member = started.pop()
            event = self.event[member[0]][member[1]]
            if event >= 0:
                self.missing[event] -= 1
                if self.missing[event]:
                    continue
            for number, position in self.events[event] if event >= 0 else (member,):
                self.done[number][position] = 1
                queue = self.queues[number][self.classes[number].instructions[position].queue]
                queue.popleft()
                if queue:
                    started.append((number, queue[0]))
                if self.blocker[number] == position:
                    self.blocker[number] = -1
                    self.runnable.append(number)

    def _explain(self, stuck: Position) -> str:
        """Follow the causes from one stuck instruction until they come round."""
        chain: list[Position] = []
        reasons: list[str] = []
        while stuck not in chain:
            chain.append(stuck)
            reason, stuck = self._cause(stuck)
            reasons.append(reason)
        first = chain.index(stuck)
        lines = [
            f"  {_describe(self.classes[number], position)}: {reason}"
            for (number, position), reason in zip(chain[first:], reasons[first:], strict=True)
        ]
        return "deadlock, each waits for the next and the last for the first:\n" + "\n".join(lines)

    def _cause(self, stuck: Position) -> tuple[str, Position]:
        """Why an instruction is not done, and the other instruction that has to happen first."""
        number, position = stuck
        one = self.classes[number].instructions[position]
        queue = self.queues[number][one.queue]
        if position not in queue:
            return "is issued only after", (number, self.blocker[number])
        if queue[0] != position:
            return f"is behind on lane {one.lane}", (number, queue[0])
        members = self.events[self.event[number][position]]
        return "has started and needs its other side", next(m for m in members if not self._has_started(m))

    def _has_started(self, member: Position) -> bool:
        number, position = member
        queue = self.queues[number][self.classes[number].instructions[position].queue]
        return bool(queue) and queue[0] == position
