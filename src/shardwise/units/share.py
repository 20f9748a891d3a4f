"""A rank's share of a bucket: the layout of the parameters, the range that the rank updates, and its optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.core.data_options import ParameterRule
from shardwise.core.flat import FlatBuffer, FlatEntry, FlatShard
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.ops.env import Env
from shardwise.parallel.data import SHARDS, batch_axes, held_range, placement
from shardwise.parallel.whole_tensors import parted_over
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
    """The spans that one optimizer updates, that of a ``part`` of the choice; ``name`` is the parameter if it has an
    optimizer of its own."""

    spans: tuple[Span, ...]
    name: str | None = None
    part: int = 0


class WholeTensor(NamedTuple):
    """A parameter of this ``shape`` that a ``part`` of the choice updates as a whole tensor. ``owner`` is the number of
    the rank that does this, over the axes of :func:`~shardwise.parallel.whole_tensors.parted_over`."""

    name: str
    shape: tuple[int, ...]
    group: int
    part: int
    owner: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


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
    and optimizer state the rank has, and ``updates`` divides it among optimizers that go element by element; a frozen
    bucket has no updates. ``whole`` are the parameters of the bucket, not only of the range, that are updated as whole
    tensors; the state of these is on the rank that does it, whose number ``place`` is."""

    layout: FlatBuffer
    rule: ParameterRule
    held: FlatShard
    updates: tuple[Updated, ...] = ()
    apart: bool = False  # whether ranks over ``dp`` hold different ranges
    table: bool = False  # whether the gradient has rows, and no buffer
    whole: tuple[WholeTensor, ...] = ()
    place: int = 0
    parted: tuple[str, ...] = ()  # the axes over which ranks hold different parts of these tensors

    @property
    def owned(self) -> tuple[WholeTensor, ...]:
        """The parameters that this rank updates as whole tensors."""
        return tuple(one for one in self.whole if one.owner == self.place)

    @property
    def held_of_whole(self) -> int:
        """The number of elements that the rank holds of parameters that are updated as whole tensors."""
        names, ranges = {one.name for one in self.whole}, entry_ranges(self.layout, self.held.start, self.held.stop)
        return sum(stop - start for entry, start, stop in ranges if entry.name in names)

    @staticmethod
    def of(bucket: Bucket, plan: Plan, choice: OptimizerChoice, rank: int, per_parameter: bool = False) -> Share:
        """Return the share of ``rank``. With ``per_parameter`` each parameter has an optimizer of its own, so that
        parameters without a gradient in a step can be skipped.
        """
        parts, index = plan.mesh.axis_size(SHARDS), plan.mesh.index(rank, SHARDS)
        rule, layout = placement(plan, bucket.parameters[0].name, bucket.table), bucket.layout(choice, plan.mesh, rank)
        held = held_range(rule, layout, parts, index, bucket.learns)
        apart = (rule.state if bucket.learns else rule.rest) != "R"
        if not bucket.learns:
            return Share(layout, rule, held, (), apart, bucket.table)
        updates: list[Updated] = []
        if per_parameter:
            for entry, start, stop in entry_ranges(layout, held.start, held.stop):
                group = choice.group_of(entry.name, bucket.by_name[entry.name].shape)
                updates.append(Updated((Span(start, stop, group),), entry.name, choice.kind(group // 2)))
        else:
            updates += updates_of(held, layout, choice)
        updates = [one for one in updates if not choice.parts[one.part].whole]
        axes = parted_over(plan.mesh, rule, bucket.axes)
        whole = (
            whole_tensors(bucket, choice, _owners(plan.mesh, rule, axes, rank), bucket.index)
            if choice.any_whole
            else ()
        )
        place = plan.mesh.index(rank, axes) if axes else 0
        return Share(layout, rule, held, tuple(updates), apart, bucket.table, whole, place, axes)


def updates_of(held: FlatShard, layout: FlatBuffer, choice: OptimizerChoice) -> tuple[Updated, ...]:
    """Return what updates a range of a bucket: an optimizer for the spans of each kind."""
    spans: dict[int, list[Span]] = {}
    for group, start, stop in held.segments(layout):
        spans.setdefault(choice.kind(group // 2), []).append(Span(start, stop, group))
    return tuple(Updated(tuple(mine), None, part) for part, mine in spans.items())


def whole_tensors(
    bucket: Bucket, choice: OptimizerChoice, owners: Sequence[int], first: int = 0
) -> tuple[WholeTensor, ...]:
    """Return the parameters of a bucket that are updated as whole tensors, the largest first, each by the one of
    ``owners`` that has the least to do so far; buckets begin with the ``first`` of these in turn."""
    groups = {p.name: choice.group_of(p.name, p.shape) for p in bucket.parameters}
    wanted = [p for p in bucket.parameters if p.numel and choice.parts[groups[p.name] // 2].whole]
    turn = [owners[(first + i) % len(owners)] for i in range(len(owners))]
    loads = dict.fromkeys(turn, 0)
    found = []
    for parameter in sorted(wanted, key=lambda p: -p.numel):
        owner = min(turn, key=loads.__getitem__)
        loads[owner] += parameter.numel
        group = groups[parameter.name]
        found.append(WholeTensor(parameter.name, tuple(parameter.shape), group, choice.kind(group // 2), owner))
    return tuple(found)


def _owners(mesh: Mesh, rule: ParameterRule, axes: tuple[str, ...], rank: int) -> list[int]:
    """Return the numbers of the ranks over ``axes`` that have state: of parameter servers only these."""
    ranks = mesh.group(rank, axes) if axes else (rank,)
    serves = rule.state == "O" and SHARDS in axes
    return [i for i, one in enumerate(ranks) if not serves or mesh.index(one, SHARDS) < rule.servers]


def entry_ranges(layout: FlatBuffer, start: int, stop: int) -> Iterator[tuple[FlatEntry, int, int]]:
    """Yield (entry, start, stop) for each parameter in a range of a bucket; both are in elements of the bucket."""
    for entry in layout.entries:
        first, last = max(start, entry.offset), min(stop, entry.stop)
        if first < last:
            yield entry, first, last
