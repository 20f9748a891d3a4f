"""Put the gathers of sharded parameters into a draft, and assign the slots in which the parameters are whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.core.data_options import DataOptions
from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.plan import Plan
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.slots import SlotSpan, assign
from shardwise.parallel.data import placement, shard_axes
from shardwise.units.trace import Bucket


def gather(
    draft: ProgramDraft, plan: Plan, buckets: Sequence[Bucket], ends: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Put the gathers into ``draft``; return the slots of the pool, each with the buckets that it holds.

    Parameters that rest sharded are gathered into a slot for each span of their uses, ``prefetch`` units ahead.
    Parameters that rest whole but are updated in shards are gathered once for each batch, in their own buffer, before
    their first use, so that this overlaps with the forward after the update; those that servers update are pulled.
    ``ends`` are the positions after which each batch is updated.
    """
    prefetch, axes = plan.data.prefetch, shard_axes(plan.mesh)
    spans: list[SlotSpan] = []
    uses: list[list[int]] = []
    for bucket in buckets:
        rule, param = placement(plan, bucket.parameters[0].name, bucket.table), BufferKind.PARAM.of(bucket.index)
        readers = draft.readers(param)
        if not readers or rule.state == "R" or (rule.rest == "R" and not bucket.learns):
            continue
        for begin, end in zip((0, *(end + 1 for end in ends)), ends, strict=False):
            mine = [i for i in readers if begin <= i <= end]
            if mine and rule.rest == "R":
                start = max(begin, draft.ahead(mine[0], prefetch))
                whole = _gather(axes, bucket, -1, param)
                draft.before[start].append(replace(whole, op=Op.PULL) if rule.state == "O" else whole)
                continue
            for group in _groups(draft, plan.data, mine) if mine else ():
                start = max(begin, draft.ahead(group[0], prefetch))
                spans.append(SlotSpan(bucket.index, bucket.nbytes, start, group[-1]))
                uses.append(group)
    slots, pool = assign(spans)
    for span, used, slot in sorted(zip(spans, uses, slots, strict=True), key=lambda one: one[1][0]):
        place = BufferKind.SLOT.of(slot)
        draft.before[span.start].append(_gather(axes, buckets[span.bucket], slot, place))
        for position in used:
            draft.rename(position, BufferKind.PARAM.of(span.bucket), place)
        draft.edit(used[-1], add_frees=(place,))
    return pool


def _gather(axes: tuple[str, ...], bucket: Bucket, slot: int, into: Buffer) -> Instruction:
    param = BufferKind.PARAM.of(bucket.index)
    return Instruction(
        Op.GATHER,
        bucket=bucket.index,
        slot=slot,
        axes=axes,
        lane=Lane.GATHER,
        reads=(param,),
        writes=(into,),
    )


def _groups(draft: ProgramDraft, options: DataOptions, readers: list[int]) -> list[list[int]]:
    """Return the uses of a bucket, in groups for each of which it is gathered once.

    Groups are merged if the next gather would be issued as soon as the bucket is freed.
    """
    if options.gathered == "step":
        return [readers]
    groups = sorted(draft.by_microbatch(readers)) if options.gathered == "forward" else [[i] for i in readers]
    merged = [groups[0]]
    for group in groups[1:]:
        if draft.ahead(group[0], options.prefetch) <= merged[-1][-1] + 1:
            merged[-1] = sorted({*merged[-1], *group})
        else:
            merged.append(group)
    return merged
