"""Represent what a rank holds of a run's state as pieces of named tensors, the atoms of checkpoints.

The names are ``model.NAME`` for what ``module.state_dict()`` has, ``extra.NAME`` for buffers that it leaves out,
``optimizer.NAME.KEY`` for the optimizer's state of a parameter, ``ema.NAME.average`` and ``ema.NAME.count`` for the
average of its values and the number of steps in it, and ``loss_scale.KEY`` under fp16.

Of islands that train apart the first has these names, and the others have them behind ``island1.``, ``island2.`` and so
on; ``outer.NAME.base`` and ``outer.NAME.momentum`` are the outer step's, which all islands have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.checkpoint.atoms import Piece
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.weights import EMA
from shardwise.core.layout import Box, shard_range
from shardwise.core.local_options import ISLANDS
from shardwise.parallel.data import SHARDS
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.average import Average
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.engine import Engine

SCALE, OUTER = "loss_scale.", "outer."
LINE = 16  # the number of elements in a cache line: shares begin where one does


def owned(engine: Engine) -> list[Piece]:
    """Return what this rank saves: those that hold the same share it equally, so each element belongs to one rank."""
    engine.check_weights("saving")
    mesh, rank = engine.comm.mesh, engine.comm.rank
    found: list[Piece] = []
    for index, memory in engine.memory.buckets.items():
        if not engine.leads(index):
            continue
        others = {PIPELINE, *memory.bucket.axes} | ({SHARDS} if memory.share.apart else set())
        axes = mesh.other_axes({*others, ISLANDS})
        lines = -(-memory.held.numel // LINE)
        start, stop = (
            memory.held.start + LINE * cut for cut in shard_range(lines, mesh.axis_size(axes), mesh.index(rank, axes))
        )
        found += _bucket(memory, start, min(stop, memory.held.stop))
        same = mesh.other_axes({PIPELINE, ISLANDS, *memory.share.parted})
        found += list(_whole_tensors(memory))[mesh.index(rank, same) :: mesh.axis_size(same)]
        if not mesh.index(rank, ISLANDS):
            found += _outer(memory, start, min(stop, memory.held.stop))
    found += [piece for i, piece in enumerate(_replicated(engine)) if _saver(engine, piece.name, i) == rank]
    return [replace(piece, name=_named(engine, piece.name)) for piece in found]


def _saver(engine: Engine, name: str, number: int) -> int:
    """Return the rank that saves a replicated piece of an island: any of its ranks, or one of the only stage that keeps
    a buffer up to date."""
    mesh, root = engine.comm.mesh, engine.updating.get(name.partition(".")[2])
    own = ((ISLANDS, mesh.index(engine.comm.rank, ISLANDS)),) if ISLANDS in mesh.names else ()
    ranks = mesh.members(own if root is None else (*own, (PIPELINE, root)))
    return ranks[number % len(ranks)]


def _named(engine: Engine, name: str) -> str:
    """Return the name under which a piece of this rank's island is saved."""
    island = engine.comm.mesh.index(engine.comm.rank, ISLANDS)
    return name if not island or name.startswith(OUTER) else f"island{island}.{name}"


def held(engine: Engine) -> list[Piece]:
    """Return all that this rank holds, in memory that a checkpoint can fill."""
    buckets = engine.memory.buckets.values()
    found = [p for m in buckets for p in _bucket(m, m.held.start, m.held.stop, counters=True)]
    found += [p for m in buckets for p in _whole_tensors(m)]
    found += [p for m in buckets for p in _outer(m, m.held.start, m.held.stop)]
    return [*found, *_replicated(engine)]


def restore(engine: Engine, checkpoint: Checkpoint) -> None:
    """Fill the engine from a checkpoint of any number of ranks, rounding floating-point tensors of another precision.

    Raises ConfigError, before anything changes, where the checkpoint is of another model or optimizer.
    """
    engine.check_weights("restoring")
    with ExitStack() as stack:
        if checkpoint.step:  # else there is no state of users' own optimizers yet
            fill_state(engine, stack)
        _restore(engine, checkpoint)


def fill_state(engine: Engine, stack: ExitStack) -> None:
    """Have memory for the state that optimizers make in their first step, as long as the ``stack`` is open."""
    for memory in engine.memory.buckets.values():
        if memory.whole is not None:
            stack.enter_context(memory.whole.filled())


def _restore(engine: Engine, checkpoint: Checkpoint) -> None:
    # A run that was not in fp16 has left no loss scale: it begins anew.  So do outer steps and averages of weights,
    # where there were none.
    optional = (SCALE, OUTER, EMA)
    wanted = [
        piece for piece in held(engine) if not piece.name.startswith(optional) or piece.name in checkpoint.tensors
    ]
    begun = any(piece.name.startswith(OUTER) for piece in wanted)
    averaged = any(piece.name.startswith(EMA) for piece in wanted)
    wanted = [replace(piece, name=_saved(engine, piece.name, checkpoint)) for piece in wanted]
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
    for memory in engine.memory.buckets.values():
        memory.publish()
        if memory.local.steps and memory.learns and not begun:
            memory.outer.begin()
        if memory.average is not None and not averaged:
            memory.average.begin()
    engine.memory.halted.zero_()
    engine.step_index = checkpoint.step


