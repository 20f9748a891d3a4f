"""A rank's memory has flat buffers for parameters, masters, gradients and optimizer state, and pools of slots for whole
buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.capture.casts import COMPUTE_DTYPE
from shardwise.core.data_options import ParameterRule
from shardwise.core.flat import FlatBuffer, FlatShard
from shardwise.core.instruction import Op
from shardwise.core.layout import Box
from shardwise.core.local_options import ISLANDS, LocalOptions
from shardwise.core.optim import OptimizerChoice
from shardwise.core.pieces import parts
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.core.scale import ScaleChoice
from shardwise.initial.values import Values
from shardwise.ops.weight_gradients import Kernels
from shardwise.parallel.data import SHARDS, held_range
from shardwise.runtime.average import Average
from shardwise.runtime.boxes import boxes
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.optimizer import FlatOptimizer, Segment, Settings
from shardwise.runtime.outer import OuterBucket
from shardwise.runtime.scale import LossScale
from shardwise.runtime.tables import TableGradient, TableOptimizer
from shardwise.runtime.whole_tensors import WholeTensors
from shardwise.units.share import Share, Span
from shardwise.units.trace import Bucket, Parameter

ALWAYS_TOGETHER = LocalOptions()


class Update(NamedTuple):
    """An optimizer updates some elements of a bucket; ``name`` is their parameter if that can be skipped by itself."""

    optimizer: FlatOptimizer
    name: str | None = None


@dataclass
class BucketMemory:
    """This has the buffers of a bucket on one rank, for the rank's local pieces of the parameters over the axes that
    shard them.

    ``share`` says what this rank has of the bucket: its ``held`` range is the whole bucket, or its own of the equal
    ``shard``s over ``dp``.  ``param`` rests in the dtype that computes: it is the whole bucket or this rank's shard (or
    the whole in memory that all ranks of the group have in common).  ``master``, which the optimizer updates, is the
    held range of that, or a wide copy of it.  Frozen buckets have neither gradient nor updates, and no wide copy.

    Gradients and optimizer state are made when first asked for: by then the module with the initial values may be gone,
    and its memory is used again.  ``host``: masters, optimizer state and the gradient's copy for it are on the host.
    """

    bucket: Bucket
    share: Share
    shard: FlatShard
    param: Tensor
    master: Tensor
    common: bool  # ``param`` is the same memory on all ranks of the group
    comm: Communicator
    choice: OptimizerChoice
    host: bool
    local: LocalOptions = ALWAYS_TOGETHER

    @staticmethod
    def allocate(
        bucket: Bucket, share: Share, comm: Communicator, choice: OptimizerChoice, host: bool = False,
        local: LocalOptions = ALWAYS_TOGETHER,
    ) -> BucketMemory:  # fmt: skip
        """Return zeroed buffers for what this rank has of ``bucket``."""
        layout, held = share.layout, share.held
        shard = layout.shard(comm.mesh.axis_size(SHARDS), comm.mesh.index(comm.rank, SHARDS))
        rest = shard if share.rule.rest == "S" else FlatShard(0, layout.numel)
        # The communicator says where what others gather lies: at best in memory that all of them have in common.
        # What servers update each rank has by itself: the others may still read it while a server takes its step.
        sharded = held.numel < layout.numel and share.rule.state != "O"
        param = comm.common(layout.numel, bucket.dtype, SHARDS) if sharded else _zeros(layout.numel, bucket.dtype, comm)
        common = sharded and param is not None
        if param is None:
            param = comm.allocate(rest.numel, bucket.dtype)
        own, wide = part(param, held), bucket.wide
        if not bucket.learns:
            master = own
        elif host:
            master = _host(held.numel, wide, comm)
        else:
            master = own if wide == bucket.dtype else _zeros(held.numel, wide, comm)
        return BucketMemory(bucket, share, shard, param, master, common, comm, choice, host, local)

    @property
    def rule(self) -> ParameterRule:
        return self.share.rule

    @property
    def layout(self) -> FlatBuffer:
        """Return where the parameters lie in the bucket."""
        return self.share.layout

    @property
    def held(self) -> FlatShard:
        """Return the range of the bucket whose masters and optimizer state this rank has."""
        return self.share.held

    @cached_property
    def table(self) -> TableGradient | None:
        """Return the gradient of a table, which has rows; None if it is no table."""
        return TableGradient(self.bucket, self.held, self.comm.device) if self.bucket.table else None

    @cached_property
    def grad(self) -> Tensor | None:
        """Return the whole gradient where it is a partial sum between microbatches, else its shard; None if frozen, or
        a table."""
        if not self.learns or self.bucket.table:
            return None
        return self.comm.allocate((self.held if self.rule.grad == "S" else self.layout).numel, self.bucket.wide)

    @cached_property
    def optimizer_gradient(self) -> Tensor | None:
        """Return what the optimizer takes: the held range of the gradient, on the host if the step is taken there."""
        if not self.learns or self.bucket.table:
            return None
        return _host(self.held.numel, self.bucket.wide, self.comm) if self.host else self.held_gradient

    @cached_property
    def updates(self) -> list[Update]:
        """Return the optimizers, with their state."""
        make = TableOptimizer if self.bucket.table else FlatOptimizer
        return [
            Update(make(self.choice, [self._segment(span) for span in one.spans], part=one.part), one.name)
            for one in self.share.updates
        ]

    @cached_property
    def whole(self) -> WholeTensors | None:
        """Return what updates parameters of this bucket as whole tensors; None if there are none."""
        if not self.share.whole:
            return None
        return WholeTensors(self.bucket, self.share, self.comm, self.choice, self.master.device)

    @cached_property
    def average(self) -> Average | None:
        """Return the moving average of the masters; None if there is none here.  It begins where they are when it is
        first asked for."""
        averages = self.learns and self.held.numel and self.choice.ema is not None
        return Average(self.master, self.choice) if averages else None

    @cached_property
    def outer(self) -> OuterBucket:
        """Return the outer step of islands that train apart; it begins where the masters are when it is first asked
        for."""
        assert self.optimizer_gradient is not None
        difference, here = self.held_gradient, self.optimizer_gradient
        if self.local.streams:  # gradients are in use while this is under way
            difference = here = self.comm.allocate(self.held.numel, self.bucket.wide)
        return OuterBucket(self.master, difference, here, self.local, self.comm.mesh.axis_size(ISLANDS))

    def _segment(self, span: Span) -> Segment:
        first, last = span.start - self.held.start, span.stop - self.held.start
        gradient = None if self.optimizer_gradient is None else self.optimizer_gradient[first:last]
        return Segment(self.master[first:last], gradient, span.group, span.start)

    def boxes(self, flat: Tensor, origin: int, start: int, stop: int) -> Iterator[tuple[Parameter, Box, Tensor]]:
        """Yield elements ``start`` to ``stop`` of the bucket as boxes of whole parameters, each with its values: a view
        of ``flat``, which begins with element ``origin``."""
        return boxes(self.bucket, self.layout, self.comm.mesh, self.comm.rank, flat, origin, start, stop)

    @property
    def resident(self) -> bool:
        """Return whether the whole bucket is here between steps, if only because ranks have memory in common."""
        return self.param.numel() == self.layout.numel

    @property
    def learns(self) -> bool:
        return self.bucket.learns

    @property
    def shard_gradient(self) -> Tensor:
        """Return this rank's ``shard`` of the gradient, whoever else has it."""
        assert self.grad is not None
        return part(self.grad, self.shard)

    @property
    def held_gradient(self) -> Tensor:
        """Return the held range of the gradient, which the optimizer is given; a table's is made of its rows."""
        if self.table is not None:
            return self.table.dense()
        assert self.grad is not None
        return part(self.grad, self.held)

    @property
    def owners(self) -> tuple[FlatShard, ...]:
        """Return the range that each of the first ranks over ``dp`` updates: servers, or all where it is sharded."""
        parts = self.comm.mesh.axis_size(SHARDS)
        each = range(self.rule.servers or parts)
        return tuple(held_range(self.rule, self.layout, parts, index) for index in each)

    @property
    def held_parameters(self) -> Tensor:
        """Return the held range of the parameters."""
        return part(self.param, self.held)

    @torch.no_grad()
    def load(self, values: Values) -> None:
        """Set the held range, masters first, so that they lose no precision; others' ranges are gathered before use."""
        held = self.held
        found: dict[str, list[tuple[Box, Tensor]]] = {}
        for parameter, box, goal in self.boxes(self.master, held.start, held.start, held.stop):
            found.setdefault(parameter.name, []).append((box, goal))
        for name, goals in found.items():
            values.copy_boxes(name, goals)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the held range of the parameters up to date with the masters."""
        if self.table is not None:
            self.table.touched = None
        own = self.held_parameters
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master)

    @torch.no_grad()
    def update_rows(
        self, settings: Settings, coefficient: Tensor | None, skip: Tensor, clip_value: float | None = None
    ) -> None:
        """Take the optimizer's step of the held rows of a table that have a gradient, and publish them."""
        assert self.table is not None
        held, width, own = self.held, self.bucket.width, self.held_parameters
        rows = self.table.rows.between(held)
        for optimizer, _ in self.updates:
            assert isinstance(optimizer, TableOptimizer)
            optimizer.step_rows(settings, rows, coefficient, skip, clip_value)
        if self.table.touched is not None:
            self.table.touched.append(rows.numbers)
        if own.data_ptr() != self.master.data_ptr():
            at = rows.numbers - held.start // width
            own.view(-1, width)[at] = self.master.view(-1, width)[at].to(own.dtype)

    def _changed(self, scaled: bool) -> list[Tensor]:
        """Return all that an update changes; with a ``scaled`` loss that includes the gradient."""
        found = [tensor for update in self.updates for tensor in update.optimizer.changed()]
        found += [] if self.average is None else [self.average.average, self.average.count]
        return [*found, self.held_gradient] if scaled and not self.host else found

    @torch.no_grad()
    def backup(self, scaled: bool) -> list[Tensor]:
        """Return copies of what an update changes."""
        return [tensor.clone() for tensor in self._changed(scaled)]

    @torch.no_grad()
    def restore(self, backup: Sequence[Tensor], scaled: bool) -> None:
        """Copy back what :meth:`backup` gave."""
        for tensor, before in zip(self._changed(scaled), backup, strict=True):
            tensor.copy_(before)
        self.publish()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return, by name, views of the parameters' local pieces in ``flat``, which is a whole bucket on this rank."""
        return {e.name: flat[e.offset : e.stop].view(e.shape) for e in self.layout.entries}


