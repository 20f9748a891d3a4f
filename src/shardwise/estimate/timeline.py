"""A timeline has the bytes that a rank holds at every instruction of a program, from the sizes of its buffers alone.

A buffer is alive from the first instruction that makes a part of it to the one that frees it, or, if that communicates,
to the one that waits for it; while an instruction runs it may need more than it leaves.  Persistent buffers are alive
from the start and for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.core.instruction import CATEGORY, Buffer, Category, Instruction, Lane

Made = Mapping[Buffer, Mapping[str, int]]
"""The bytes by buffer and part: a part that is made again takes the place of the one that was there."""


class BufferSizes(Protocol):
    """The bytes of what a program names."""

    @property
    def persistent(self) -> Mapping[Buffer, int]:
        """The bytes of the buffers that are there before the step and after it."""

    def made(self, one: Instruction) -> Made:
        """Return the bytes that an instruction makes and leaves."""

    def arrived(self, one: Instruction) -> tuple[Made, int]:
        """Return what is made when an instruction that communicates has been waited for, and the most bytes that this
        adds to what was alive before."""

    def peak(self, one: Instruction) -> int:
        """Return the most bytes that an instruction adds to what was alive before it, including what it leaves."""


@dataclass(frozen=True)
class Moment:
    """The bytes by category before one instruction, at its peak, and after it."""

    before: Mapping[Category, int]
    peak: Mapping[Category, int]
    after: Mapping[Category, int]


@dataclass(frozen=True)
class Timeline:
    """The moments of a program, one for each of its instructions."""

    instructions: tuple[Instruction, ...]
    moments: tuple[Moment, ...]

    @property
    def at(self) -> int:
        """The position of the instruction that reaches the highest peak first."""
        return max(range(len(self.moments)), key=lambda i: (total(self.moments[i].peak), -i))

    @property
    def peak(self) -> Mapping[Category, int]:
        """The bytes at the highest peak, by category."""
        return self.moments[self.at].peak

    @property
    def peak_bytes(self) -> int:
        return total(self.peak)


def total(sizes: Mapping[Category, int]) -> int:
    """Return the bytes of all categories together."""
    return sum(sizes.values())


def by_category(sizes: Mapping[Buffer, int]) -> Counter[Category]:
    """Return the bytes of buffers, by category."""
    found = Counter(dict.fromkeys(Category, 0))
    for buffer, nbytes in sizes.items():
        found[CATEGORY[buffer.kind]] += nbytes
    return found


def timeline(instructions: Sequence[Instruction], sizes: BufferSizes) -> Timeline:
    """Walk a program.  At an instruction's peak, what it leaves counts under its category and the rest as temporary."""
    alive: dict[Buffer, dict[str, int]] = {b: {"": n} for b, n in sizes.persistent.items()}
    now = by_category(sizes.persistent)
    moments = []
    posted: dict[int, Instruction] = {}  # those, by position, that free something once another has waited for them

    def free(one: Instruction) -> None:
        for buffer in one.frees:
            if buffer not in sizes.persistent:
                now[CATEGORY[buffer.kind]] -= sum(alive.pop(buffer, {}).values())

    def make(made: Made, more: int) -> dict[Category, int]:
        """Count what is made; return the bytes at the peak, which is ``more`` than what was there."""
        at = dict(now)
        for buffer, parts in made.items():
            held, category = alive.setdefault(buffer, {}), CATEGORY[buffer.kind]
            grown = sum(parts.values()) - sum(held.get(p, 0) for p in parts)
            held.update(parts)
            now[category] += grown
            left = max(0, min(grown, more))
            at[category] += left
            more -= left
        at[Category.TEMPORARY] += more
        return at

    for position, one in enumerate(instructions):
        before = dict(now)
        peaks = [before]  # what it waits for has ended before its own peak
        for end in one.waits:
            for earlier in [p for p, other in posted.items() if p <= end and other.queue == instructions[end].queue]:
                done = posted.pop(earlier)
                peaks.append(make(*sizes.arrived(done)))
                free(done)
        peaks.append(make(sizes.made(one), sizes.peak(one)))
        at = max(peaks, key=total)
        if one.lane is Lane.COMPUTE:
            free(one)
        elif one.frees:
            posted[position] = one
        moments.append(Moment(before, at, dict(now)))
    return Timeline(tuple(instructions), tuple(moments))
