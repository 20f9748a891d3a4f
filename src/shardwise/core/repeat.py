"""This module finds the instructions that run again when VALIDATE finds an update wrong, and checks that all ranks can
run them again together.

A rank runs the instructions between its decision and the VALIDATE again.  So none of them may add to a value from
before, and what they communicate has to be done again on the other side too.  A message that is sent before the
sender's VALIDATE and received after the receiver's comes twice, and its RECEIVE says so (``crosses``).  A message that
is sent after the sender's VALIDATE must not be awaited before the receiver's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.core.instruction import OP_INFO, BufferKind, Instruction, Op
from shardwise.core.program import Program


def repeated(instructions: Sequence[Instruction]) -> dict[int, range]:
    """Return, for each batch that is validated, the positions that run again if its update was wrong: from behind the
    last instruction that takes part in its decision up to its VALIDATE.  A batch that nothing decides on has an empty
    range.
    """
    stop = {one.version: at for at, one in enumerate(instructions) if one.op is Op.VALIDATE}
    if not stop:  # a shortcut for most programs, since this runs at every step
        return {}
    begin = {
        one.version: at + 1 for at, one in enumerate(instructions) if one.op in (Op.DECIDE, Op.BACKUP) or of_norm(one)
    }
    return {batch: range(begin.get(batch, at), at) for batch, at in stop.items()}


def of_norm(one: Instruction) -> bool:
    """Return whether the instruction sums the norms of ranks."""
    return one.op is Op.REDUCE and any(buffer.kind == BufferKind.NORM for buffer in one.reads)


def unrepeatable(
    classes: Sequence[Program],
    collectives: Sequence[Sequence[tuple[int, int]]],
    messages: Sequence[Sequence[tuple[int, int]]],
) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the instructions, as (class, position), that cannot run again as they should, each with the reason.

    Each item of ``collectives`` and ``messages`` lists the instructions that complete together: of a message first the
    SEND, then the RECEIVE.
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
        decided = {one.version for one in program.instructions if one.op is Op.DECIDE}
        for at, one in enumerate(program.instructions):
            if one.op is Op.VALIDATE and one.version not in decided:
                yield (number, at), f"is of batch {one.version}, which nothing decides on"
            if one.op is Op.BACKUP and one.version not in spans[number]:
                yield (number, at), "is of an update that no VALIDATE looks at"
    for members in collectives:
        if len({batch[number].get(at) for number, at in members}) > 1:
            yield members[0], "is run again by some of its ranks and not by others"
    for out, into in messages:
        sent, received = (batch[number].get(at) for number, at in (out, into))
        if sent is not None and sent not in spans[into[0]]:
            yield into, f"is of a message that comes again if batch {sent} was wrong, which its rank never validates"
            continue
        behind = sent is not None and into[1] > spans[into[0]][sent].stop
        if classes[into[0]].instructions[into[1]].crosses != behind:
            yield (
                into,
                "is of a message that comes twice if an update was wrong, and does not say so, or the other way round",
            )
        elif sent != received and not behind:
            yield into, "asks for a message before a VALIDATE that its sender sends behind one, or the other way round"
