"""This module simulates one step of the programs of all classes of ranks to see whether they come to their end.

The rules are those of :mod:`shardwise.core.check`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shardwise.core.instruction import Instruction, Lane
from shardwise.core.program import Program

Position = tuple[int, int]
"""This identifies an instruction by the number of the class that runs it and its position in the program."""

Event = tuple[Position, ...]
"""An event holds the instructions that only complete together."""


def describe(program: Program, position: int) -> str:
    """Return the text by which messages name an instruction."""
    return f"{program.name} [{position}] {program.instructions[position]}"


def _in_turn(one: Instruction) -> tuple[object, ...]:
    """Return the key of the queue in which a backend may run an instruction: the collectives of a lane share one, and
    so do messages of a lane with the same peer and channel."""
    return one.lane, one.peer, one.channel


class DeadlockSimulation:
    """This simulates one step of all classes: every instruction runs as soon as the rules allow.

    ``starts`` holds the first event of every communicator that does not exist yet: the first use by each member.
    """

    def __init__(self, classes: Sequence[Program], events: Sequence[Event], starts: Sequence[Event]) -> None:
        self.classes = classes
        self.events = events
        self.starts = {member: event for event in starts for member in event}
        self.come: set[Position] = set()  # those instructions in ``starts`` that their interpreters have come to
        self.event = [[-1] * len(program.instructions) for program in classes]
        for number, event in enumerate(events):
            for member, position in event:
                self.event[member][position] = number
        self.missing = [len(event) for event in events]  # the number of members that have not started
        self.done = [bytearray(len(program.instructions)) for program in classes]
        self.next = [0] * len(classes)  # the position that each interpreter is at
        self.blocker = [-1] * len(classes)  # the position that each interpreter is blocked on
        self.queues: list[dict[object, deque[int]]] = [
            {_in_turn(one): deque() for one in program.instructions} for program in classes
        ]
        self.runnable = list(range(len(classes)))

    def run(self) -> str:
        """Run to the end; return "", or the description of a circle of instructions that wait for each other."""
        while self.runnable:
            self._interpret(self.runnable.pop())
        stuck = next(((number, done.index(0)) for number, done in enumerate(self.done) if not all(done)), None)
        return "" if stuck is None else self._explain(stuck)

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
            if not self._has_communicator((number, position)):
                self.blocker[number] = position
                return
            queue = queues[_in_turn(instruction)]
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

    def _has_communicator(self, member: Position) -> bool:
        """Note that a class has come to an instruction; return False while its communicator waits for other members."""
        event = self.starts.get(member)
        if event is None:
            return True
        self.come.add(member)
        if not self.come.issuperset(event):
            return False
        for number, position in event:
            del self.starts[number, position]
            if self.blocker[number] == position == self.next[number]:
                self.blocker[number] = -1
                self.runnable.append(number)
        return True

    def _start(self, number: int, position: int) -> None:
        """Start an instruction, complete the event that only lacked it, and start what is next in those queues."""
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
                queue = self.queues[number][_in_turn(self.classes[number].instructions[position])]
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
            f"  {describe(self.classes[number], position)}: {reason}"
            for (number, position), reason in zip(chain[first:], reasons[first:], strict=True)
        ]
        return "deadlock, each waits for the next and the last for the first:\n" + "\n".join(lines)

    def _cause(self, stuck: Position) -> tuple[str, Position]:
        """Return why an instruction is not done, and the other instruction that has to happen first."""
        number, position = stuck
        one = self.classes[number].instructions[position]
        queue = self.queues[number][_in_turn(one)]
        if stuck in self.come and stuck in self.starts:
            absent = next(member for member in self.starts[stuck] if member not in self.come)
            return "starts its communicator, in which its host waits for the other members to come to", absent
        if position not in queue:
            return "is issued only after", (number, self.blocker[number])
        if queue[0] != position:
            return f"is behind on lane {one.lane}", (number, queue[0])
        members = self.events[self.event[number][position]]
        return "has started and needs its other side", next(m for m in members if not self._has_started(m))

    def _has_started(self, member: Position) -> bool:
        number, position = member
        queue = self.queues[number][_in_turn(self.classes[number].instructions[position])]
        return bool(queue) and queue[0] == position
