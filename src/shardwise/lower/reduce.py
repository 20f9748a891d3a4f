"""What happens to gradients between backward and the optimizer: sums over ranks, and the slots in which they wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Buffer, Instruction, Lane, Op
from shardwise.core.plan import Plan
from shardwise.core.transition import Collective
from shardwise.lower.draft import Draft
from shardwise.lower.slots import Span, assign
from shardwise.parallel.data import placement, reductions
from shardwise.trace.trace import Bucket


@dataclass(frozen=True)
class _Way:
    """A gradient that goes through a slot: positions of the backwards that write it there, and what is done to it after the last."""

    bucket: Bucket
    writers: tuple[int, ...]
    collectives: tuple[Collective, ...]
    first: bool  # nothing has been added to the bucket's gradient in this step
    through: bool  # backward writes the gradient itself; only the sum goes through a slot


def reduce(draft: Draft, plan: Plan, buckets: Sequence[Bucket]) -> tuple[tuple[int, ...], ...]:
    """Put the reductions of all gradients into ``draft``, each right after the backward that completes it; returns the slots.

    A gradient that is a partial sum between microbatches, and is summed in the dtype in which it is kept, is reduced in place.  Any other
    goes through a slot: backward writes the whole of it there, the sum leaves this rank's shard in it, which is added to the gradient.
    """
    ways: list[_Way] = []
    narrow = plan.reduce not in ("auto", "fp64" if plan.precision == "fp64" else "fp32")
    last: list[tuple[Bucket, tuple[Collective, ...]]] = []
    for bucket in buckets:
        rule, grad = placement(plan, bucket.parameters[0].name), Buffer("grad", bucket.index)
        writers = draft.writers(grad)
        if not bucket.learns or not writers:
            continue
        each, once = reductions(plan, rule, bucket.numel)
        if rule.grad == "S":
            groups = _groups(draft, writers, plan.reduced)
            ways += [_Way(bucket, group, each, i == 0, False) for i, group in enumerate(groups)]
        elif narrow and once:
            ways.append(_Way(bucket, (writers[-1],), once, True, True))
            continue
        last.append((bucket, once))
    depth = max(1, plan.prefetch)
    spans = [
        Span(w.bucket.index, w.bucket.nbytes, w.writers[-1 if w.through else 0], draft.behind(w.writers[-1], depth)) for w in ways
    ]
    slots, pool = assign(spans)
    for way, span, slot in sorted(zip(ways, spans, slots, strict=True), key=lambda one: one[0].writers[-1]):
        _through_slot(draft, way, slot, span.stop, narrow)
    for bucket, once in last:
        grad = Buffer("grad", bucket.index)
        position = max((i for i, held in draft.after.items() if any(grad in one.writes for one in held)), default=-1)
        position = max([position, *draft.writers(grad)])
        draft.after[position] += [_reduce(bucket.index, c, reads=(grad,), writes=(grad,)) for c in once]
    return pool


def _groups(draft: Draft, writers: Iterable[int], reduced: str) -> list[tuple[int, ...]]:
    if reduced == "step":
        return [tuple(writers)]
    by: dict[int, list[int]] = {}
    for i in writers:
        by.setdefault(draft.compute[i].microbatch, []).append(i)
    return sorted((tuple(group) for group in by.values()), key=lambda group: group[-1])


def _through_slot(draft: Draft, way: _Way, slot: int, stop: int, narrow: bool) -> None:
    index, place, grad = way.bucket.index, Buffer("unreduced", slot), Buffer("grad", way.bucket.index)
    end = way.writers[-1]
    if way.through:
        draft.after[end].append(Instruction(Op.ROUND, bucket=index, slot=slot, reads=(grad,), writes=(place,)))
    else:
        for i in way.writers:
            draft.rename(i, grad, place)
            first = tuple(b for b in draft.compute[i].first if b != index) + ((index,) if i == way.writers[0] else ())
            draft.edit(i, add_slots=((index, slot),), first=first)
    add = Instruction(
        Op.ADD, bucket=index, slot=slot, reads=(place,) if way.first else (place, grad), writes=(grad,),
        first=(index,) if way.first else (), frees=(place,),
    )  # fmt: skip
    direct = way.first and not narrow and [c.kind for c in way.collectives] == ["reduce_scatter"]
    for collective in way.collectives:
        if direct:
            one = _reduce(index, collective, slot, reads=(place,), writes=(grad,), first=(index,), frees=(place,))
        else:
            one = _reduce(index, collective, slot, reads=(place,), writes=(place,))
        draft.after[end].append(one)
    if not direct:
        draft.after[stop].append(add)


def _reduce(
    bucket: int, collective: Collective, slot: int = -1, *, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...],
    first: tuple[int, ...] = (), frees: tuple[Buffer, ...] = (),
) -> Instruction:  # fmt: skip
    if collective.kind not in ("all_reduce", "reduce_scatter"):
        raise ShardwiseError(f"bucket {bucket}: {collective.kind} of gradients is not known")
    return Instruction(
        Op.REDUCE, bucket=bucket, slot=slot, axes=collective.axes, lane=Lane.REDUCE, reads=reads, writes=writes, first=first,
        frees=frees, scatters=collective.kind == "reduce_scatter",
    )  # fmt: skip
