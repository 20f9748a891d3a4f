"""The parameters of one server: its ranges of all buckets, which an optimizer updates push by push."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.core.frames import Share as ServedRange
from shardwise.core.layout import Box
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.initial.values import Values
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.buffers import BucketMemory
from shardwise.runtime.compression import decode, decode_rows
from shardwise.runtime.optimizer import FlatOptimizer, Settings
from shardwise.runtime.served_worker import as_bytes, parts_of
from shardwise.runtime.staging import Part, Push
from shardwise.runtime.tables import Rows
from shardwise.units.served import ONE, served_ranges, served_share
from shardwise.units.trace import Bucket

TAKEN = torch.zeros(())
"""The flag of an update that is not skipped."""


@dataclass
class ServedStore:
    """What server number ``server`` of the plan has of ``buckets``; a :class:`~shardwise.runtime.staging.Store`.

    The learning rate of an update is that of its number, which ``version`` counts.
    """

    buckets: Sequence[Bucket]
    plan: Plan
    choice: OptimizerChoice
    server: int
    version: int = 0
    memory: dict[int, BucketMemory] = field(default_factory=dict)
    # of each held row of a table: the version in which it changed last, since this store was made
    changes: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        comm = AloneCommunicator(ONE, 0, torch.device("cpu"))
        ranges = served_ranges(self.buckets, self.plan, self.choice)[self.server]
        for bucket in self.buckets:
            if bucket.index in ranges:
                self.memory[bucket.index] = _held(bucket, ranges[bucket.index], self.choice, comm)
        self._ranges = ranges
        self.changes = {
            index: torch.zeros(ranges[index].numel // ranges[index].row, dtype=torch.int64)
            for index in self.memory if ranges[index].row
        }  # fmt: skip
        plain = [memory for index, memory in self.memory.items() if index not in self.changes]
        updates = [update.optimizer for memory in plain for update in memory.updates]
        self._optimizers: list[FlatOptimizer] = updates

    def load(self, values: Values) -> None:
        """Begin with these values."""
        for memory in self.memory.values():
            memory.load(values)

    def state(self) -> dict[str, Tensor]:
        """Return all that updates depend on, by name; what is returned changes with the next update."""
        found: dict[str, Tensor] = {}
        for index, memory in self.memory.items():
            found[f"{index}.master"] = memory.master
            for number, (_, kept) in enumerate(one for u in memory.updates for one in u.optimizer.states()):
                found |= {f"{index}.{number}.{key}": value for key, value in kept.items()}
        return found

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Go on from a :meth:`state` of this server; raise :class:`ConfigError` for another's."""
        own, where = self.state(), f"snapshot of server {self.server}"
        if wrong := sorted(own.keys() ^ state.keys()):
            raise ConfigError.on(where, f"{wrong[0]} differs", "one of the same run")
        for name, value in own.items():
            found = state[name]  # each is read once
            if found.shape != value.shape:
                raise ConfigError.on(where, f"{name} differs", "one of the same run")
            value.copy_(found)
        for memory in self.memory.values():
            memory.publish()
        self.version = version

    def pieces(self) -> Iterator[tuple[str, tuple[int, ...], Box, Tensor]]:
        """Yield (name, shape, box, values) of the parameters that are here, in master precision."""
        for memory in self.memory.values():
            held = memory.held
            for parameter, box, values in memory.boxes(memory.master, held.start, held.start, held.stop):
                yield parameter.name, tuple(parameter.shape), box, values

    # ---- what the server asks --------------------------------------------------------------------------------------

    def parameters(self, bucket: int) -> memoryview:
        return as_bytes(self.memory[bucket].param)

    def changed(self, bucket: int, since: int) -> Iterator[Part]:
        """Yield copies of the rows of a table that have changed since a version."""
        share, numbers = self._ranges[bucket], (self.changes[bucket] > since).nonzero()[:, 0]
        values = self.memory[bucket].param.view(-1, share.row)[numbers]
        yield from parts_of(bucket, share, Rows(numbers + share.start // share.row, values), share.parameter)

    def apply(self, push: Push) -> None:
        """Update all ranges by a push: its gradients times its weight, at the rate of this update.  Of a table only the
        rows that come are updated."""
        rows = [
            (part, decode_rows(part.payload, part.encoding, part.count, self._ranges[part.bucket].row,
                               self.memory[part.bucket].bucket.wide))
            for part in push.parts if part.bucket in self.changes
        ]  # fmt: skip
        decoded = [(part, decode(part.payload, part.encoding, part.count, self._gradient(part.bucket).dtype))
                   for part in push.parts if part.bucket not in self.changes]  # fmt: skip
        for part, values in decoded:
            self._gradient(part.bucket)[part.offset : part.offset + part.count].copy_(values)
        settings = self.choice.settings(self.version)
        if self.plan.serving.rate == "staleness":
            late = max(0, self.version - push.commit.read)
            settings = tuple({**one, "lr": one["lr"] / (1 + late)} for one in settings)
        kind = torch.float64 if self._is_double else torch.float32
        weight = None if push.commit.weight == 1 else torch.tensor(push.commit.weight, dtype=kind)
        for optimizer in self._optimizers:
            optimizer.step(settings, weight)
        for index, memory in self.memory.items():
            if index not in self.changes:
                memory.publish()
        self.version += 1
        for index, changes in self.changes.items():
            self._update_rows(index, changes, [one for one in rows if one[0].bucket == index], settings, weight)

    def _update_rows(
        self, bucket: int, changes: Tensor, rows: Sequence[tuple[Part, tuple[Tensor, Tensor]]], settings: Settings,
        weight: Tensor | None,
    ) -> None:  # fmt: skip
        """Update the rows of a table that have come, and note that they have changed."""
        memory, share = self.memory[bucket], self._ranges[bucket]
        assert memory.table is not None
        memory.table.clear()
        for part, (numbers, values) in rows:
            here = numbers + part.offset // share.row
            changes[here] = self.version
            memory.table.add(here + share.start // share.row, values, -1)
        memory.update_rows(settings, weight, TAKEN)
        memory.table.clear()

    def _gradient(self, bucket: int) -> Tensor:
        gradient = self.memory[bucket].grad
        assert gradient is not None
        return gradient

    @property
    def _is_double(self) -> bool:
        return any(memory.bucket.wide == torch.float64 for memory in self.memory.values())


def _held(bucket: Bucket, held: ServedRange, choice: OptimizerChoice, comm: AloneCommunicator) -> BucketMemory:
    """Return the memory of a range of a bucket: the parameters that compute, masters, a gradient and state."""
    share = served_share(bucket, held, choice)
    param = torch.zeros(held.numel, dtype=bucket.dtype)
    master = param if bucket.dtype == bucket.wide else torch.zeros(held.numel, dtype=bucket.wide)
    return BucketMemory(bucket, share, share.held, param, master, False, comm, choice, False)


def masters_of(stores: Iterable[ServedStore]) -> dict[str, Tensor]:
    """Return the parameters of all servers' stores, whole and by name, in master precision."""
    found: dict[str, Tensor] = {}
    for name, shape, box, values in (piece for store in stores for piece in store.pieces()):
        found.setdefault(name, torch.zeros(shape, dtype=values.dtype))[box.slices] = values
    return found
