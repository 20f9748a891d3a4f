"""What is the same in all steps of a rank: whom it talks to, what it holds, and how a step is to be taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from shardwise.core.instruction import Instruction
from shardwise.runtime.buffers import RankMemory
from shardwise.runtime.communicator import Communicator


@dataclass
class RankContext:
    """What the instructions of a rank's programs are run with.  ``progress(position, instruction)`` is called before
    each instruction.

    ``axes`` are those of the batch, ``tensor`` those over which parameters are sharded.  ``learning`` are the indices
    of all buckets that learn, on whatever rank; ``counted`` those whose norm this rank counts: of several ranks that
    have the same of a bucket one does, not to speak of the batch axes.  ``per_parameter``: parameters that no backward
    of a step reaches on any rank take no step.  ``strict`` fills memory with NaN as soon as the program says that its
    content has ended.
    """

    comm: Communicator
    memory: RankMemory
    axes: tuple[str, ...]
    seed: int
    learning: tuple[int, ...]
    counted: tuple[int, ...]
    tensor: tuple[str, ...] = ()
    clip_norm: float | None = None
    progress: Callable[[int, Instruction], None] | None = None
    inspect: Callable[[int, str, list[Tensor]], None] | None = (
        None  # (position, what, values): looks at what units produce
    )
    # Gets the whole gradients of each batch, before clipping; on all ranks or none.
    keep_gradients: list[dict[str, Tensor]] | None = None
    per_parameter: bool = False
    strict: bool = False
    offload: bool = False  # of activations

    @cached_property
    def place(self) -> dict[str, tuple[int, int]]:
        """For each axis of tensor parallelism the number of ranks, and which this one is."""
        return self.comm.mesh.places(self.comm.rank, self.tensor)
