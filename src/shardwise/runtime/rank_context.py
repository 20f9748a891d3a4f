"""The context of a rank is the same in all steps: its communicator, its memory, and how a step is to be taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from shardwise.core.instruction import Instruction
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.hooks import GradientHooks
from shardwise.runtime.served_worker import ServedWorker


@dataclass
class RankContext:
    """A rank runs the instructions of its programs with this.  ``progress(position, instruction)`` is called before
    each instruction.

    ``axes`` are those of the batch, ``tensor`` those of tensor parallelism.  ``learning`` are the indices of all
    buckets that learn, on whatever rank; ``counted`` those whose norm this rank counts: at each place on the batch
    axes, one of the ranks that have the same part of a bucket does.  ``optional`` are the parameters, of all ranks,
    that take no step where no backward on any rank reaches them.  ``strict`` fills memory with NaN as soon as the
    program says that its content has ended.
    """

    comm: Communicator
    memory: RankMemory
    axes: tuple[str, ...]
    seed: int
    learning: tuple[int, ...]
    counted: tuple[int, ...]
    tensor: tuple[str, ...] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    progress: Callable[[int, Instruction], None] | None = None
    # ``inspect(position, what, values)`` is given what units produce.
    inspect: Callable[[int, str, list[Tensor]], None] | None = None
    # This is given the whole gradients of each batch, before clipping; it is set on all ranks or none.
    keep_gradients: list[dict[str, Tensor]] | None = None
    needs_gradients: bool = True  # otherwise it is given empty dicts, and only other ranks put gradients together
    optional: tuple[str, ...] = ()
    strict: bool = False
    hooks: GradientHooks | None = None  # those of users' parameters, if there are any
    offload: bool = False  # whether activations are offloaded to the host
    servers: ServedWorker | None = None  # the parameter servers, if they are other processes

    @cached_property
    def place(self) -> dict[str, tuple[int, int]]:
        """Return, for each axis of tensor parallelism, the number of ranks and this rank's place among them."""
        return self.comm.mesh.places(self.comm.rank, self.tensor)
