"""While a step runs, some parameters rest whole, and others are gathered into slots and freed again.

Autograd keeps the weights that its derivative formulas need.  It must not keep the memory of a gathered weight, which
soon holds another bucket: it keeps a reference, which is looked up when backward runs, after the second gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.backend import Backend
from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Buffer, BufferKind, Instruction, Op
from shardwise.core.memory_options import LEAST_OFFLOAD
from shardwise.parallel.data import SHARDS
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.handles import Completed, Handle
from shardwise.runtime.served import pull
from shardwise.runtime.served_worker import ServedWorker


class Reference(NamedTuple):
    """A reference is to a view of a gathered bucket; stride and offset are in elements of ``dtype``, which need not be
    the bucket's (complex numbers).
    """

    bucket: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    learns: bool


class Offloaded(NamedTuple):
    """This is a copy on the host of a tensor that is kept for backward."""

    host: Tensor
    learns: bool


def _address(x: Tensor) -> int:
    """Return the address of a tensor's memory, which is the same for all storages that lie over one memory."""
    return x.untyped_storage().data_ptr()


class Gathered:
    """This has the parameters of one rank while it runs ``instructions``.

    ``strict`` fills what is freed with NaN, so that a later use shows.  ``offload`` moves what autograd keeps to the
    host, and back for backward.  Where buckets are updated while some unit still needs them as they were (STASH), units
    compute with the ``version`` that is set.
    """

    def __init__(
        self,
        memory: RankMemory,
        comm: Communicator,
        instructions: Sequence[Instruction],
        strict: bool,
        offload: bool = False,
        servers: ServedWorker | None = None,
    ) -> None:
        stashed = {one.bucket for one in instructions if one.op is Op.STASH}
        self._refers = offload or bool(stashed) or any(one.op is Op.GATHER for one in instructions)
        self._memory, self._comm, self._strict, self._offload = memory, comm, strict, offload
        self._servers = servers
        self._resident = {_address(leaf) for leaf in memory.leaves.values()} if offload else set()
        self._leaves = dict(memory.leaves)
        self._flat: dict[int, Tensor] = {}  # gathered buckets
        self._bucket: dict[int, int] = {}  # the bucket that lies at each address
        self._slot: dict[int, int] = {}  # the bucket in each slot
        self._current: set[int] = set()  # buckets that rest whole and have this step's parameters
        self.version = 0
        # Stashed buckets by (bucket, version), flat and by parameter.
        self._old: dict[tuple[int, int], tuple[Tensor, dict[str, Tensor]]] = {}
        self._stash: dict[int, tuple[int, int]] = {}  # (bucket, version) in each slot of the stash
        self._home: dict[str, int] = {}  # the bucket of each parameter that is stashed
        for bucket in stashed:
            self._home |= dict.fromkeys((p.name for p in memory.buckets[bucket].bucket.parameters), bucket)
            self._flat[bucket] = memory.buckets[bucket].param
            self._bucket[_address(self._flat[bucket])] = bucket

    def __getitem__(self, name: str) -> Tensor:
        old = self._old.get((self._home.get(name, -1), self.version))
        return self._leaves[name] if old is None else old[1][name]

    def updated(self, bucket: int) -> None:
        """Note that the other ranks' shards of a bucket have changed and must be gathered again."""
        self._current.discard(bucket)

    def stash(self, one: Instruction) -> None:
        """Keep a copy of a bucket as it is, under the instruction's version."""
        memory, key = self._memory.buckets[one.bucket], (one.bucket, one.version)
        flat, views = self._memory.stashes.views(one.slot, memory)
        flat.copy_(memory.param)
        self._old[key] = flat, {name: view.detach().requires_grad_(memory.learns) for name, view in views.items()}
        self._stash[one.slot] = key
        self._bucket[_address(flat)] = one.bucket

    def gather(self, one: Instruction) -> Handle:
        """Post the gather of a bucket into a slot, or, once after an update, into its own buffer if it rests whole."""
        memory, what = self._memory.buckets[one.bucket], f"parameters of bucket {one.bucket}"
        out = memory.param
        if memory.resident:
            if one.bucket in self._current:
                return Completed()
            self._current.add(one.bucket)
        else:
            out, views = self._memory.slots.views(one.slot, memory)
            self._leaves |= {name: view.detach().requires_grad_(memory.learns) for name, view in views.items()}
            self._flat[one.bucket], self._slot[one.slot] = out, one.bucket
            self._bucket[_address(out)] = one.bucket
        if one.op is Op.PULL and self._servers is not None:
            return self._servers.pull()
        if (table := memory.table) is not None and not memory.common:
            if table.touched is not None:
                return table.refresh(self._comm, out, len(memory.owners), str(one.lane), what)
            table.touched = []
        if one.op is Op.PULL:
            return pull(self._comm, out, memory.owners, lane=str(one.lane), what=what)
        return self._comm.all_gather(out, memory.held_parameters, SHARDS, lane=str(one.lane), what=what)

    def free(self, buffer: Buffer) -> None:
        """Free a slot whose bucket is no longer needed."""
        if buffer.kind == BufferKind.STASH:
            flat, _ = self._old.pop(self._stash.pop(buffer.index))
            if self._strict:
                flat.fill_(float("nan"))
            return
        bucket = self._slot.pop(buffer.index, None)
        if bucket is None:  # the bucket rests whole
            return
        flat = self._flat.pop(bucket)
        if self._strict and flat.is_floating_point():
            with torch.no_grad():
                flat.fill_(float("nan"))

    def references(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd keeps references to gathered parameters, and host copies of what is
        offloaded.

        Autograd then does not check for later writes: a gather for backward writes the same values once more.
        """
        if not self._refers:  # the hooks take time: 0.7 % of a forward
            return nullcontext()
        # Detached: an output that its own node saves would hold that node, and without a backward would never be freed.
        return saved_tensors_hooks(lambda value: self.keep(value.detach()), self._unpack)

    def keep(self, value: Any) -> Any:
        """Return what is kept of ``value`` for a backward: a reference, if it is (a view of) a gathered parameter, or a
        copy on the host, if it is offloaded, or ``value`` itself.
        """
        kept = self._refer(value)
        return self._offloaded(kept) if self._offload and isinstance(kept, Tensor) else kept

    def resolve(self, kept: Any) -> Any:
        """Return what :meth:`keep` was given; a gathered bucket must have been gathered again."""
        found = self._unpack(kept)
        return found.requires_grad_(kept.learns) if isinstance(kept, Reference | Offloaded) else found

    def _refer(self, value: Any) -> Any:
        bucket = self._bucket.get(_address(value)) if isinstance(value, Tensor) else None
        if bucket is None:
            return value
        if value.is_conj() or value.is_neg():  # a view that reads other values than the memory has
            return value.resolve_conj().resolve_neg()
        return Reference(
            bucket, value.dtype, value.shape, value.stride(), int(value.storage_offset()), value.requires_grad
        )

    def own(self, value: Tensor, update: bool = False) -> Tensor:
        """Return ``value``, or a copy if it is (a view of) a gathered parameter: it may be read after the slot has been
        freed.

        An ``update`` of a buffer is read at the end of the step, when parameters and other buffers have changed too.
        """
        return value.clone() if self.holds(value) or update and _address(value) in self._changing else value

    def holds(self, value: Tensor) -> bool:
        """Return whether ``value`` is (a view of) a gathered parameter."""
        return _address(value) in self._bucket

    @cached_property
    def _changing(self) -> set[int]:
        """Return the addresses of what rests on this rank and is changed by a step."""
        resting = (*self._memory.leaves.values(), *self._memory.buffers.values())
        return {_address(tensor) for tensor in resting}

    def _offloaded(self, value: Tensor) -> Any:
        if value.nbytes < LEAST_OFFLOAD or _address(value) in self._resident:
            return value
        # The copy runs on the stream that computes, so it ends before the memory can be used again.
        host = torch.empty_like(value, device="cpu", pin_memory=Backend.of(value.device).pins, requires_grad=False)
        return Offloaded(host.copy_(value.detach(), non_blocking=True), value.requires_grad)

    def _unpack(self, kept: Any) -> Any:
        if isinstance(kept, Offloaded):
            return torch.empty_like(kept.host, device=self._comm.device).copy_(kept.host, non_blocking=True)
        return self._view(kept) if isinstance(kept, Reference) else kept

    def _view(self, kept: Reference) -> Tensor:
        old = self._old.get((kept.bucket, self.version))
        flat = self._flat.get(kept.bucket) if old is None else old[0]
        if flat is None:
            raise ShardwiseError(f"bucket {kept.bucket} is needed by backward and is not gathered")
        return flat.view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)
