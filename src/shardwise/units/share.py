"""A rank's share of a bucket: the layout of the parameters, the range that the rank updates, and its optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.data_options import ParameterRule
from shardwise.core.flat import FlatBuffer, FlatEntry, FlatShard
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.ops.env import Env
from shardwise.parallel.data import SHARDS, batch_axes, held_range, placement
from shardwise.units.trace import Bucket, Trace, part_of_batch


class Span(NamedTuple):
    """A range of a bucket, in elements, all of which have the hyperparameters of one group."""

    start: int
    stop: int
    group: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Updated(NamedTuple):
    """The spans that one optimizer updates; ``name`` is the parameter if it has an optimizer of its own."""

    spans: tuple[Span, ...]
    name: str | None = None


def place_of(trace: Trace, mesh: Mesh, rank: int, rows: int, batch: int | None = None) -> Env:
    """Return the place of ``rank`` in a microbatch of ``rows`` rows on all ranks together, without a communicator. The
    microbatch is one of a ``batch`` of so many rows, if that is given."""
    axes = batch_axes(mesh)
    real = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
    tensor = mesh.places(rank, tuple(trace.tensor))
    place = Env(axes=real, parts=mesh.axis_size(axes), index=mesh.index(rank, axes), tensor=tensor)
    return part_of_batch(trace, place, rows, batch)


@dataclass(frozen=True)
class Share:
    """A rank's share of a bucket, under the ``rule`` of :func:`placement`. ``held`` is the range whose master weights
    and optimizer state the rank has, and ``updates`` divides it among optimizers; a frozen bucket has no updates."""

    layout: FlatBuffer
    rule: ParameterRule
    held: FlatShard
    updates: tuple[Updated, ...] = ()
    apart: bool = False  # whether ranks over ``dp`` hold different ranges
    table: bool = False  # whether the gradient has rows, and no buffer

    @staticmethod
    def of(bucket: Bucket, plan: Plan, choice: OptimizerChoice, rank: int, per_parameter: bool = False) -> Share:
        """Return the share of ``rank``. With ``per_parameter`` each parameter has an optimizer of its own, so that
        parameters without a gradient in a step can be skipped.
        """
        parts, index = plan.mesh.axis_size(SHARDS), plan.mesh.index(rank, SHARDS)
        rule, layout = placement(plan, bucket.parameters[0].name, bucket.table), bucket.layout(choice, plan.mesh, rank)
        held = held_range(rule, layout, parts, index, bucket.learns)
        updates: tuple[Updated, ...] = ()
        if bucket.learns and per_parameter:
            ranges = entry_ranges(layout, held.start, held.stop)
            updates = tuple(Updated((Span(a, b, choice.group_of(e.name, e.shape)),), e.name) for e, a, b in ranges)
        elif bucket.learns:
            updates = (Updated(tuple(Span(start, stop, group) for group, start, stop in held.segments(layout))),)
        return Share(layout, rule, held, updates, (rule.state if bucket.learns else rule.rest) != "R", bucket.table)


def entry_ranges(layout: FlatBuffer, start: int, stop: int) -> Iterator[tuple[FlatEntry, int, int]]:
    """Yield (entry, start, stop) for each parameter in a range of a bucket; both are in elements of the bucket."""
    for entry in layout.entries:
        first, last = max(start, entry.offset), min(stop, entry.stop)
        if first < last:
            yield entry, first, last
