"""Assign slots, memory of a pool that flat buffers use in turn: register allocation in which all uses are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """From before compute instruction ``start`` until after ``stop``, ``bucket`` needs a slot of ``nbytes`` bytes."""

    bucket: int
    nbytes: int
    start: int
    stop: int


def assign(spans: Sequence[SlotSpan]) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return a slot for each span, and the buckets that each slot holds; spans that overlap never share a slot.

    In the order of their starts, spans take the smallest free slot that is large enough, else the largest free one,
    which grows. Among equal slots they take the one that has been free for longest, so that a transfer into it need not
    wait for its last reader.
    """
    sizes: list[int] = []
    until: list[int] = []  # the stop of the last span in each slot
    held: list[dict[int, None]] = []
    found = [-1] * len(spans)
    for at in sorted(range(len(spans)), key=lambda i: (spans[i].start, i)):
        span = spans[at]
        free = [slot for slot in range(len(sizes)) if until[slot] < span.start]
        fitting = [slot for slot in free if sizes[slot] >= span.nbytes]
        if fitting:
            slot = min(fitting, key=lambda s: (sizes[s], until[s]))
        elif free:
            slot = max(free, key=lambda s: (sizes[s], -until[s]))
        else:
            slot = len(sizes)
            sizes.append(0)
            until.append(-1)
            held.append({})
        sizes[slot] = max(sizes[slot], span.nbytes)
        until[slot] = span.stop
        held[slot][span.bucket] = None
        found[at] = slot
    return found, tuple(tuple(sorted(buckets)) for buckets in held)
