"""What a trace of a model depends on in a plan."""

from __future__ import annotations

from typing import Any

from shardwise.core.plan import Plan
from shardwise.core.tensor_options import parameter_axes, tensor_axes
from shardwise.parallel.data import REPLICAS, SHARDS
from shardwise.parallel.tensor import axes_across


def solves(plan: Plan) -> bool:
    """Whether a solver decides how ops and parameters are sharded."""
    return plan.tensor.plan == "auto" and bool(parameter_axes(plan.mesh))


def traced_for(plan: Plan, per_host: int | None = None) -> tuple[Any, ...]:
    """Return all of a plan that a trace depends on, for comparison with another plan. Rules for parameters are among
    it, for parameters with different rules do not share a bucket.
    """
    mesh, rules = plan.mesh, plan.data.parameters
    solved: tuple[Any, ...] = ()
    if plan.tensor.plan == "auto":
        across = axes_across(mesh, per_host or mesh.size)
        solved = (plan.microbatches, mesh.axis_size((SHARDS, REPLICAS)), across)
    sizes = tuple((axis, mesh.axis_size(axis)) for axis in tensor_axes(mesh))
    exchanges = plan.exchanges_microbatches
    return plan.numeric, plan.tensor, solved, sizes, exchanges, plan.data.tables, rules if len(rules) > 1 else ()
