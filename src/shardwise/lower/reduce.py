"""Put the reductions of gradients over ranks into a draft, and assign the slots in which gradients wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.part import STEP, Part
from shardwise.core.plan import Plan
from shardwise.lower.draft import ProgramDraft
from shardwise.lower.slots import SlotSpan, assign
from shardwise.parallel.data import Reduction, placement, reductions
from shardwise.units.trace import Bucket


@dataclass(frozen=True)
class _Way:
    """A gradient that goes through a slot: ``writers`` are the positions of the backwards that write it, ``reductions``
    what sums it after the last of them, and after position ``stop`` it is added to the bucket's gradient.
    """

    bucket: Bucket
    writers: tuple[int, ...]
    reductions: tuple[Reduction, ...]
    first: bool  # nothing has been added to the bucket's gradient for this batch
    through: bool  # backward writes the gradient in place, and only the sum goes through the slot
    direct: bool  # the reduction writes this rank's shard straight to the gradient
    stop: int

    @property
    def span(self) -> SlotSpan:
        return SlotSpan(self.bucket.index, self.bucket.nbytes, self.writers[-1 if self.through else 0], self.stop)


class Reductions:
    """The reductions of all gradients of ``draft``, each right after the backward that completes the gradient, and the
    slots that they use.

    A gradient that is a partial sum between microbatches, and is summed in the dtype in which it is kept, is reduced in
    place. Any other goes through a slot: backward writes the whole gradient there, the reduction leaves this rank's
    shard in the slot, and the shard is added to the bucket's gradient. So does a gradient whose bucket still holds that
    of the batch before; ``ends`` are the positions after which each batch is updated.
    """

    def __init__(
        self,
        draft: ProgramDraft,
        plan: Plan,
        buckets: Sequence[Bucket],
        batch: Callable[[int], int],
        ends: Sequence[int],
        part: Part = STEP,
    ) -> None:
        self.part = part
        self.draft, self.plan, self.buckets, self.batch, self.ends = draft, plan, buckets, batch, ends
        self.narrow = plan.data.reduce not in ("auto", "fp64" if plan.numeric.precision == "fp64" else "fp32")
        self.ways: list[list[_Way]] = [[] for _ in ends]
        self.last: list[list[tuple[Bucket, tuple[Reduction, ...]]]] = [[] for _ in ends]
        for bucket in buckets:
            writers = draft.writers(BufferKind.GRAD.of(bucket.index)) if bucket.learns else []
            for number in range(len(ends)):
                mine = tuple(i for i in writers if batch(draft.compute[i].microbatch) == number)
                if mine:
                    self._decide(bucket, number, mine)
        slots, self.pool = assign([way.span for ways in self.ways for way in ways])
        self._slots = iter(slots)

    def _decide(self, bucket: Bucket, number: int, writers: tuple[int, ...]) -> None:
        rule = placement(self.plan, bucket.parameters[0].name, bucket.table)
        each, once = reductions(self.plan.mesh, rule, bucket.summed)
        ways: list[_Way] = []
        if number and (free := self.ends[number - 1]) >= writers[0]:
            ways = [_Way(bucket, writers, (), True, False, False, max(free, writers[-1]))]
        elif rule.grad == "S":
            for group in _groups(self.draft, writers, self.plan.data.reduced):
                first = not ways and not self.part.adds
                direct = first and bool(each) and not self.narrow
                ways.append(_Way(bucket, group, each, first, False, direct, self._stop(group[-1], number)))
        elif self.narrow and once and not bucket.table:
            ways = [_Way(bucket, writers[-1:], once, True, True, False, self._stop(writers[-1], number))]
            once = ()
        self.ways[number] += ways
        self.last[number].append((bucket, once))

    def _stop(self, position: int, number: int) -> int:
        """Return the position after which a gradient that is written at ``position`` is taken out of its slot."""
        return min(self.ends[number], self.draft.behind(position, max(1, self.plan.data.prefetch)))

    def put(self, number: int) -> dict[int, int]:
        """Put the reductions of a batch into the draft; batches must come in order. Return the position after which
        each bucket's gradient is complete.
        """
        draft = self.draft
        taken = [(way, next(self._slots)) for way in self.ways[number]]
        for way, slot in sorted(taken, key=lambda one: one[0].writers[-1]):
            _through_slot(draft, way, slot)
        found: dict[int, int] = {}
        for bucket, once in self.last[number]:
            grad = BufferKind.GRAD.of(bucket.index)
            mine = [i for i in draft.writers(grad) if self.batch(draft.compute[i].microbatch) == number]
            stop = self.ends[number]
            added = [i for i, held in draft.after.items() if i <= stop and any(grad in one.writes for one in held)]
            found[bucket.index] = at = max([*mine, *added])
            if self.part.completes:
                draft.after[at] += [_reduce(bucket.index, c, reads=(grad,), writes=(grad,)) for c in once]
        return found


def _groups(draft: ProgramDraft, writers: Iterable[int], reduced: str) -> list[tuple[int, ...]]:
    if reduced == "step":
        return [tuple(writers)]
    return sorted(map(tuple, draft.by_microbatch(writers)), key=lambda group: group[-1])


def _through_slot(draft: ProgramDraft, way: _Way, slot: int) -> None:
    index, place, grad = way.bucket.index, BufferKind.UNREDUCED.of(slot), BufferKind.GRAD.of(way.bucket.index)
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
    for reduction in way.reductions:
        if way.direct:
            one = _reduce(index, reduction, slot, reads=(place,), writes=(grad,), first=(index,), frees=(place,))
        else:
            one = _reduce(index, reduction, slot, reads=(place,), writes=(place,))
        draft.after[end].append(one)
    if not way.direct:
        draft.after[way.stop].append(add)


def _reduce(
    bucket: int, reduction: Reduction, slot: int = -1, *, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...],
    first: tuple[int, ...] = (), frees: tuple[Buffer, ...] = (),
) -> Instruction:  # fmt: skip
    if reduction.serves:
        inbox = BufferKind.INBOX.of(bucket)
        writes, frees = (*writes, inbox), (*frees, inbox)
    return Instruction(
        Op.PUSH if reduction.serves else Op.REDUCE, bucket=bucket, slot=slot, axes=reduction.axes, lane=Lane.REDUCE,
        reads=reads,
        writes=writes, first=first, frees=frees, scatters=reduction.scatters,
    )  # fmt: skip
