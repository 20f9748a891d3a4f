"""What traces and programs exchange over the axes of the batch, and whether ranks with different ones can be in a
step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from shardwise.core.instruction import Lane
from shardwise.core.mesh import Axes, Mesh
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.measure.unit_traffic import communicating_axes
from shardwise.parallel.data import batch_axes
from shardwise.units.share import place_of
from shardwise.units.trace import Trace


def inside(mesh: Mesh, traces: Iterable[Trace], sums: bool = True) -> list[tuple[Axes, str]]:
    """Return the axes and lane of the collectives inside units, and with ``sums`` those that make sums over the
    batch."""
    found = dict[tuple[Axes, str], None]()
    for one in traces:
        env = place_of(one, mesh, mesh.size - 1, one.rows or 0)  # the last rank's parts are largest
        stages = one.sums.stages if sums and one.sums is not None else ()
        graphs: list[fx.Graph | None] = [*(unit.graph for unit in one.units), *(stage.graph for stage in stages)]
        for graph in graphs:
            axes = communicating_axes(graph, env) if graph is not None else ()
            found |= dict.fromkeys((each, str(Lane.COMPUTE)) for each in axes)
    return list(found)


def parted(plan: Plan) -> set[str]:
    """Return the axes of the batch over which ranks have different rows."""
    return {axis for axis in batch_axes(plan.mesh) if plan.mesh.axis_size(axis) > 1}


def over_batch(plan: Plan, programs: Sequence[Program]) -> list[list[tuple[Any, ...]]]:
    """Return what programs exchange over the axes of the batch, in order."""
    axes = parted(plan)
    return [
        [(i.op, i.bucket, i.axes, i.lane, i.scatters) for i in program.instructions if axes & set(i.axes)]
        for program in programs
    ]


def adds_rows_alike(plan: Plan, traces: Sequence[Trace]) -> bool:
    """Whether ranks in a step may run any of these traces, which are of rows of several shapes: each adds to the loss
    what its rows are, divided by what is the same for all, and ranks know no more of each other's rows than numbers of
    targets and other sums without dims."""
    by_targets = all(one.sums is not None and one.sums.weight is not None for one in traces)
    alike = traces[0].row_sums is not None and all(one.row_sums == traces[0].row_sums for one in traces)
    stages = [stage for one in traces if one.sums is not None for stage in one.sums.stages]
    if not (by_targets or alike) or any(part.value.dim() for stage in stages for part in stage.parts):
        return False
    axes = parted(plan)
    return not any(axes.intersection(own) for own, _ in inside(plan.mesh, traces, sums=False))