def part(flat: Tensor, where: FlatShard) -> Tensor:
    """Return the range ``where`` of a whole bucket; ``flat`` may also be this range alone."""
    return flat if flat.numel() == where.numel else flat[where.start : where.stop]


def local_part(whole: Tensor, parameter: Parameter, comm: Communicator) -> Tensor:
    """Return this rank's local part of a whole parameter."""
    if parameter.layout is None:
        return whole
    out = torch.empty(parameter.local_shape(comm.mesh, comm.rank), dtype=whole.dtype, device=whole.device)
    for part in parts(parameter.layout, comm.mesh, comm.rank):
        out[part.local.slices] = whole[part.whole.slices]
    return out


def _zeros(numel: int, dtype: torch.dtype, comm: Communicator) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=comm.device)


def _host(numel: int, dtype: torch.dtype, comm: Communicator) -> Tensor:
    return torch.zeros(numel, dtype=dtype, pin_memory=Backend.of(comm.device).pins)


@dataclass
class Pool:
    """A pool has slots, each as large as the largest bucket that it has had to hold; a bucket lies at its slot's start.

    ``dtype`` gives the dtype of a bucket in its slot.  ``shared``: other ranks read the slots, so the communicator
    allocates them.  ``gathered``: a bucket that rests whole needs no slot.
    """

    comm: Communicator
    dtype: Callable[[BucketMemory], torch.dtype]
    shared: bool = False
    gathered: bool = False
    slots: list[Tensor] = field(default_factory=list)  # 1-d, uint8
    _views: dict[tuple[int, int], tuple[Tensor, dict[str, Tensor]]] = field(default_factory=dict)

    def reserve(self, slots: Sequence[Sequence[int]], buckets: Mapping[int, BucketMemory]) -> None:
        """Make sure that there is memory for these ``slots``, given as the buckets that each has to hold."""
        for slot, held in enumerate(slots):
            needed = (buckets[b] for b in held if not (self.gathered and buckets[b].resident))
            nbytes = max((memory.layout.numel * self.dtype(memory).itemsize for memory in needed), default=0)
            if slot < len(self.slots) and self.slots[slot].numel() >= nbytes:
                continue
            if self.shared:
                new = self.comm.allocate(nbytes, torch.uint8)
            else:
                new = torch.empty(nbytes, dtype=torch.uint8, device=self.comm.device)
            self.slots[slot : slot + 1] = [new]
            self._views = {key: view for key, view in self._views.items() if key[0] != slot}

    def views(self, slot: int, memory: BucketMemory) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a bucket in a slot: flat, and its parameters by name in their local shapes, outside autograd."""
        key = (slot, memory.bucket.index)
        if key not in self._views:
            dtype = self.dtype(memory)
            flat = self.slots[slot][: memory.layout.numel * dtype.itemsize].view(dtype)
            leaves = {name: view.detach() for name, view in memory.views(flat).items()}
            self._views[key] = flat, leaves
        return self._views[key]


class RankMemory:
    """This is what a rank keeps between steps: its buckets by index, pools, the parameters that rest whole by name
    (leaves), and the model's buffers.
    """

    def __init__(
        self,
        buckets: dict[int, BucketMemory],
        buffers: dict[str, Tensor],
        comm: Communicator,
        plan: Plan,
        scale: ScaleChoice | None,
    ) -> None:
        self.loss_scale = LossScale(scale or ScaleChoice(), comm.device) if plan.numeric.precision == "fp16" else None
        self.buckets, self.buffers = buckets, buffers
        # Asked only once, since the host waits for the answer.
        self.kernels = Kernels.of(Backend.of(comm.device), COMPUTE_DTYPE.get(plan.numeric.precision))
        self.slots = Pool(comm, lambda memory: memory.bucket.dtype, gathered=True)
        self.stashes = Pool(comm, lambda memory: memory.bucket.dtype)
        summed = COMPUTE_DTYPE.get(plan.data.reduce)
        self.unreduced = Pool(comm, lambda memory: summed or memory.bucket.wide, shared=True)
        self.leaves = {
            name: view.detach().requires_grad_(memory.learns)
            for memory in buckets.values()
            if memory.resident
            for name, view in memory.views(memory.param).items()
        }
        self._learns = False
        self.is_averaged = False  # whether the parameters are the averages of themselves, and the reverse
        # 1 after a non-finite norm, until the host has looked.
        self.halted = torch.zeros((), dtype=torch.float32, device=comm.device)
        # In loops: whether each optional parameter has had a gradient since they were set to None; is that zero now?
        self.had: Tensor | None = None
        self.keeps_zeros = False
        self._device, self._constants = comm.device, dict[int, tuple[Tensor, Tensor]]()
        self._joined: dict[tuple[int, ...], FlatOptimizer] = {}

    def resident(self, constant: Tensor) -> Tensor:
        """Return a constant of a graph, which is on the host, on this rank's device; it is copied there once."""
        if constant.device.type == self._device.type:
            return constant
        if id(constant) not in self._constants:
            # The original is kept too, so that no other constant gets its id.
            self._constants[id(constant)] = (constant, Backend.of(self._device).to_device(constant, self._device))
        return self._constants[id(constant)][1]

    def joined(self, buckets: tuple[int, ...]) -> FlatOptimizer:
        """Return the one optimizer of several buckets."""
        if buckets not in self._joined:
            self._joined[buckets] = FlatOptimizer.joined(
                [u.optimizer for b in buckets for u in self.buckets[b].updates]
            )
        return self._joined[buckets]

    def reserve(self, program: Program) -> None:
        """Allocate what a program needs: its pools and, before the first that trains, gradients and optimizer state."""
        for pool, wanted in (
            (self.slots, program.slots),
            (self.unreduced, program.unreduced),
            (self.stashes, program.stashes),
        ):
            pool.reserve(wanted, self.buckets)
        if not self._learns and any(one.op is Op.STEP for one in program.instructions):
            self._learns = True
            for bucket in self.buckets.values():
                bucket.updates, bucket.whole, bucket.average  # noqa: B018, made when asked for
