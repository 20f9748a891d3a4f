"""Derive the earlier instructions that each one waits for: read after write, write after read, write after write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwise.core.instruction import Buffer, Instruction, Lane, Queue


def derive_waits(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Return the instructions with ``waits`` filled in: for each queue, the latest conflicting instruction.

    Order is enough between instructions of the compute lane, but not of other queues: a transfer may only be posted
    when what it sends is there. An instruction that frees a buffer waits as if it wrote it; if an earlier one has freed
    the buffer already, such as the SEND of its content, it waits for that one and does not free it again.
    """
    out: list[Instruction] = []
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, dict[Queue, int]] = {}
    freed: set[Buffer] = set()
    waited: dict[tuple[Queue, Queue], int] = {}  # the latest position of the second queue that the first has waited for
    for position, one in enumerate(instructions):
        conflicts: set[int] = set()
        for buffer in (*one.reads, *one.writes, *one.frees):
            if buffer in writer:
                conflicts.add(writer[buffer])
        for buffer in (*one.writes, *one.frees):
            conflicts.update(readers.get(buffer, {}).values())
        latest: dict[Queue, int] = {}
        for at in conflicts:
            queue = out[at].queue
            if queue != one.queue or queue[0] is not Lane.COMPUTE:
                latest[queue] = max(latest.get(queue, -1), at)
        new = {queue: at for queue, at in latest.items() if at > waited.get((one.queue, queue), -1)}
        waited.update({(one.queue, queue): at for queue, at in new.items()})
        freed.difference_update(one.writes)
        frees = tuple(buffer for buffer in one.frees if buffer not in freed)
        freed.update(frees)
        out.append(replace(one, frees=frees, waits=tuple(sorted(new.values()))))
        for buffer in one.reads:
            readers.setdefault(buffer, {})[one.queue] = position
        for buffer in one.writes:
            writer[buffer] = position
            readers[buffer] = {}
    return out
