"""Parameters are gathered some units ahead, so that all-gathers hide behind computing; this is how many."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.core.plan import Plan
from shardwise.core.rates import Rates
from shardwise.measure.unit_cost import UnitCost
from shardwise.parallel.data import placement, shard_axes
from shardwise.units.trace import Trace

MOST = 8  # units ahead at most: each takes a slot for its parameters
GAIN = 0.01  # the fraction of the forward's seconds that more units ahead have to save


def depth(trace: Trace, plan: Plan, costs: Sequence[UnitCost], rates: Rates) -> int:
    """Return the least number of units ahead, up to :data:`MOST`, that is within :data:`GAIN` of the fastest forward.

    ``costs`` are those of the units of ``trace`` for a rank's rows of a microbatch.  Backward takes about twice as long
    to compute and gathers as much, so forward decides.
    """
    axes = shard_axes(plan.mesh)
    parts = plan.mesh.axis_size(axes)
    first = {
        b.index: min(b.units)
        for b in trace.buckets
        if b.units and placement(plan, b.parameters[0].name, b.table).state != "R"
    }
    gathers = [0.0] * len(costs)
    for bucket in trace.buckets:
        if bucket.index in first:
            gathers[first[bucket.index]] += rates.collective(
                "all_gather", bucket.nbytes / plan.mesh.axis_size(bucket.axes), axes, parts
            )
    computes = [rates.computing(one.forward_flops, one.forward_bytes) for one in costs]
    best = forward_seconds(computes, gathers, MOST)
    return next(d for d in range(1, MOST + 1) if forward_seconds(computes, gathers, d) <= best * (1 + GAIN))


def forward_seconds(computes: Sequence[float], gathers: Sequence[float], ahead: int) -> float:
    """Return the seconds of units computed one after the other, each after its gather; a gather begins after the one
    before it, and not before the unit ``ahead`` places earlier begins."""
    begins: list[float] = []
    link = free = 0.0
    for unit, (compute, gather) in enumerate(zip(computes, gathers, strict=True)):
        if gather:
            link = max(link, begins[unit - ahead] if unit >= ahead else 0.0) + gather
        begins.append(max(free, link if gather else 0.0))
        free = begins[-1] + compute
    return free
