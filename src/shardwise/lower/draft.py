"""A program being lowered: what computes, in order, and what the passes put before and after each of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.core.instruction import Buffer, Instruction


@dataclass
class Draft:
    """``compute`` is never reordered, so its positions stay names of instructions."""

    compute: list[Instruction]
    before: dict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    after: dict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))

    def readers(self, buffer: Buffer) -> list[int]:
        """Positions of what reads ``buffer``."""
        return [i for i, one in enumerate(self.compute) if buffer in one.reads]

    def writers(self, buffer: Buffer) -> list[int]:
        """Positions of what writes ``buffer``."""
        return [i for i, one in enumerate(self.compute) if buffer in one.writes]

    def last(self, buffers: Sequence[Buffer]) -> int:
        """The position after which nothing writes any of ``buffers``."""
        wanted = set(buffers)
        return max(i for i, one in enumerate(self.compute) if wanted & set(one.writes))

    def clamp(self, position: int) -> int:
        return min(max(position, 0), len(self.compute) - 1)

    def edit(self, position: int, **changes: Any) -> None:
        """Change fields of an instruction; ``add_NAME`` appends to the tuple NAME."""
        one = self.compute[position]
        merged = {k.removeprefix("add_"): getattr(one, k[4:]) + v if k.startswith("add_") else v for k, v in changes.items()}
        self.compute[position] = replace(one, **merged)

    def rename(self, position: int, old: Buffer, new: Buffer) -> None:
        """Let an instruction access ``new`` in place of ``old``."""
        one = self.compute[position]
        reads, writes = (tuple(dict.fromkeys(new if b == old else b for b in held)) for held in (one.reads, one.writes))
        self.compute[position] = replace(one, reads=reads, writes=writes)

    def instructions(self) -> list[Instruction]:
        """All of it in order."""
        return [
            one
            for position, each in enumerate(self.compute)
            for one in (*self.before[position], each, *self.after[position])
        ]
