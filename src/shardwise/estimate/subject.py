"""Estimates are of a subject: the steps of a plan on batches of some rows, and what each rank has of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.core.layout import shard_sizes
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.ops.env import Env
from shardwise.units.share import Share, place_of
from shardwise.units.trace import Trace


@dataclass(frozen=True)
class Subject:
    """Steps on batches of ``rows`` rows; ``traces`` has one for each microbatch, as the engine chooses them."""

    traces: Sequence[Trace]
    plan: Plan
    choice: OptimizerChoice
    rows: int

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each microbatch."""
        return shard_sizes(self.rows, len(self.traces))

    def envs(self, rank: int) -> list[Env]:
        """Return the place of ``rank`` in each microbatch."""
        return [place_of(self.traces[0], self.plan.mesh, rank, n, self.rows) for n in self.sizes]

    def whole(self, rank: int) -> Env:
        """Return the place of ``rank`` in the whole batch."""
        return place_of(self.traces[0], self.plan.mesh, rank, self.rows)

    def share(self, bucket: int, rank: int) -> Share:
        """Return what ``rank`` has of a bucket."""
        trace = self.traces[0]
        return Share.of(trace.buckets[bucket], self.plan, self.choice, rank, bool(trace.optional))
