"""Which earlier instructions each one waits for: read after write, write after read, write after write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardwise.core.instruction import Buffer, Instruction, Lane


def derive_waits(instructions: Iterable[Instruction]) -> list[Instruction]:
    """Fill in ``waits``.  On the compute lane order is enough; of any other the latest conflicting instruction stands for all before it.

    Also on its own: a transfer may be posted only when what it sends is there.
    """
    out: list[Instruction] = []
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, dict[Lane, int]] = {}
    waited: dict[tuple[Lane, Lane], int] = {}  # what an earlier instruction of the lane has waited for needs no second wait
    for position, one in enumerate(instructions):
        conflicts: set[int] = set()
        for buffer in (*one.reads, *one.writes):
            if buffer in writer:
                conflicts.add(writer[buffer])
        for buffer in one.writes:
            conflicts.update(readers.get(buffer, {}).values())
        latest: dict[Lane, int] = {}
        for at in conflicts:
            lane = out[at].lane
            if lane is not one.lane or lane is not Lane.COMPUTE:
                latest[lane] = max(latest.get(lane, -1), at)
        new = {lane: at for lane, at in latest.items() if at > waited.get((one.lane, lane), -1)}
        waited.update({(one.lane, lane): at for lane, at in new.items()})
        out.append(replace(one, waits=tuple(sorted(new.values()))))
        for buffer in one.reads:
            readers.setdefault(buffer, {})[one.lane] = position
        for buffer in one.writes:
            writer[buffer] = position
            readers[buffer] = {}
    return out
