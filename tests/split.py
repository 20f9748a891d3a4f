"""Programs whose every BACKWARD is in two parts, the second at any legal place: made by hand, as pipelines will have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from shardwise.core.instruction import Buffer, Instruction, Op
from shardwise.lower import step

Key = Callable[[int, int, int], tuple[float, ...]]
"""(position of the first part, microbatch, number of microbatches) → where the second part comes, as a position of its own; ties
are broken by the first part's."""

ORDERS: dict[str, Key] = {
    "at once": lambda at, m, last: (at,),
    "after its microbatch": lambda at, m, last: (m, 1, at),
    "a microbatch later": lambda at, m, last: (m + 1, 1, at),
    "at the end": lambda at, m, last: (last, 1, m, at),
    "at the end, backwards": lambda at, m, last: (last, 1, -m, -at),
}


def parts(lowering: step._Lowering, one: Instruction) -> tuple[Instruction, Instruction]:
    """BACKWARD_INPUT and BACKWARD_WEIGHT in place of a BACKWARD, without ``first``."""
    u, m, unit = one.unit, one.microbatch, lowering.trace.units[one.unit]
    bucket = {p.name: b.index for b in lowering.buckets for p in b.parameters}
    putoff = Buffer("putoff", u, m)

    def grads(names: Sequence[str]) -> tuple[Buffer, ...]:
        return tuple(Buffer("grad", b) for b in sorted({bucket[n] for n in names}))

    others = tuple(b for b in one.writes if b.kind != "grad")
    first = replace(one, op=Op.BACKWARD_INPUT, writes=(*grads(unit.inside), *others, putoff), first=())
    made = [p for p in (*lowering.producers(u), u) if set(lowering.trace.units[p].outputs) & set(unit.held)]
    reads = (putoff, *(Buffer("activation", p, m) for p in made))
    second = Instruction(Op.BACKWARD_WEIGHT, unit=u, microbatch=m, reads=reads, writes=grads(unit.products))
    return first, second


def ordered(lowering: step._Lowering, compute: Sequence[Instruction], order: str) -> list[Instruction]:
    """``compute`` with every BACKWARD in two parts; only the first of a microbatch's instructions stay where they are."""
    last = max(one.microbatch for one in compute)
    keyed: list[tuple[tuple[float, ...], Instruction]] = []
    for at, one in enumerate(compute):
        if one.op is not Op.BACKWARD:
            keyed.append(((at,) if order == "at once" else (one.microbatch, 0, at), one))
            continue
        first, second = parts(lowering, one)
        keyed.append(((at,) if order == "at once" else (one.microbatch, 0, at), first))
        keyed.append((ORDERS[order](at, one.microbatch, last), second))
    written: set[int] = set()
    out = []
    for _, one in sorted(keyed, key=lambda pair: pair[0]):
        grads = [b.index for b in one.writes if b.kind == "grad"]
        out.append(replace(one, first=tuple(b for b in grads if b not in written)))
        written |= set(grads)
    return out


@contextmanager
def split(order: str) -> Iterator[None]:
    """Programs that are lowered meanwhile have their backwards in two parts."""
    original = step._Lowering.compute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step._Lowering, "compute", lambda self: ordered(self, original(self), order))
        yield
