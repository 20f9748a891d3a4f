"""Which communicators a run needs: from the programs of all classes of ranks, in one order that does not depend on the
rank.

Starting a communicator of NCCL, also one for messages between two ranks, blocks the host until all its members have
come to it.  So all are made before the first step, by all ranks in the order given here: then no rank waits in one for
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
"""The lane of what hosts tell each other: numbers of CPU tensors, and barriers."""


@dataclass(frozen=True, slots=True)
class Members:
    """One communicator: the ranks that share it and what they use it for.

    That of collectives has its ranks in ascending order and a lane.  That of a ``pair`` has the sender and the
    receiver, and its lane is a channel: messages the other way have one of their own.
    """

    ranks: tuple[int, ...]
    lane: str
    pair: bool = False

    def __str__(self) -> str:
        if self.pair:
            return f"messages of {self.lane} from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"collectives among ranks {list(self.ranks)} on lane {self.lane}"


def groups(mesh: Mesh, axes: Axes, lane: str, ranks: Iterable[int] | None = None) -> list[Members]:
    """The communicators of collectives over ``axes`` that these ranks (by default all) are members of; none for groups
    of one.
    """
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
    """The communicator of a SEND or RECEIVE of ``rank``."""
    assert one.peer is not None
    other = mesh.offset(rank, *one.peer, wrap=True)
    return Members((rank, other) if one.op is Op.SEND else (other, rank), one.channel, True)


def communicators(
    programs: Iterable[Program], mesh: Mesh, more: Iterable[tuple[Axes, str]] = ()
) -> tuple[Members, ...]:
    """All that the ``programs`` of all classes of ranks use, and those of ``more`` pairs of axes and lane.

    What units communicate inside, on the compute lane, is not in programs: it belongs to ``more``.  The order is the
    same whoever asks, and neighbours in it have few ranks in common, so that many can be made at the same time.
    """
    found: dict[Members, None] = {}
    for axes, lane in more:
        found |= dict.fromkeys(groups(mesh, axes, lane))
    for program in programs:
        ranks = mesh.members(program.coordinates)
        used = [one for one in program.instructions if one.lane is not Lane.COMPUTE]
        for axes, lane in dict.fromkeys((one.axes, str(one.lane)) for one in used if one.axes):
            found |= dict.fromkeys(groups(mesh, axes, lane, ranks))
        for one in {(one.op, one.peer, one.channel): one for one in used if one.peer is not None}.values():
            found |= dict.fromkeys(pair_of(mesh, rank, one) for rank in ranks)
    return _apart(sorted(found, key=lambda one: (one.pair, one.lane, one.ranks)))


def sizes(program: Program, mesh: Mesh, more: Iterable[tuple[Axes, str]] = ()) -> list[int]:
    """The ranks in each of the :func:`communicators` that a rank which runs ``program`` is a member of."""
    used = [one for one in program.instructions if one.lane is not Lane.COMPUTE]
    axes = dict.fromkeys([*more, *((one.axes, str(one.lane)) for one in used if one.axes)])
    pairs = {(one.op, one.peer, one.channel) for one in used if one.peer is not None}
    groups = {
        (mesh.group(mesh.members(program.coordinates)[0], each), lane)
        for each, lane in axes
        if mesh.axis_size(each) > 1
    }
    return [len(ranks) for ranks, _ in groups] + [2] * len(pairs)


def _apart(wanted: Sequence[Members]) -> tuple[Members, ...]:
    """In turns, in each of which a rank is a member of one at most; each comes as early as its members allow."""
    busy: dict[int, set[int]] = defaultdict(set)
    turns: dict[int, list[Members]] = defaultdict(list)
    for one in wanted:
        taken = set().union(*(busy[rank] for rank in one.ranks))
        turn = next(n for n in count() if n not in taken)
        for rank in one.ranks:
            busy[rank].add(turn)
        turns[turn].append(one)
    return tuple(one for turn in sorted(turns) for one in turns[turn])
