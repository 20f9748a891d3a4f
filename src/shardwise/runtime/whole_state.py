"""This collects an engine's single-device state, a whole tensor at a time; no device holds more of it than a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.parallel.data import placement
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.collect import LANE, BucketSpread
from shardwise.runtime.communicator import Communicator
from shardwise.units.trace import Bucket


class TensorSpec(NamedTuple):
    """This is the shape and dtype of a whole tensor, which are known before it is collected."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WholeState:
    """This is the state of a module that the ranks have together; its parameters lie in ``buckets``.

    ``holders`` gives, by bucket, the coordinates on the pipeline axis that have it; ``updating`` gives, by buffer, the
    coordinate that keeps it up to date: other buffers are the same everywhere.  ``unused`` are the parameters that
    no unit reads, on the host.  ``first_names`` are those of :func:`first_names`: the module itself is not kept, as its
    memory is needed.
    """

    comm: Communicator
    plan: Plan
    choice: OptimizerChoice
    memory: RankMemory
    first_names: Mapping[str, str]
    buckets: Sequence[Bucket]
    holders: Mapping[int, Sequence[int]]
    updating: Mapping[str, int]
    unused: Mapping[str, Tensor]

    def describe(self) -> dict[str, TensorSpec]:
        """Return the shape and dtype of every tensor that :meth:`collect` yields, by name."""
        tensors = {**self.unused, **self.memory.buffers}
        found = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in tensors.items()}
        for bucket in self.buckets:
            found |= {one.name: TensorSpec(tuple(one.shape), _master_dtype(bucket)) for one in bucket.parameters}
        return found

    def collect(self, rank: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for every parameter, in its master precision, and every buffer, whole and on the host,
        under the first of its names.

        All ranks must iterate together and to the end; with ``rank``, only that rank is given tensors, which the caller
        may change and keep.  Beside them the host holds one bucket, and a device ``collect.CHUNK`` bytes of a bucket,
        or one buffer.
        """
        if self.plan.serving.apart:
            raise ShardwiseError("the parameters are at the servers; a worker has those that it has pulled")
        keeps = rank in (None, self.comm.rank)
        if keeps:
            yield from ((name, value.clone()) for name, value in self.unused.items())
        for name, value in self.memory.buffers.items():
            found = self._buffer(self.updating.get(name), value, f"buffer {name}")
            if keeps:
                yield name, found.to("cpu", copy=True)
            del found
        for bucket in self.buckets:
            goals = self._parameters(bucket, keeps)
            for name in list(goals):
                yield name, goals.pop(name)

    def _parameters(self, bucket: Bucket, keeps: bool) -> dict[str, Tensor]:
        root, dtype = self.holders[bucket.index][0], _master_dtype(bucket)
        mine = self.comm.mesh.index(self.comm.rank, PIPELINE) == root
        held = self.memory.buckets[bucket.index].master if mine else None
        goals = {one.name: torch.empty(one.shape, dtype=dtype) for one in bucket.parameters} if keeps else {}
        spread = BucketSpread(
            bucket, placement(self.plan, bucket.parameters[0].name, bucket.table), self.choice, self.comm, root
        )
        spread.fill(held, dtype, goals, f"parameters of bucket {bucket.index}")
        return goals

    def _buffer(self, root: int | None, value: Tensor, what: str) -> Tensor:
        """Return the buffer of the rank at ``root`` on the pipeline axis; with None all ranks have the same."""
        if root is None or self.comm.mesh.axis_size(PIPELINE) == 1:
            return value
        value = value.clone(memory_format=torch.contiguous_format)
        self.comm.broadcast(value, PIPELINE, root, lane=LANE, what=what).wait()
        return value

    def on_host(self, rank: int | None = None) -> dict[str, Tensor]:
        """Return the full single-device state under the module's own names, on the host; all ranks call it together.

        With ``rank``, only that rank gets it, and the others get an empty dict.
        """
        wanted = set(self.first_names.values())
        values = {name: value for name, value in self.collect(rank) if name in wanted}
        if rank not in (None, self.comm.rank):
            return {}
        # Names of one tied tensor get tensors of their own, as if each had been copied.
        return {name: values[one] if name == one else values[one].clone() for name, one in self.first_names.items()}


def first_names(module: nn.Module) -> dict[str, str]:
    """Map every name in a module's state dict to the first name of the same tensor.

    Raises :class:`ConfigError` where the state has more than parameters and buffers, as that could not be collected.
    """
    first: dict[int, str] = {}
    named: list[tuple[str, Any]] = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    every = {name: first.setdefault(id(value), name) for name, value in named}
    state = module.state_dict(keep_vars=True)
    if strange := state.keys() - every.keys():
        wrong = f'its state has "{min(strange)}", which is no parameter or buffer of that name'
        raise ConfigError.on("model", wrong, "modules without extra state")
    return {name: every[name] for name in state}


def _master_dtype(bucket: Bucket) -> torch.dtype:
    return bucket.wide if bucket.learns else bucket.dtype
