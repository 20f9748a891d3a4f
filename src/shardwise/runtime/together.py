"""STEPs that directly follow each other are taken together: a bucket has two groups of parameters, and each costs a
kernel for its counter of steps, one for the update, and one that takes the counter back where the step is skipped."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shardwise.core.instruction import Op
from shardwise.core.program import Program
from shardwise.runtime.buffers import BucketMemory


def joint_updates(program: Program, like: Callable[[int], Hashable | None]) -> dict[int, tuple[int, ...]]:
    """Return the buckets that are updated at each STEP of a program, by its position: the first STEP of a row updates
    the buckets of all, the others none.

    ``like`` gives what buckets must have in common to be updated together; with None a bucket is updated alone.
    """
    found: dict[int, list[int]] = {}
    first = -1  # position of the first STEP of the current row
    for position, one in enumerate(program.instructions):
        if one.op is not Op.STEP:
            first = -1
            continue
        head = program.instructions[first] if first >= 0 else None
        kind = like(one.bucket)
        if (
            head is not None
            and kind is not None
            and kind == like(head.bucket)
            and head.version == one.version
            and not one.waits
        ):
            found[first].append(one.bucket)
            found[position] = []
        else:
            first = position
            found[position] = [one.bucket]
    return {position: tuple(buckets) for position, buckets in found.items()}


def joint_key(memory: BucketMemory) -> Hashable | None:
    """Return what buckets must have in common to be updated together: a dtype, if a fused kernel updates them here."""
    share = memory.share
    if memory.host or memory.table is not None or share.whole or [one.name for one in share.updates] != [None]:
        return None
    (update,) = memory.updates
    return (memory.bucket.wide, share.updates[0].part) if update.optimizer.fused else None
