"""What a rank holds of a run's state, as pieces of named tensors: the atoms of checkpoints.

Names: ``model.NAME`` for what ``module.state_dict()`` has, ``extra.NAME`` for buffers that it leaves out, and
``optimizer.NAME.KEY`` for the optimizer's state of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.checkpoint.atoms import Piece
from shardwise.checkpoint.reader import Checkpoint
from shardwise.core.flat import FlatEntry, range_boxes
from shardwise.core.layout import Box, shard_range
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.engine import Engine

LINE = 16  # elements: shares begin where a cache line does


def owned(engine: Engine) -> list[Piece]:
    """What this rank saves: of every flat buffer an equal share, so that each element belongs to exactly one rank."""
    comm = engine.comm
    parts, index = comm.mesh.size, comm.rank
    found: list[Piece] = []
    for memory in engine.memory.buckets:
        lines = -(-memory.layout.numel // LINE)
        start, stop = (LINE * cut for cut in shard_range(lines, parts, index))
        found += _bucket(memory, start, stop)
    return found + [piece for i, piece in enumerate(_replicated(engine)) if i % parts == index]


def held(engine: Engine) -> list[Piece]:
    """All that this rank computes with, in memory that a checkpoint can fill."""
    return [piece for memory in engine.memory.buckets for piece in _bucket(memory, 0, memory.layout.numel)] + list(
        _replicated(engine)
    )


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fill the engine from a checkpoint of any number of ranks; floating-point tensors of another precision are rounded.

    Raises ConfigError, before anything changes, where the checkpoint is of another model or optimizer.
    """
    wanted = held(engine)
    like: dict[int, Piece] = {}
    for i, piece in enumerate(wanted):
        saved = checkpoint.tensors.get(piece.name)
        if saved is not None and saved.dtype != piece.tensor.dtype and saved.dtype.is_floating_point:
            like[i] = piece
            wanted[i] = replace(piece, tensor=torch.empty_like(piece.tensor, dtype=saved.dtype))
    checkpoint.load(wanted)
    with torch.no_grad():
        for i, piece in like.items():
            piece.tensor.copy_(wanted[i].tensor)
    for memory in engine.memory.buckets:
        memory.publish()
    engine.memory.halted.zero_()
    engine.step_index = checkpoint.step


def aliases(engine: Engine) -> dict[str, str]:
    """Other names of tied parameters and buffers → the name under which they are saved."""
    own = engine.compiled.module.state_dict(keep_vars=True)
    return {name: engine.names[name] for name in own if engine.names[name] != name}


def _bucket(memory: BucketMemory, start: int, stop: int) -> Iterator[Piece]:
    """Elements ``start`` to ``stop`` of a bucket's parameters and of their optimizer state."""
    masters = memory.masters()
    states = memory.optimizer.state_views(memory.layout.entries)
    for entry in memory.layout.entries:
        first, last = max(start, entry.offset) - entry.offset, min(stop, entry.stop) - entry.offset
        if first < last:
            yield from _cut(f"model.{entry.name}", masters[entry.name], first, last)
            yield from _states(entry, states[entry.name], first, last)
        elif not entry.numel and start <= entry.offset < max(stop, 1):
            yield _whole(f"model.{entry.name}", masters[entry.name])


def _states(entry: FlatEntry, state: Mapping[str, Tensor], first: int, last: int) -> Iterator[Piece]:
    for key, value in state.items():
        name = f"optimizer.{entry.name}.{key}"
        if tuple(value.shape) == entry.shape:
            yield from _cut(name, value, first, last)
        elif first == 0:  # a counter: it goes with the parameter's first element
            yield _whole(name, value)


def _cut(name: str, value: Tensor, first: int, last: int) -> Iterator[Piece]:
    flat = value.detach().view(-1)
    for box in range_boxes(tuple(value.shape), first, last):
        yield Piece(name, tuple(value.shape), box, flat[first : first + box.numel].view(box.shape))
        first += box.numel


def _whole(name: str, value: Tensor) -> Piece:
    shape = tuple(value.shape)
    return Piece(name, shape, Box((0,) * len(shape), shape), value.detach())


def _replicated(engine: Engine) -> Iterator[Piece]:
    """Parameters that do not learn, and buffers: the same on all ranks, in the same order."""
    learned = {name for memory in engine.memory.buckets for name in memory.leaves}
    own = engine.compiled.module.state_dict(keep_vars=True)
    for name, value in sorted({**engine.memory.leaves, **engine.unused, **engine.memory.buffers}.items()):
        if name not in learned:
            yield _whole(f"model.{name}" if name in own else f"extra.{name}", value)
