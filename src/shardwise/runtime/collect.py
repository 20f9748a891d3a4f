"""This puts whole parameters together from the ranks' parts of a bucket, a chunk at a time: no device holds more than a
chunk beside the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.data_options import ParameterRule
from shardwise.core.flat import FlatBuffer, FlatShard
from shardwise.core.optim import OptimizerChoice
from shardwise.parallel.data import SHARDS, held_range
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.boxes import boxes
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.communicator import Communicator
from shardwise.units.trace import Bucket

CHUNK = 32 << 20
"""The number of bytes of a bucket, from all ranks together, that are on a device at a time."""

LEAST = 64
"""The least number of elements that one rank has in a chunk."""

LANE = "state"


@dataclass(frozen=True)
class BucketSpread:
    """This says how a bucket is spread over the ranks at coordinate ``root`` of the pipeline axis, by default this
    rank's own.  Every rank can make it, whether it has the bucket or not.
    """

    bucket: Bucket
    rule: ParameterRule
    choice: OptimizerChoice
    comm: Communicator
    root: int | None = None

    def fill(self, held: Tensor | None, dtype: torch.dtype, goals: Mapping[str, Tensor], what: str) -> None:
        """Collect the ranks' ``held`` ranges of a bucket, flat tensors of ``dtype``, into ``goals``: whole parameters
        by name, on any device.  A rank that wants no result passes none.

        The ranks at ``root`` pass what they hold, and the other ranks of the pipeline None.
        """
        owners = self._owners()
        longest = max(held.numel for row in owners for _, _, held in row)
        number = sum(len(row) for row in owners)
        size = max(LEAST, CHUNK // (number * dtype.itemsize))
        for start in range(0, longest, size):
            values = self._gathered(held, dtype, owners, start, min(size, longest - start), what)
            if goals:
                _place(values, start, owners, self.bucket, self.comm, goals)
            del values  # before the next is made

    def _owners(self) -> list[list[tuple[int, FlatBuffer, FlatShard]]]:
        """Return a row for each rank over the bucket's axes: (rank, layout, held range) of each rank over ``dp`` that
        has a part of the same, or of one of them where each has all.
        """
        mesh = self.comm.mesh
        first = self.comm.rank if self.root is None else mesh.group(self.comm.rank, PIPELINE)[self.root]
        found, split = [], False
        for rank in mesh.group(first, self.bucket.axes):
            layout, row = self.bucket.layout(self.choice, mesh, rank), []
            for index, other in enumerate(mesh.group(rank, SHARDS)):
                held = held_range(self.rule, layout, mesh.axis_size(SHARDS), index, self.bucket.learns)
                split |= held.numel < layout.numel
                row.append((other, layout, held))
            found.append(row)
        if split:
            return found
        at = mesh.index(first, SHARDS)  # all of a row hold the same
        return [[row[at]] for row in found]

    def _gathered(
        self, held: Tensor | None, dtype: torch.dtype, owners: list[list[tuple[int, FlatBuffer, FlatShard]]],
        start: int, count: int, what: str
    ) -> Tensor:  # fmt: skip
        """Return ``count`` elements, from element ``start`` on, of each owner's range, as (rows, owners of a row,
        count); behind the end of a shorter range they are undefined.
        """
        comm, shape = self.comm, (len(owners), len(owners[0]), count)
        pipeline = self.root is not None and comm.mesh.axis_size(PIPELINE) > 1
        if shape[:2] == (1, 1) and not pipeline:
            assert held is not None
            return held[start : start + count].view(shape)
        found = torch.empty(shape, dtype=dtype, device=comm.device)
        if held is not None:
            row = found[comm.mesh.index(comm.rank, self.bucket.axes)]
            own, mine = row[comm.mesh.index(comm.rank, SHARDS) if len(row) > 1 else 0], held[start : start + count]
            own[: mine.numel()].copy_(mine)
            if len(row) > 1:
                comm.all_gather(row, own, SHARDS, lane=LANE, what=what).wait()
            if len(found) > 1:
                comm.all_gather(found, row, self.bucket.axes, lane=LANE, what=what).wait()
        if pipeline:
            assert self.root is not None
            comm.broadcast(found, PIPELINE, self.root, lane=LANE, what=what).wait()
        return found


def whole(memory: BucketMemory, held: Tensor, what: str, keeps: bool = True) -> dict[str, Tensor]:
    """Return whole tensors, by parameter, from the ``held`` ranges of the ranks that have a bucket together; all of
    them call it, and each may change what it gets.  A rank that does not keep them gets none.
    """
    there = memory.comm.device
    kept = memory.bucket.parameters if keeps else ()
    goals = {p.name: torch.empty(p.shape, dtype=held.dtype, device=there) for p in kept}
    BucketSpread(memory.bucket, memory.rule, memory.choice, memory.comm).fill(held, held.dtype, goals, what)
    return goals


@torch.no_grad()
def _place(
    values: Tensor, start: int, owners: list[list[tuple[int, FlatBuffer, FlatShard]]], bucket: Bucket,
    comm: Communicator,
    goals: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Copy what each owner has from element ``start`` of its range on to its place in the whole parameters."""
    here = values.to(next(iter(goals.values())).device)
    for row, those in zip(owners, here, strict=True):
        for (rank, layout, held), flat in zip(row, those, strict=True):
            first = held.start + start
            for parameter, box, piece in boxes(
                bucket, layout, comm.mesh, rank, flat, first, first, min(first + len(flat), held.stop)
            ):
                goals[parameter.name][box.slices].copy_(piece)
