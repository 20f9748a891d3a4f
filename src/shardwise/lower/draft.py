"""A program that is being lowered: its compute instructions, and what passes put before and after each of them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwise.core.instruction import Buffer, Instruction


@dataclass
class ProgramDraft:
    """The compute instructions are never reordered, so their positions identify them; ``tasks`` are the positions at
    which tasks begin, and ``turns`` those at which turns do: the units of a block in one direction.
    """

    compute: list[Instruction]
    tasks: list[int] = field(default_factory=lambda: [0])
    turns: list[int] = field(default_factory=list)
    before: dict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    after: dict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    def task_of(self, position: int) -> int:
        """Return the start of the task that ``position`` is in."""
        return self.tasks[bisect_right(self.tasks, position) - 1]

    def readers(self, buffer: Buffer) -> list[int]:
        """Return the positions of the instructions that read ``buffer``."""
        return [i for i, one in enumerate(self.compute) if buffer in one.reads]

    def writers(self, buffer: Buffer) -> list[int]:
        """Return the positions of the instructions that write ``buffer``."""
        return [i for i, one in enumerate(self.compute) if buffer in one.writes]

    def by_microbatch(self, positions: Iterable[int]) -> list[list[int]]:
        """Return positions in groups, one for each microbatch."""
        groups: dict[int, list[int]] = {}
        for i in positions:
            groups.setdefault(self.compute[i].microbatch, []).append(i)
        return list(groups.values())

    @cached_property
    def _turns(self) -> list[tuple[int, int]]:
        """The (first, last) position of each position's turn."""
        ends = [*self.turns[1:], len(self.compute)]
        return [(start, end - 1) for start, end in zip(self.turns, ends, strict=True) for _ in range(start, end)]

    def ahead(self, position: int, turns: int) -> int:
        """Return the first position of the turn that comes ``turns`` turns before that of ``position``."""
        start = self._turns[position][0]
        for _ in range(turns):
            if start > 0:
                start = self._turns[start - 1][0]
        return start

    def behind(self, position: int, turns: int) -> int:
        """Return the last position of the turn that comes ``turns`` turns after that of ``position``."""
        end = self._turns[position][1]
        for _ in range(turns):
            if end + 1 < len(self.compute):
                end = self._turns[end + 1][1]
        return end

    def edit(self, position: int, **changes: Any) -> None:
        """Change fields of an instruction; ``add_NAME`` appends to the tuple in field NAME."""
        one = self.compute[position]
        merged = {
            k.removeprefix("add_"): getattr(one, k[4:]) + v if k.startswith("add_") else v for k, v in changes.items()
        }
        self.compute[position] = replace(one, **merged)

    def keep(self, position: int, buffer: Buffer) -> None:
        """Make an instruction no longer free ``buffer``."""
        one = self.compute[position]
        self.compute[position] = replace(one, frees=tuple(b for b in one.frees if b != buffer))

    def rename(self, position: int, old: Buffer, new: Buffer) -> None:
        """Make an instruction read and write ``new`` in place of ``old``."""
        one = self.compute[position]
        reads, writes = (tuple(dict.fromkeys(new if b == old else b for b in held)) for held in (one.reads, one.writes))
        self.compute[position] = replace(one, reads=reads, writes=writes)

    def instructions(self) -> list[Instruction]:
        """Return all instructions in order; what is after position -1 comes first, for a rank may compute nothing."""
        return [*self.after[-1]] + [
            one
            for position, each in enumerate(self.compute)
            for one in (*self.before[position], each, *self.after[position])
        ]
