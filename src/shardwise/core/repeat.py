"""What is run again where an update turns out to be wrong (VALIDATE), and whether that can be done on all ranks
together.

A rank runs again what lies between what it had decided and the VALIDATE.  So nothing in there may add to what is there
from before, and what it communicates has to be done again on the other side too: a message that is received only behind
the receiver's VALIDATE comes twice, and says so (``crosses``); one that is sent behind the sender's must not be awaited
before the receiver's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.core.instruction import OP_INFO, BufferKind, Instruction, Op
from shardwise.core.program import Program


def repeated(instructions: Sequence[Instruction]) -> dict[int, range]:
    """By batch that is validated: the positions that are run again if it was wrong, behind the decision and what it
    needs.
    """
    stop = {one.version: at for at, one in enumerate(instructions) if one.op is Op.VALIDATE}
    if not stop:  # as in most programs, which are asked at every step
        return {}
    begin = {
        one.version: at + 1 for at, one in enumerate(instructions) if one.op in (Op.DECIDE, Op.BACKUP) or of_norm(one)
    }
    return {batch: range(begin[batch], at) for batch, at in stop.items()}


def of_norm(one: Instruction) -> bool:
    """Whether it sums the norms of ranks."""
    return one.op is Op.REDUCE and any(buffer.kind == BufferKind.NORM for buffer in one.reads)


def unrepeatable(
    classes: Sequence[Program],
    collectives: Sequence[Sequence[tuple[int, int]]],
    messages: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[tuple[tuple[int, int], str]]:
    """The instructions, as (class, position), that cannot be run again as they should be, and why.

    ``collectives`` and ``messages`` are what completes together; of a message first the SEND, then the RECEIVE.
    """
    spans = [repeated(program.instructions) for program in classes]
    batch = [{at: k for k, span in mine.items() for at in span} for mine in spans]
    for number, mine in enumerate(batch):
        for at, k in mine.items():
            if not OP_INFO[classes[number].instructions[at].op].repeats:
                yield (
                    (number, at),
                    f"lies between the update of batch {k} and its VALIDATE, where it would be run again",
                )
    for number, program in enumerate(classes):
        for at, one in enumerate(program.instructions):
            if one.op is Op.BACKUP and one.version not in spans[number]:
                yield (number, at), "is of an update that no VALIDATE looks at"
    for members in collectives:
        if len({batch[number].get(at) for number, at in members}) > 1:
            yield members[0], "is run again by some of its ranks and not by others"
    for out, into in messages:
        sent, received = (batch[number].get(at) for number, at in (out, into))
        behind = sent is not None and into[1] > spans[into[0]][sent].stop
        if classes[into[0]].instructions[into[1]].crosses != behind:
            yield (
                into,
                "is of a message that comes twice if an update was wrong, and does not say so, or the other way round",
            )
        elif sent != received and not behind:
            yield into, "asks for a message before a VALIDATE that its sender sends behind one, or the other way round"
