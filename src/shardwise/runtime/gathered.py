"""Parameters while a step runs: those that rest whole, and those that are gathered into slots and freed again.

Autograd keeps the weights that its derivative formulas need.  Of a gathered one it must not keep the memory, which soon
holds another bucket: it keeps a reference, looked up when backward runs, after the second gather.
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
from shardwise.parallel.data import SHARDS
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator, Completed, Handle

LEAST_OFFLOAD = 1 << 16  # bytes: what is smaller is not worth a transfer


class Reference(NamedTuple):
    """A view of a gathered bucket; stride and offset are in elements of ``dtype``, which need not be the bucket's
    (complex numbers).
    """

    bucket: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    learns: bool


class Offloaded(NamedTuple):
    """A copy on the host of what is kept for backward."""

    host: Tensor
    learns: bool


def _address(x: Tensor) -> int:
    """Where the memory of a tensor begins: the same for storages of one memory, as ranks of a host have in common."""
    return x.untyped_storage().data_ptr()


class Gathered:
    """The parameters of one rank while it runs ``instructions``.

    ``strict``: what is freed is filled with NaN, so that whoever uses it all the same is found out.  ``offload``: what
    autograd keeps goes to the host and comes back for backward.  Where buckets are updated while some unit needs them
    as they were (STASH), units that compute see the ``version`` that is set.
    """

    def __init__(
        self,
        memory: RankMemory,
        comm: Communicator,
        instructions: Sequence[Instruction],
        strict: bool,
        offload: bool = False,
    ) -> None:
        stashed = {one.bucket for one in instructions if one.op is Op.STASH}
        self._refers = offload or bool(stashed) or any(one.op is Op.GATHER for one in instructions)
        self._memory, self._comm, self._strict, self._offload = memory, comm, strict, offload
        self._resident = {_address(leaf) for leaf in memory.leaves.values()} if offload else set()
        self._leaves = dict(memory.leaves)
        self._flat: dict[int, Tensor] = {}  # gathered buckets
        self._bucket: dict[int, int] = {}  # what lies in a storage
        self._slot: dict[int, int] = {}
        self._current: set[int] = set()  # whole buckets with this step's parameters
        self.version = 0
        self._old: dict[
            tuple[int, int], tuple[Tensor, dict[str, Tensor]]
        ] = {}  # buckets by version, flat and by parameter
        self._stash: dict[int, tuple[int, int]] = {}  # what lies in a slot of the stash
        self._home: dict[str, int] = {}  # the bucket of each parameter that is stashed
        for bucket in stashed:
            self._home |= dict.fromkeys((p.name for p in memory.buckets[bucket].bucket.parameters), bucket)
            self._flat[bucket] = memory.buckets[bucket].param
            self._bucket[_address(self._flat[bucket])] = bucket

    def __getitem__(self, name: str) -> Tensor:
        old = self._old.get((self._home.get(name, -1), self.version))
        return self._leaves[name] if old is None else old[1][name]

    def updated(self, bucket: int) -> None:
        """The other ranks' shards of a bucket are no longer those that are here."""
        self._current.discard(bucket)

    def stash(self, one: Instruction) -> None:
        """Keep a bucket as it is, under the version that the instruction says."""
        memory, key = self._memory.buckets[one.bucket], (one.bucket, one.version)
        flat, views = self._memory.stashes.views(one.slot, memory)
        flat.copy_(memory.param)
        self._old[key] = flat, {name: view.detach().requires_grad_(memory.learns) for name, view in views.items()}
        self._stash[one.slot] = key
        self._bucket[_address(flat)] = one.bucket

    def gather(self, one: Instruction) -> Handle:
        """Post the gather of a bucket: into a slot, or, once a step, into its own buffer where that is whole."""
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
        return self._comm.all_gather(out, memory.own_parameters, SHARDS, lane=str(one.lane), what=what)

    def free(self, buffer: Buffer) -> None:
        """The bucket in a slot is no longer needed."""
        if buffer.kind == BufferKind.STASH:
            flat, _ = self._old.pop(self._stash.pop(buffer.index))
            if self._strict:
                flat.fill_(float("nan"))
            return
        bucket = self._slot.pop(buffer.index, None)
        if bucket is None:  # it rests whole
            return
        flat = self._flat.pop(bucket)
        if self._strict and flat.is_floating_point():
            with torch.no_grad():
                flat.fill_(float("nan"))

    def references(self) -> AbstractContextManager[Any]:
        """A context in which autograd keeps references to gathered parameters, and copies on the host of what is
        offloaded.

        It does not ask what has been written since: a gather for backward writes the same once more.
        """
        if not self._refers:  # the hooks take time: 0.7 % of a forward
            return nullcontext()
        # Detached: an output that its own node saves would hold that node, and a forward without a backward would never
        # end.
        return saved_tensors_hooks(lambda value: self.keep(value.detach()), self._unpack)

    def keep(self, value: Any) -> Any:
        """What is kept of ``value`` for a backward: a reference, if it is (a view of) a gathered parameter, or what is
        offloaded.
        """
        kept = self._refer(value)
        return self._offloaded(kept) if self._offload and isinstance(kept, Tensor) else kept

    def resolve(self, kept: Any) -> Any:
        """What :meth:`keep` was given, once the bucket is gathered again."""
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
        """``value``, or a copy if it is (a view of) a gathered parameter: others may read it after the slot has been
        freed.

        An ``update`` of a buffer is read at the end of the step, when parameters and other buffers have changed too.
        """
        at = _address(value)
        return value.clone() if at in self._bucket or update and at in self._changing else value

    @cached_property
    def _changing(self) -> set[int]:
        """The storages of what a step changes where it rests."""
        resting = (*self._memory.leaves.values(), *self._memory.buffers.values())
        return {_address(tensor) for tensor in resting}

    def _offloaded(self, value: Tensor) -> Any:
        if value.nbytes < LEAST_OFFLOAD or _address(value) in self._resident:
            return value
        # On the stream that computes: the copy ends before the memory can be used again.
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
