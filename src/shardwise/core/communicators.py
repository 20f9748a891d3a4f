"""This module lists the communicators of a run, from the programs of all classes of ranks, in the same order on every
rank.

Starting an NCCL communicator, also one for messages between two ranks, blocks the host until all its members start it.
So all ranks make all communicators before the first step in the order given here: then no rank waits in one of them for
a rank that waits in another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from shardwise.core.instruction import Instruction, Lane, Op
from shardwise.core.mesh import Axes, Mesh
from shardwise.core.program import Program

CONTROL = "control"
"""This lane is for communication between hosts: collectives of CPU tensors, and barriers."""


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a communicator are the ranks that share it; ``lane`` says what they use it for.

    A communicator for collectives has its ranks in ascending order.  One for a ``pair`` has the sender and the
    receiver, and its lane is a channel; messages in the other direction have a communicator of their own.
    """

    ranks: tuple[int, ...]
    lane: str
    pair: bool = False

    def __str__(self) -> str:
        if self.pair:
            return f"messages of {self.lane} from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"collectives among ranks {list(self.ranks)} on lane {self.lane}"


def groups(mesh: Mesh, axes: Axes, lane: str, ranks: Iterable[int] | None = None) -> list[Members]:
    """Return the communicators for collectives over ``axes`` that these ranks (default: all) are members of; a group of
    one rank has none."""
    found: list[Members] = []
    seen: set[int] = set()
    if mesh.axis_size(axes) == 1:
        return found
    for rank in range(mesh.size) if ranks is None else ranks:
        if rank not in seen:
            group = mesh.group(rank, axes)
            seen.update(group)
            found.append(Members(tuple(sorted(group)), lane))
    return found


def pair_of(mesh: Mesh, rank: int, one: Instruction) -> Members:
    """Return the communicator of the SEND or RECEIVE ``one`` of ``rank``."""
    assert one.peer is not None
    other = mesh.offset(rank, *one.peer, wrap=True)
    return Members((rank, other) if one.op is Op.SEND else (other, rank), one.channel, True)


def communicators(
    programs: Iterable[Program], mesh: Mesh, more: Iterable[tuple[Axes, str]] = ()
) -> tuple[Members, ...]:
    """Return the communicators that the ``programs`` of all classes of ranks use, and those of ``more``, pairs of axes
    and lane.

    Communicators used inside units, on the compute lane, are not taken from programs but belong to ``more``.  The order
    is the same on every rank, and neighbours in it share few ranks, so that many can be made at the same time.
    """
    found: dict[Members, None] = {}
    for axes, lane in more:
        found |= dict.fromkeys(groups(mesh, axes, lane))
    for program in programs:
        ranks, (collectives, messages) = mesh.members(program.coordinates), _used(program)
        for axes, lane in collectives:
            found |= dict.fromkeys(groups(mesh, axes, lane, ranks))
        for one in messages:
            found |= dict.fromkeys(pair_of(mesh, rank, one) for rank in ranks)
    return _apart(sorted(found, key=lambda one: (one.pair, one.lane, one.ranks)))


def sizes(program: Program, mesh: Mesh, more: Iterable[tuple[Axes, str]] = ()) -> list[int]:
    """Return the number of ranks in each of the :func:`communicators` of a rank that runs ``program``."""
    collectives, messages = _used(program)
    first = mesh.members(program.coordinates)[0]
    groups = {(mesh.group(first, axes), lane) for axes, lane in (*more, *collectives) if mesh.axis_size(axes) > 1}
    return [len(ranks) for ranks, _ in groups] + [2] * len(messages)


def _used(program: Program) -> tuple[list[tuple[Axes, str]], list[Instruction]]:
    """Return the axes and lanes of a program's collectives, and one instruction of each kind of message."""
    used = [one for one in program.instructions if one.lane is not Lane.COMPUTE]
    collectives = dict.fromkeys((one.axes, str(one.lane)) for one in used if one.axes)
    messages = {(one.op, one.peer, one.channel): one for one in used if one.peer is not None}
    return list(collectives), list(messages.values())


def _apart(wanted: Sequence[Members]) -> tuple[Members, ...]:
    """Sort communicators into turns, so that a rank is in at most one per turn, each as early as its members allow."""
    busy: dict[int, set[int]] = defaultdict(set)
    turns: dict[int, list[Members]] = defaultdict(list)
    for one in wanted:
        taken = set().union(*(busy[rank] for rank in one.ranks))
        turn = next(n for n in count() if n not in taken)
        for rank in one.ranks:
            busy[rank].add(turn)
        turns[turn].append(one)
    return tuple(one for turn in sorted(turns) for one in turns[turn])
