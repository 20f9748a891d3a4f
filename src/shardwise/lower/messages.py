"""Messages between the stages of a pipeline: live tensors go forward and their gradients backward, each by a SEND and a
RECEIVE.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from shardwise.core.instruction import OP_INFO, Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.program import Program
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.stages import Edge, Message, StageSplit
from shardwise.lower.validate import Validations
from shardwise.lower.versions import Versions
from shardwise.parallel.pipeline import PIPELINE

NEVER = sys.maxsize


@dataclass
class _Places:
    """Positions in a rank's draft: of FORWARD and BACKWARD by (unit, microbatch), and of uses of buffers."""

    draft: ProgramDraft
    forward: dict[tuple[int, int], int] = field(default_factory=dict)
    backward: dict[tuple[int, int], int] = field(default_factory=dict)
    read: dict[Buffer, int] = field(default_factory=dict)  # the first position that reads
    written: dict[Buffer, int] = field(default_factory=dict)  # the last position that writes
    freed: dict[Buffer, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, one in enumerate(self.draft.compute):
            if one.op is Op.FORWARD:
                self.forward[one.unit, one.microbatch] = position
            elif OP_INFO[one.op].runs_unit:  # BACKWARD comes after RECOMPUTE and replaces its position
                self.backward[one.unit, one.microbatch] = position
            for buffer in one.reads:
                self.read.setdefault(buffer, position)
            self.written |= dict.fromkeys(one.writes, position)
            self.freed |= dict.fromkeys(one.frees, position)

    def task_before(self, position: int) -> int:
        """Return the start of the task before the task of ``position``."""
        return self.draft.tasks[max(bisect_right(self.draft.tasks, position) - 2, 0)]


def messages(drafts: Sequence[ProgramDraft], cut: StageSplit, versions: Versions) -> Sequence[Sequence[int]]:
    """Put the messages into the drafts of all ranks; return the positions before which each rank validates its updates.

    A rank receives what another one sends in the same order. A RECEIVE is posted one task before the task that needs
    it, so that the transfer overlaps with that task; a SEND is posted as soon as there is something to send.
    """
    places = [_Places(draft) for draft in drafts]
    edges = _edges(cut)
    sent: list[list[Message]] = [[] for _ in places]
    received: list[dict[int, list[Message]]] = [{} for _ in places]  # by source rank
    number = versions.plan.microbatches * versions.batches
    found = [one for m in range(number) for one in _in_microbatch(edges, places, m)]
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
    """Return the edges of activations, then those of gradients."""
    pairs = [(unit, rank) for unit in range(len(cut.units)) for rank in cut.readers(unit)]
    forward = [Edge(cut.rank(unit), reader, unit, cut.crossing(unit, reader), False) for unit, reader in pairs]
    backward = [
        Edge(reader, cut.rank(unit), unit, cut.crossing(unit, reader, gradients=True), True) for unit, reader in pairs
    ]
    return [*forward, *(edge for edge in backward if edge.tensors)]


def renamed(programs: Sequence[Program], cuts: Sequence[StageSplit]) -> tuple[Program, ...] | None:
    """Return programs made for microbatches that are cut as ``cuts[0]``, with messages that carry the tensors of each
    microbatch by its own cut: microbatches that are captured for other rows name them otherwise, or have more of them.
    None where not the same units pass something to the same ranks."""
    first, *others = (_edges(cut) for cut in cuts)
    names: list[dict[tuple[int, bool, tuple[str, ...]], tuple[str, ...]]] = []
    for edges in (first, *others):
        if [replace(one, tensors=()) for one in edges] != [replace(one, tensors=()) for one in first]:
            return None
        names.append({})
        for one, own in zip(first, edges, strict=True):
            if names[-1].setdefault((one.unit, one.gradient, one.tensors), own.tensors) != own.tensors:
                return None

    def of(one: Instruction) -> Instruction:
        if one.op not in (Op.SEND, Op.RECEIVE) or one.bucket >= 0:
            return one
        gradient = (one.reads or one.writes)[0].kind is not BufferKind.ACTIVATION
        return replace(one, tensors=names[one.microbatch % len(cuts)][one.unit, gradient, one.tensors])

    return tuple(replace(one, instructions=tuple(map(of, one.instructions))) for one in programs)


def _in_microbatch(edges: Sequence[Edge], places: Sequence[_Places], m: int) -> Iterator[Message]:
    """Yield the messages of a microbatch; in evaluation there are none of gradients."""
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
    known: dict[Buffer, int] = {}  # the position at which all its receivers are known to have it
    for one in mine:
        known[one.sent] = max(known.get(one.sent, 0), arrived[one.to].known(one))
    for one in mine:
        # The last message frees the buffer if no instruction after it reads the buffer.
        ends = last[one.sent] is one and here.freed.get(one.sent, one.made) <= one.made
        if ends and one.sent in here.freed:
            here.draft.keep(here.freed[one.sent], one.sent)
        if ends and known[one.sent] < NEVER:  # this instruction frees it as well, and so waits for the SEND
            here.draft.edit(known[one.sent], add_frees=(one.sent,))
        send = Instruction(
            Op.SEND, unit=one.unit, microbatch=one.microbatch, peer=(PIPELINE, one.to - one.source), lane=Lane.SEND,
            reads=(one.sent,), frees=(one.sent,) if ends else (), tensors=one.tensors,
        )  # fmt: skip
        here.draft.after[one.made].append(send)


class _Arrived:
    """Tells when a rank knows that another one has received a message: when it reads an answer that the other sent
    after it had used the message. To wait for the SEND at that point costs nothing, and frees what was sent."""

    def __init__(self, answers: Sequence[Message]) -> None:
        self.made = [one.made for one in answers]
        # For each answer, the first position that needs it or a later one.
        self.needed = [*accumulate((one.needed for one in reversed(answers)), min, initial=NEVER)][::-1]

    def known(self, one: Message) -> int:
        """Return the position at which the rank knows it, or NEVER."""
        return self.needed[bisect_left(self.made, one.needed)]


def _receive(here: _Places, mine: Sequence[Message], validations: Validations) -> None:
    """Post the RECEIVEs from one source, in the order in which it sends."""
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
