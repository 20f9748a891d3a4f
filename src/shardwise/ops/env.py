"""The :class:`Env` in which a local graph runs: ranks, microbatches and steps share the graph, but not the Env."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from shardwise.core.layout import axis_ranges, shard_range
from shardwise.core.mesh import joined

ROWS = "rows"
"""This name stands in local graphs for the axes of the batch, which differ from plan to plan."""

Groups = Sequence[str]
"""Some axes of tensor parallelism, or ``ROWS``, or both."""


@dataclass
class Env:
    """Where and when a unit runs: this rank's place on the batch axes, and one microbatch of one step.

    ``rows`` is what the batch dim of the captured graph stands for. With a ``window`` it is the number of rows of the
    whole batch of the step, and the microbatch has those from ``window[0]`` to ``window[1]``: microbatches then cut the
    batch, like ranks, and each computes partial sums. Without one the microbatch is a batch of its own.
    ``tensor`` gives for each axis of tensor parallelism the number of ranks along it and this rank's place among them.
    """

    comm: Any = None  # a Communicator; None means one rank
    axes: tuple[str, ...] = ()  # the axes of the batch
    parts: int = 1  # the number of ranks over `axes`
    index: int = 0  # the place of this rank among them
    rows: int = 0  # the rows of the batch, or of the microbatch, on all ranks together
    offset: int = 0  # the first of these rows in the batch of the step
    window: tuple[int, int] | None = None  # the microbatch's rows among them, on all ranks together; None: all
    # The windows of the microbatches whose pieces a value has, one after the other; only an exchange has several.
    windows: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    step: int = 0
    ordinal: int = 0  # the ordinal of the first random op of the unit that runs
    counts: Sequence[Tensor] = ()  # sums over rows that the step makes beforehand (`units/batch_sums.py`)
    tape: Any = None  # the Tape of `units/selective_recompute.py` that keeps results of the unit that runs
    kind: str = ""  # the type of device that tensors on meta stand for, if their memory is measured
    again: bool = False  # whether the unit runs again for its backward, and only communicates what that reads
    alone: bool = False  # whether the microbatch is known to be the whole step; used on meta, where weights are unknown
    tensor: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    meanwhile: Callable[[], None] | None = None  # work of a backward that can run during a collective
    lane: str = "compute"  # the lane of collectives
    posts: bool = False  # whether moves do not wait, but are returned as they are under way
    objects: Mapping[int, Any] = field(default_factory=dict)  # the batch's objects, of which fields have numbers

    def of_exchange(self, microbatches: int) -> Env:
        """Return where an exchange runs, given the place of one of ``microbatches``: it has the rows of all of them."""
        windows = tuple(shard_range(self.rows, microbatches, m) for m in range(microbatches))
        return replace(self, window=None, windows=windows)

    def wait(self, handle: Any) -> None:
        """Do the work of ``meanwhile``, then wait until a collective is complete."""
        if self.meanwhile is not None:
            self.meanwhile()
        handle.wait()

    @property
    def share(self) -> float:
        """The microbatch's share of the rows."""
        first, last = self.window or (0, self.rows)
        return (last - first) / max(self.rows, 1)

    def share_of(self, axes: Sequence[str]) -> float:
        """Return the microbatch's share of a value that is the same for all rows, if ``axes`` shard these, else 1."""
        return self.share if ROWS in axes else 1.0

    def range(self, index: int | None = None) -> tuple[int, int]:
        """Return (start, stop) of a rank's part of the microbatch among the rows; the default is this rank."""
        return self.ranges(self.rows, (ROWS,), index)[0]

    def ranges(self, size: int, axes: Sequence[str], index: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return the ranges (start, stop) of a rank's part of ``size`` elements that ``axes`` shard, of which the
        sequence alone has several; the default is this rank.

        Elements that ``ROWS`` shards are the rows, of which the microbatch's are shared out. Those of an exchange are
        counted from 0."""
        parts, own = self.group(axes)
        index = own if index is None else index
        if ROWS in axes and self.windows:
            each = (shard_range(b - a, parts, index) for a, b in self.windows)
            return ((0, sum(stop - start for start, stop in each)),)
        first, last = (self.window if ROWS in axes else None) or (0, size)
        return tuple((first + a, first + b) for a, b in axis_ranges(last - first, axes, parts, index))

    def shares(self, axes: Sequence[str]) -> bool:
        """Whether ``axes`` cut anything: they have several ranks, or the microbatch is a part of the rows."""
        return self.group(axes)[0] > 1 or self.share_of(axes) != 1

    def group(self, axes: Sequence[str]) -> tuple[int, int]:
        """Return the number of ranks over ``axes``, which may include ``ROWS``, and this rank's place among them."""
        parts, index = 1, 0
        for axis in axes:
            size, own = (self.parts, self.index) if axis == ROWS else self.tensor.get(axis, (1, 0))
            parts, index = parts * size, index * size + own
        return parts, index

    def real(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the axes of the mesh that ``axes`` stand for."""
        return joined(a for axis in axes for a in (self.axes if axis == ROWS else (axis,)))
