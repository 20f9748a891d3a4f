"""While a step runs, this decides where each gradient goes, and whether it overwrites or adds."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.core.instruction import Buffer, BufferKind, Instruction
from shardwise.ops.weight_gradients import GradientFactors, accumulate
from shardwise.parallel.data import SHARDS
from shardwise.runtime.buffers import RankMemory, part
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.handles import Handle
from shardwise.runtime.served import push
from shardwise.runtime.served_worker import ServedWorker


class Gradients:
    """This has the gradient buffers of one rank during a step.

    ``reached`` are the parameters to which a backward of this step gave a gradient.  ``strict`` fills slots with NaN
    when they are freed.  The parts of a backward may write different parameters of a bucket, with other parts between
    them, so it is known by parameter and slot what has been written, and the rest becomes zero only when all is read.
    """

    def __init__(self, memory: RankMemory, comm: Communicator, strict: bool) -> None:
        self._memory, self._comm, self._strict = memory, comm, strict
        self._goals: dict[str, Tensor] = {}
        for bucket in memory.buckets.values():
            if bucket.grad is not None and bucket.rule.grad == "P":
                self._goals |= bucket.views(bucket.grad)
        self._tables = {b.bucket.parameters[0].name: b.table for b in memory.buckets.values() if b.table is not None}
        for table in self._tables.values():
            table.clear()
        self._slot: dict[str, int] = {}  # the slot for a parameter's gradient; -1, its bucket's buffer, by default
        self._written: set[tuple[str, int]] = set()  # (parameter, slot)
        self.reached: set[str] = set()
        self._summed: set[int] = set()  # the buckets of which ranks have added up a gradient

    def begin(self, one: Instruction) -> None:
        """Prepare for a backward, which writes the gradients of ``one.slots`` to slots, anew if in ``one.first``."""
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
        """Let a bucket's gradients be written to its own buffer, if the last ones went to a slot."""
        memory = self._memory.buckets[bucket]
        if memory.grad is not None and self._slot.get(memory.bucket.parameters[0].name, -1) >= 0:
            goals = memory.views(memory.grad)
            self._goals |= goals
            self._slot |= dict.fromkeys(goals, -1)

    def updated(self, bucket: int) -> None:
        """Note that a bucket has been updated: its next gradient overwrites."""
        if (table := self._memory.buckets[bucket].table) is not None:
            table.clear()
        self._written.difference_update((p.name, -1) for p in self._memory.buckets[bucket].bucket.parameters)
        self._summed.discard(bucket)

    def add(self, name: str, grad: Tensor) -> None:
        """Add to a gradient, of the parameter's local shape; the first overwrites what was there."""
        goal = self._goals[name]
        grad = grad.to_dense() if grad.is_sparse else grad  # of a lookup in a model that was not captured
        goal.add_(grad) if self._reach(name) else goal.copy_(grad)

    def add_product(self, factors: GradientFactors) -> None:
        """Add the product of ``factors`` in the same way; it is computed straight into the buffer, or, of a table's
        lookup, not at all."""
        if (table := self._tables.get(factors.weight)) is not None:
            table.add(factors.x, factors.dy, *factors.rest)
            self.reached.add(factors.weight)
            return
        accumulate(self._goals[factors.weight], factors, self._reach(factors.weight), self._memory.kernels)

    def _reach(self, name: str) -> bool:
        """Return whether a parameter's gradient has been written before, and note that now it is."""
        place = (name, self._slot.get(name, -1))
        before = place in self._written
        self._written.add(place)
        self.reached.add(name)
        return before

    def complete(self) -> None:
        """Set to zero what no backward has written of any bucket's gradient."""
        for index in self._memory.buckets:
            self._complete(index, -1)

    def _complete(self, bucket: int, slot: int) -> None:
        """Set to zero what no backward has written of a bucket's gradient, before it is read."""
        memory = self._memory.buckets[bucket]
        if memory.table is not None or (slot < 0 and memory.rule.grad != "P"):  # no backward writes to this buffer
            return
        places = {(p.name, slot) for p in memory.bucket.parameters} - self._written
        if places:
            if slot < 0 and memory.grad is None:
                return
            assert memory.grad is not None
            goals = memory.views(memory.grad) if slot < 0 else self._memory.unreduced.views(slot, memory)[1]
            for name, _ in places:
                goals[name].zero_()
            self._written |= places

    def settle(self, bucket: int) -> None:
        """Set to zero what nothing has written of a bucket's own gradient since its last update: all of it, where this
        step computes with none of its parameters."""
        memory = self._memory.buckets[bucket]
        self._complete(bucket, -1)
        if memory.table is None and memory.rule.grad != "P" and bucket not in self._summed:
            assert memory.grad is not None
            memory.grad.zero_()
            self._summed.add(bucket)

    def round(self, one: Instruction) -> None:
        """Copy a whole gradient into its slot, in the slot's dtype."""
        memory = self._memory.buckets[one.bucket]
        assert memory.grad is not None
        self._complete(one.bucket, -1)
        self._written |= {(p.name, one.slot) for p in memory.bucket.parameters}
        self._memory.unreduced.views(one.slot, memory)[0].copy_(memory.grad)

    def reduce(self, one: Instruction) -> Handle:
        """Post the sum over ranks of a bucket's gradient, or of the slot that holds it."""
        memory, comm = self._memory.buckets[one.bucket], self._comm
        what, lane = f"gradient bucket {one.bucket}", str(one.lane)
        if memory.table is not None:
            return self._push_rows(one) if one.scatters else memory.table.reduce(comm, one.axes, lane, what)
        assert memory.grad is not None
        self._complete(one.bucket, one.slot)
        self._summed.add(one.bucket)
        x = memory.grad if one.slot < 0 else self._memory.unreduced.views(one.slot, memory)[0]
        own = part(x, memory.shard if memory.rule.state == "S" else memory.held)
        if not one.scatters:
            return comm.all_reduce(own if memory.rule.sharded else x, one.axes, lane=lane, what=what)
        out = memory.grad if BufferKind.GRAD.of(one.bucket) in one.writes and one.slot >= 0 else own
        return comm.reduce_scatter(out, x, SHARDS, lane=lane, what=what)

    def _push_rows(self, one: Instruction) -> Handle:
        """Post the rows of a table's gradient to the ranks that update them."""
        memory = self._memory.buckets[one.bucket]
        assert memory.table is not None
        return memory.table.send_to_owners(self._comm, memory.owners, str(one.lane), f"gradient bucket {one.bucket}")

    def push(self, one: Instruction, servers: ServedWorker | None) -> Handle:
        """Post a bucket's gradient, or that of the slot that holds it, to its servers: ranks, or other processes."""
        memory = self._memory.buckets[one.bucket]
        if memory.table is not None and servers is not None:
            return servers.push_rows(one.bucket, memory.table.rows)
        if memory.table is not None:
            return self._push_rows(one)
        assert memory.grad is not None
        self._complete(one.bucket, one.slot)
        self._summed.add(one.bucket)
        x = memory.grad if one.slot < 0 else self._memory.unreduced.views(one.slot, memory)[0]
        if servers is not None:
            return servers.push(one.bucket, x)
        return push(self._comm, x, memory.owners, lane=str(one.lane), what=f"gradient bucket {one.bucket}")

    def add_slot(self, one: Instruction) -> None:
        """Add to a bucket's own gradient what a slot has of it; the first overwrites."""
        memory = self._memory.buckets[one.bucket]
        self._complete(one.bucket, one.slot)
        self._written |= {(p.name, -1) for p in memory.bucket.parameters}
        self._summed.add(one.bucket)
        summed = part(self._memory.unreduced.views(one.slot, memory)[0], memory.held)
        goal = memory.held_gradient
        goal.copy_(summed) if one.first else goal.add_(summed)

    def free(self, buffer: Buffer) -> None:
        """Note that a slot's content is no longer needed."""
        if self._strict:
            self._memory.unreduced.slots[buffer.index].fill_(0xFF)  # NaN in every floating dtype

    def norm(self, bucket: int) -> Tensor:
        """Return the norm of this rank's shard of a bucket's gradient, a 0-d tensor in at least fp32."""
        self.settle(bucket)
        memory = self._memory.buckets[bucket]
        if memory.table is not None:
            return memory.table.norm(memory.held if memory.rule.servers else memory.shard)
        own = memory.held_gradient if memory.rule.servers else memory.shard_gradient
        found: Tensor = torch.linalg.vector_norm(own)
        return found

    def held(self, bucket: int) -> Tensor:
        """Return this rank's held range of a bucket's gradient, after all ranks on the batch axes have added theirs."""
        self.settle(bucket)
        return self._memory.buckets[bucket].held_gradient
