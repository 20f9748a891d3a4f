"""This module defines the program of a step: the flat list of instructions that one class of ranks executes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Instruction
from shardwise.core.mesh import Coordinates, Mesh

BUFFERS = ("reads", "writes", "frees")


@dataclass(frozen=True, slots=True)
class Program:
    """A program has the instructions of one class of ranks.

    A class consists of all ranks at the fixed ``coordinates`` (pairs of axis and coordinate; without any, all ranks).
    They run the same list: its peers and groups are relative to the mesh and resolved when it runs.  ``slots``,
    ``unreduced`` and ``stashes`` are pools: they list for each slot the buckets that it has to hold, one at a time.
    The program runs ``batches`` batches.
    """

    name: str
    coordinates: Coordinates = ()
    instructions: tuple[Instruction, ...] = ()
    slots: tuple[tuple[int, ...], ...] = ()
    unreduced: tuple[tuple[int, ...], ...] = ()
    stashes: tuple[tuple[int, ...], ...] = ()
    batches: int = 1

    def text(self) -> str:
        """Return the program as text, with an instruction per line: position, lane, instruction, ``reads → writes``."""
        place = " ".join(f"{axis}={at}" for axis, at in self.coordinates) or "every rank"
        lines = [f"{self.name}: {place}, {len(self.instructions)} instructions"]
        digits = len(str(max(len(self.instructions) - 1, 0)))
        width = max((len(str(instruction)) for instruction in self.instructions), default=0)
        for position, instruction in enumerate(self.instructions):
            reads, writes = (" ".join(map(str, held)) for held in (instruction.reads, instruction.writes))
            access = f"{reads} → {writes}".strip() if reads or writes else ""
            lines.append(f"{position:>{digits}}  {instruction.lane:<7}  {instruction!s:<{width}}  {access}".rstrip())
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the program as JSON, without the defaults of instructions."""
        return json.dumps(
            {
                "name": self.name,
                "coordinates": dict(self.coordinates),
                "slots": self.slots,
                "unreduced": self.unreduced,
                "stashes": self.stashes,
                "batches": self.batches,
                "instructions": [_to_dict(instruction) for instruction in self.instructions],
            }
        )


def class_of(programs: Sequence[Program], mesh: Mesh, rank: int) -> Program:
    """Return the one program that ``rank`` runs; raise :class:`ShardwiseError` if there is none or more than one."""
    here = mesh.coordinates(rank)
    found = [program for program in programs if all(here.get(axis, 0) == at for axis, at in program.coordinates)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(program.name for program in found) or "none"
    raise ShardwiseError(f"rank {rank} at {here} has to have one program and has {len(found)}: {names}")


def _to_dict(instruction: Instruction) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(Instruction):
        value = getattr(instruction, field.name)
        if field.default is not MISSING and value == field.default:
            continue
        if field.name in BUFFERS:
            value = [[buffer.kind, buffer.index, buffer.microbatch, buffer.version] for buffer in value]
        found[field.name] = value
    return found
