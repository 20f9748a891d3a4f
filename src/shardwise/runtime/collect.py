"""Whole parameters, put together from what the ranks have of a bucket, a chunk at a time: no device holds more of it
than that.
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
from shardwise.runtime.buffers import BucketMemory, boxes
from shardwise.runtime.communicator import Communicator
from shardwise.units.trace import Bucket

CHUNK = 32 << 20
"""Bytes of a bucket that are on a device at a time, of all ranks together."""

LEAST = 64
"""Elements of one rank in a chunk."""

LANE = "state"


@dataclass(frozen=True)
class Spread:
    """How a bucket lies on the ranks at coordinate ``root`` of the pipeline axis that have it together; ``root`` None:
    on this rank's.

    Every rank can say it, whether it has the bucket or not.
    """

    bucket: Bucket
    rule: ParameterRule
    choice: OptimizerChoice
    comm: Communicator
    root: int | None = None

    def fill(self, held: Tensor | None, dtype: torch.dtype, goals: Mapping[str, Tensor], what: str) -> None:
        """Put a tensor of all elements, of whose ``held`` range each rank gives its own, into ``goals``: whole
        parameters by name, on any device, or none at all.

        Those at ``root`` call it with what they hold, and the others of the pipeline without.
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
        """The ranks over the bucket's axes, and of each those over ``dp`` that have parts of the same: (rank, layout,
        range).
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
        at = mesh.index(first, SHARDS)  # all have the same
        return [[row[at]] for row in found]

    def _gathered(
        self, held: Tensor | None, dtype: torch.dtype, owners: list[list[tuple[int, FlatBuffer, FlatShard]]],
        start: int, count: int, what: str
    ) -> Tensor:  # fmt: skip
        """``count`` elements, from number ``start`` on, of the range of each owner; what is behind the end of a shorter
        one is undefined.
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


def whole(memory: BucketMemory, held: Tensor, what: str) -> dict[str, Tensor]:
    """A tensor of the held range of all ranks that have a bucket together, by parameter; all call it, and each may
    change what it gets.
    """
    goals = {
        p.name: torch.empty(p.shape, dtype=held.dtype, device=memory.comm.device) for p in memory.bucket.parameters
    }
    Spread(memory.bucket, memory.rule, memory.choice, memory.comm).fill(held, held.dtype, goals, what)
    return goals


@torch.no_grad()
def _place(
    values: Tensor, start: int, owners: list[list[tuple[int, FlatBuffer, FlatShard]]], bucket: Bucket,
    comm: Communicator,
    goals: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Copy what owners have from number ``start`` of their range on to where it belongs in the whole parameters."""
    here = values.to(next(iter(goals.values())).device)
    for row, those in zip(owners, here, strict=True):
        for (rank, layout, held), flat in zip(row, those, strict=True):
            first = held.start + start
            for parameter, box, piece in boxes(
                bucket, layout, comm.mesh, rank, flat, first, first, min(first + len(flat), held.stop)
            ):
                goals[parameter.name][box.slices].copy_(piece)
