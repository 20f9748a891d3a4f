"""Gradients while a step runs: where each goes, and whether it overwrites or adds."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.instruction import Buffer, BufferKind, Instruction
from shardwise.ops.weight_gradients import Factors, accumulate
from shardwise.parallel.data import SHARDS
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator, Handle


class Gradients:
    """The gradient buffers of one rank during a step.

    ``reached`` are the parameters that a backward of this step gave a gradient.  ``strict``: slots are filled with NaN
    when freed. The parts of a backward may write different parameters of a bucket, with others between them, so what
    has been written is known by parameter and slot, and only a reader of the whole makes the rest zero.
    """

    def __init__(self, memory: RankMemory, comm: Communicator, strict: bool) -> None:
        self._memory, self._comm, self._strict = memory, comm, strict
        self._goals: dict[str, Tensor] = {}
        for bucket in memory.buckets.values():
            if bucket.grad is not None and bucket.rule.grad == "P":
                self._goals |= bucket.views(bucket.grad)
        self._slot: dict[str, int] = {}  # where a parameter's gradient is written; -1, its own buffer, if not here
        self._written: set[tuple[str, int]] = set()  # (parameter, slot)
        self.reached: set[str] = set()

    def begin(self, one: Instruction) -> None:
        """Before a backward: the buckets of ``one.first`` are written anew, those of ``one.slots`` in their slots."""
        buckets = self._memory.buckets
        for buffer in one.writes:
            if buffer.kind == BufferKind.GRAD:
                self._direct(buffer.index)
        for index, slot in one.slots:
            flat, goals = self._memory.unreduced.views(slot, buckets[index])
            self._goals |= goals
            self._slot |= dict.fromkeys(goals, slot)
            if index in one.first:
                self._written.difference_update((name, slot) for name in goals)
                for start, stop in buckets[index].layout.gaps():
                    flat[start:stop].zero_()

    def _direct(self, bucket: int) -> None:
        """A bucket's gradients are written to its own buffer, if the last were to a slot."""
        memory = self._memory.buckets[bucket]
        if memory.grad is not None and self._slot.get(memory.bucket.parameters[0].name, -1) >= 0:
            goals = memory.views(memory.grad)
            self._goals |= goals
            self._slot |= dict.fromkeys(goals, -1)

    def spent(self, bucket: int) -> None:
        """A bucket has been updated: its next gradient is written anew."""
        self._written.difference_update((p.name, -1) for p in self._memory.buckets[bucket].bucket.parameters)

    def add(self, name: str, grad: Tensor) -> None:
        """Add to a gradient; the first overwrites what was there."""
        goal = self._goals[name]
        goal.add_(grad) if self._reach(name) else goal.copy_(grad)

    def add_product(self, factors: Factors) -> None:
        """The same with the product of ``factors``, which is multiplied straight into the buffer."""
        accumulate(self._goals[factors.weight], factors, self._reach(factors.weight), self._memory.kernels)

    def _reach(self, name: str) -> bool:
        """Whether a parameter's gradient has been written before; now it is."""
        place = (name, self._slot.get(name, -1))
        before = place in self._written
        self._written.add(place)
        self.reached.add(name)
        return before

    def _complete(self, bucket: int, slot: int) -> None:
        """Before a bucket's gradient is read: what no backward has reached is zero."""
        memory = self._memory.buckets[bucket]
        if slot < 0 and memory.rule.grad != "P":  # no backward writes here
            return
        places = {(p.name, slot) for p in memory.bucket.parameters} - self._written
        if places:
            assert memory.grad is not None
            goals = memory.views(memory.grad) if slot < 0 else self._memory.unreduced.views(slot, memory)[1]
            for name, _ in places:
                goals[name].zero_()
            self._written |= places

    def round(self, one: Instruction) -> None:
        """A whole gradient into its slot, in the slot's dtype."""
        memory = self._memory.buckets[one.bucket]
        assert memory.grad is not None
        self._complete(one.bucket, -1)
        self._written |= {(p.name, one.slot) for p in memory.bucket.parameters}
        self._memory.unreduced.views(one.slot, memory)[0].copy_(memory.grad)

    def reduce(self, one: Instruction) -> Handle:
        """Post the sum over ranks of a bucket's gradient, or of the slot that holds it."""
        memory, comm = self._memory.buckets[one.bucket], self._comm
        assert memory.grad is not None
        what, lane = f"gradient bucket {one.bucket}", str(one.lane)
        self._complete(one.bucket, one.slot)
        x = memory.grad if one.slot < 0 else self._memory.unreduced.views(one.slot, memory)[0]
        own = x[memory.shard.start : memory.shard.stop] if x.numel() == memory.layout.numel else x
        if not one.scatters:
            return comm.all_reduce(own if memory.rule.state == "S" else x, one.axes, lane=lane, what=what)
        out = memory.grad if BufferKind.GRAD.of(one.bucket) in one.writes and one.slot >= 0 else own
        return comm.reduce_scatter(out, x, SHARDS, lane=lane, what=what)

    def take(self, one: Instruction) -> None:
        """What a slot has of a gradient, summed over the ranks if that is to be, to the bucket's own."""
        memory = self._memory.buckets[one.bucket]
        self._complete(one.bucket, one.slot)
        self._written |= {(p.name, -1) for p in memory.bucket.parameters}
        summed = self._memory.unreduced.views(one.slot, memory)[0][memory.held.start : memory.held.stop]
        goal = memory.final_gradient
        goal.copy_(summed) if one.first else goal.add_(summed)

    def free(self, buffer: Buffer) -> None:
        """A slot's content is no longer needed."""
        if self._strict:
            self._memory.unreduced.slots[buffer.index].fill_(0xFF)  # NaN in every floating dtype

    def norm(self, bucket: int) -> Tensor:
        """The norm of this rank's shard of a bucket's gradient, in at least fp32."""
        self._complete(bucket, -1)
        found: Tensor = torch.linalg.vector_norm(self._memory.buckets[bucket].own_gradient)
        return found

    def final(self, bucket: int) -> Tensor:
        """What this rank has of a bucket's gradient once all ranks of the batch axes have added theirs."""
        self._complete(bucket, -1)
        return self._memory.buckets[bucket].final_gradient
