"""What local graphs communicate, and why: notes that are made with them, for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx

from shardwise.trace import ops
from shardwise.trace.moves import Note
from shardwise.trace.sizes import local_shape
from shardwise.trace.units import Unit

MOVES = frozenset((ops.all_reduce, ops.replicate, ops.gather, ops.shard, ops.scatter))

VOLUME: Mapping[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "slice": 0, "": 0}
"""How often a rank sends what ``parts`` ranks have together, times (parts - 1) / parts, by the best known algorithms."""


@dataclass(frozen=True)
class Collective:
    """One of a unit, ``count`` times; ``size`` is what is communicated, whole, in bytes a microbatch, None where the op does it itself."""

    note: Note
    size: int | None
    count: int
    parts: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends of a microbatch, forward and backward."""
        times = VOLUME[self.note.forward] + VOLUME[self.note.backward]
        return self.count * times * (self.size or 0) * (self.parts - 1) / self.parts


def collectives(unit: Unit, env: ops.Env) -> list[Collective]:
    """Those of a unit for the rank and microbatch of ``env``, in order, over axes of several ranks."""
    found: Counter[tuple[Note, int | None]] = Counter()
    for node in unit.graph.nodes if unit.graph is not None else ():
        for note in node.meta.get("notes", ()):
            if env.group(note.axes)[0] > 1:
                found[note, _size(node, note, env)] += 1
    return [Collective(note, size, count, env.group(note.axes)[0]) for (note, size), count in found.items()]


def _size(node: fx.Node, note: Note, env: ops.Env) -> int | None:
    """Of a move; what is sharded over its axes counts whole."""
    if node.target not in MOVES:
        return None
    alone = {"parts": 1, "index": 0} if ops.ROWS in note.axes else {}
    whole = replace(env, tensor={axis: at for axis, at in env.tensor.items() if axis not in note.axes}, **alone)
    value: Tensor = node.meta["val"]
    return math.prod(local_shape(value, node.meta["layout"], whole)) * value.dtype.itemsize
