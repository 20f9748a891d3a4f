"""What travels between the stages of a pipeline: live tensors forward, their gradients backward, each in a SEND and a
RECEIVE.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from shardwise.core.instruction import OP_INFO, Buffer, BufferKind, Instruction, Lane, Op
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.stages import Edge, Message, StageSplit
from shardwise.lower.validate import Validations
from shardwise.lower.versions import Versions
from shardwise.parallel.pipeline import PIPELINE

NEVER = sys.maxsize


@dataclass
class _Places:
    """Where a rank computes: the FORWARDs and BACKWARDs of its units by microbatch, and who reads and writes what."""

    draft: ProgramDraft
    forward: dict[tuple[int, int], int] = field(default_factory=dict)
    backward: dict[tuple[int, int], int] = field(default_factory=dict)
    read: dict[Buffer, int] = field(default_factory=dict)  # first
    written: dict[Buffer, int] = field(default_factory=dict)  # last
    freed: dict[Buffer, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, one in enumerate(self.draft.compute):
            if one.op is Op.FORWARD:
                self.forward[one.unit, one.microbatch] = position
            elif OP_INFO[one.op].runs_unit:  # the backward is behind the forward that is run again
                self.backward[one.unit, one.microbatch] = position
            for buffer in one.reads:
                self.read.setdefault(buffer, position)
            self.written |= dict.fromkeys(one.writes, position)
            self.freed |= dict.fromkeys(one.frees, position)

    def task_before(self, position: int) -> int:
        """The start of the task before that of ``position``."""
        return self.draft.tasks[max(bisect_right(self.draft.tasks, position) - 2, 0)]


def messages(drafts: Sequence[ProgramDraft], cut: StageSplit, versions: Versions) -> Sequence[Sequence[int]]:
    """Put the messages into the drafts of all ranks; returns where each rank validates its updates.

    What one rank sends to another is received in the same order.  A RECEIVE is posted one task before the one that
    needs it, so that the transfer runs under that; a SEND as soon as there is something to send.
    """
    places = [_Places(draft) for draft in drafts]
    edges = _edges(cut)
    sent: list[list[Message]] = [[] for _ in places]
    received: list[dict[int, list[Message]]] = [{} for _ in places]  # by source
    found = [one for m in range(versions.microbatches * versions.batches) for one in _in_microbatch(edges, places, m)]
    validations = Validations.of(drafts, found, versions)
    for one in sorted(found, key=lambda one: (one.made, one.to)):
        sent[one.source].append(one)
        received[one.to].setdefault(one.source, []).append(one)
    for rank, here in enumerate(places):
        _send(here, sent[rank], received[rank])
        for _, mine in sorted(received[rank].items()):
            _receive(here, mine, validations)
    return validations.at


def _edges(cut: StageSplit) -> list[Edge]:
    """Those of activations, then those of gradients."""
    pairs = [(unit, rank) for unit in range(len(cut.units)) for rank in cut.readers(unit)]
    forward = [Edge(cut.rank(unit), reader, unit, cut.crossing(unit, reader), False) for unit, reader in pairs]
    backward = [
        Edge(reader, cut.rank(unit), unit, cut.crossing(unit, reader, gradients=True), True) for unit, reader in pairs
    ]
    return [*forward, *(edge for edge in backward if edge.tensors)]


def _in_microbatch(edges: Sequence[Edge], places: Sequence[_Places], m: int) -> Iterator[Message]:
    """What travels in a microbatch; in evaluation no gradients do."""
    for edge in edges:
        source, to, key = places[edge.source], places[edge.to], (edge.unit, m)
        if not edge.gradient:
            yield Message(
                **vars(edge), microbatch=m, made=source.forward[key], needed=to.read[BufferKind.ACTIVATION.of(*key)]
            )
        elif key in to.backward:
            yield Message(
                **vars(edge), microbatch=m, made=source.written[BufferKind.GRADIENT.of(*key)], needed=to.backward[key]
            )


def _send(here: _Places, mine: Sequence[Message], answers: Mapping[int, Sequence[Message]]) -> None:
    last = {one.sent: one for one in mine}
    arrived = {to: _Arrived(answers.get(to, ())) for to in {one.to for one in mine}}
    known: dict[Buffer, int] = {}  # when all who were sent it are known to have it
    for one in mine:
        known[one.sent] = max(known.get(one.sent, 0), arrived[one.to].known(one))
    for one in mine:
        # What nobody here reads any more ends with its last message.
        ends = last[one.sent] is one and here.freed.get(one.sent, one.made) <= one.made
        if ends and one.sent in here.freed:
            here.draft.keep(here.freed[one.sent], one.sent)
        if ends and known[one.sent] < NEVER:  # what frees it as well waits for the SEND
            here.draft.edit(known[one.sent], add_frees=(one.sent,))
        send = Instruction(
            Op.SEND, unit=one.unit, microbatch=one.microbatch, peer=(PIPELINE, one.to - one.source), lane=Lane.SEND,
            reads=(one.sent,), frees=(one.sent,) if ends else (), tensors=one.tensors,
        )  # fmt: skip
        here.draft.after[one.made].append(send)


class _Arrived:
    """When a rank can tell that another has what it was sent: it reads something that the other sent after having used
    that.  To wait for the SEND there, so that what was sent ends, waits for nothing more."""

    def __init__(self, answers: Sequence[Message]) -> None:
        self.made = [one.made for one in answers]
        self.needed = [*accumulate((one.needed for one in reversed(answers)), min, initial=NEVER)][
            ::-1
        ]  # the first from here on

    def known(self, one: Message) -> int:
        """The position of computing; beyond the last where it does not."""
        return self.needed[bisect_left(self.made, one.needed)]


def _receive(here: _Places, mine: Sequence[Message], validations: Validations) -> None:
    """Those of one source, in the order in which it sends them."""
    at = len(here.draft.compute)
    posts: list[int] = []
    for one in reversed(mine):
        at = min(at, here.task_before(one.needed))
        posts.append(at)
    for one, due in zip(mine, reversed(posts), strict=True):
        post = max(due, validations.earliest(one))
        receive = Instruction(
            Op.RECEIVE, unit=one.unit, microbatch=one.microbatch, peer=(PIPELINE, one.source - one.to),
            lane=Lane.RECEIVE,
            writes=(one.received,), tensors=one.tensors, crosses=validations.crosses(one, post),
        )  # fmt: skip
        here.draft.before[post].append(receive)
        if one.gradient:
            here.draft.edit(one.needed, add_reads=(one.received,), add_frees=(one.received,))
