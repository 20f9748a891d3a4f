"""Gradients while a step runs: where each goes, and whether it overwrites or adds."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.instruction import Buffer, Instruction
from shardwise.parallel.data import SHARDS
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator, Handle
from shardwise.trace.products import accumulate


class Gradients:
    """The gradient buffers of one rank during a step.

    ``reached`` are the parameters that a backward of this step gave a gradient.  ``strict``: slots are filled with NaN when freed.
    """

    def __init__(self, memory: RankMemory, comm: Communicator, strict: bool) -> None:
        self._memory, self._comm, self._strict = memory, comm, strict
        self._goals: dict[str, Tensor] = {}
        for bucket in memory.buckets.values():
            if bucket.grad is not None and bucket.rule.grad == "P":
                self._goals |= bucket.views(bucket.grad)
        self._written: set[str] = set()
        self.reached: set[str] = set()

    def begin(self, one: Instruction) -> None:
        """Before a backward: the buckets of ``one.first`` are written anew, those of ``one.slots`` in their slots."""
        buckets = self._memory.buckets
        for index in one.first:
            self._written.difference_update(p.name for p in buckets[index].bucket.parameters)
        for index, slot in one.slots:
            flat, goals = self._memory.unreduced.views(slot, buckets[index])
            self._goals |= goals
            if index in one.first:
                for start, stop in buckets[index].layout.gaps():
                    flat[start:stop].zero_()

    def add(self, name: str, grad: Tensor) -> None:
        """Add to a gradient; the first overwrites what was there."""
        goal = self._goals[name]
        goal.add_(grad) if name in self._written else goal.copy_(grad)
        self._written.add(name)
        self.reached.add(name)

    def add_product(self, name: str, dy: Tensor, x: Tensor) -> None:
        """The same with dYᵀX, which is multiplied straight into the buffer."""
        accumulate(self._goals[name], dy, x, name in self._written)
        self._written.add(name)
        self.reached.add(name)

    def end(self, one: Instruction) -> None:
        """After a backward: what the first one of a bucket has not reached is zero."""
        for index in one.first:
            for parameter in self._memory.buckets[index].bucket.parameters:
                if parameter.name not in self._written:
                    self._goals[parameter.name].zero_()
                    self._written.add(parameter.name)

    def round(self, one: Instruction) -> None:
        """A whole gradient into its slot, in the slot's dtype."""
        memory = self._memory.buckets[one.bucket]
        assert memory.grad is not None
        self._memory.unreduced.views(one.slot, memory)[0].copy_(memory.grad)

    def reduce(self, one: Instruction) -> Handle:
        """Post the sum over ranks of a bucket's gradient, or of the slot that holds it."""
        memory, comm = self._memory.buckets[one.bucket], self._comm
        assert memory.grad is not None
        what, lane = f"gradient bucket {one.bucket}", str(one.lane)
        x = memory.grad if one.slot < 0 else self._memory.unreduced.views(one.slot, memory)[0]
        own = x[memory.shard.start : memory.shard.stop] if x.numel() == memory.layout.numel else x
        if not one.scatters:
            return comm.all_reduce(own if memory.rule.state == "S" else x, one.axes, lane=lane, what=what)
        out = memory.grad if Buffer("grad", one.bucket) in one.writes and one.slot >= 0 else own
        return comm.reduce_scatter(out, x, SHARDS, lane=lane, what=what)

    def take(self, one: Instruction) -> None:
        """What the sum over ranks has left in a slot, to the gradient."""
        memory = self._memory.buckets[one.bucket]
        summed = self._memory.unreduced.views(one.slot, memory)[0][memory.held.start : memory.held.stop]
        goal = memory.final_gradient
        goal.copy_(summed) if one.first else goal.add_(summed)

    def free(self, buffer: Buffer) -> None:
        """A slot's content is no longer needed."""
        if self._strict:
            self._memory.unreduced.slots[buffer.index].fill_(0xFF)  # NaN in every floating dtype

    def norm(self, bucket: int) -> Tensor:
        """The norm of this rank's shard of a bucket's gradient, in at least fp32."""
        return torch.linalg.vector_norm(self._memory.buckets[bucket].own_gradient)