def _saved(engine: Engine, name: str, checkpoint: Checkpoint) -> str:
    """Return the name of a piece of this rank's island in a checkpoint: where there were fewer islands, that of an
    earlier one."""
    island = engine.comm.mesh.index(engine.comm.rank, ISLANDS)
    saved = 1 + max((int(n.partition(".")[0][6:]) for n in checkpoint.tensors if _of_island(n)), default=0)
    return name if name.startswith(OUTER) or not island % saved else f"island{island % saved}.{name}"


def _of_island(name: str) -> bool:
    first = name.partition(".")[0]
    return first.startswith("island") and first[6:].isdigit()


def aliases(engine: Engine) -> dict[str, str]:
    """Return, for the other names of tied parameters and buffers, the name under which they are saved."""
    return {name: first for name, first in engine.whole.first_names.items() if name != first}


def _bucket(memory: BucketMemory, start: int, stop: int, counters: bool = False) -> Iterator[Piece]:
    """Yield elements ``start`` to ``stop`` of a bucket's parameters and their optimizer state, as boxes of the whole.

    A counter goes with its parameter's first element, or, with ``counters``, with any of its elements.
    """
    for parameter, box, values in memory.boxes(memory.master, memory.held.start, start, stop):
        yield Piece(f"model.{parameter.name}", parameter.shape, box, values.detach())
    for update in memory.updates:
        for segment, state in update.optimizer.states():
            first, last = max(start, segment.start), min(stop, segment.start + segment.param.numel())
            for key, value in state.items():
                for parameter, box, values in memory.boxes(value, segment.start, first, last) if value.dim() else ():
                    yield Piece(f"optimizer.{parameter.name}.{key}", parameter.shape, box, values.detach())
            here = memory.boxes(memory.master, memory.held.start, first, last)
            for name in dict.fromkeys(p.name for p, box, _ in here if counters or not any(box.start)):
                yield from (_whole(f"optimizer.{name}.{key}", value) for key, value in state.items() if not value.dim())
    if memory.average is not None:
        yield from _averages(memory, memory.average, start, stop, counters)
    for entry in memory.layout.entries:
        parameter = memory.bucket.by_name[entry.name]
        if not parameter.numel and start <= entry.offset < max(stop, start + 1):
            yield _whole(f"model.{entry.name}", memory.master[:0].view(parameter.shape))


def _averages(memory: BucketMemory, of: Average, start: int, stop: int, counters: bool) -> Iterator[Piece]:
    """Yield elements ``start`` to ``stop`` of the average of a bucket, and its count as :func:`_bucket` counters."""
    names: dict[str, None] = {}
    for parameter, box, values in memory.boxes(of.average, memory.held.start, start, stop):
        yield Piece(f"{EMA}{parameter.name}.average", parameter.shape, box, values)
        if counters or not any(box.start):
            names[parameter.name] = None
    yield from (_whole(f"{EMA}{name}.count", of.count) for name in names)


def _whole_tensors(memory: BucketMemory) -> Iterator[Piece]:
    """Yield the state of the parameters that this rank updates as whole tensors."""
    for name, state in () if memory.whole is None else memory.whole.states():
        yield from (_whole(f"optimizer.{name}.{key}", value) for key, value in state.items())


def _outer(memory: BucketMemory, start: int, stop: int) -> Iterator[Piece]:
    """Yield elements ``start`` to ``stop`` of what the outer step of a bucket keeps, if islands train apart."""
    if not memory.local.steps or not memory.learns:
        return
    for key, flat in (("base", memory.outer.base), ("momentum", memory.outer.momentum)):
        for parameter, box, values in memory.boxes(flat, memory.held.start, start, stop):
            yield Piece(f"{OUTER}{parameter.name}.{key}", parameter.shape, box, values)


def _whole(name: str, value: Tensor) -> Piece:
    shape = tuple(value.shape)
    return Piece(name, shape, Box.whole(shape), value.detach())


def _replicated(engine: Engine) -> Iterator[Piece]:
    """Yield parameters that no unit reads, buffers, and the loss scale: the same on all ranks, in the same order."""
    own = engine.compiled.module.state_dict(keep_vars=True)
    for name, value in sorted((engine.unused | engine.memory.buffers).items()):
        yield _whole(f"model.{name}" if name in own else f"extra.{name}", value)
    if engine.memory.loss_scale is not None:
        for name, value in engine.memory.loss_scale.state_dict().items():
            yield _whole(SCALE + name, value)
