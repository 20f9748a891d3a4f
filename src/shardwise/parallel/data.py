"""Data parallelism: every rank of axis ``dp`` holds the model and works on its share of each microbatch's rows.

What is done with the gradients is a row of one table (R replicated, P partial sum, S flat shard over ``dp``):

    =================  ====  ====  =====
    kind               rest  grad  state
    =================  ====  ====  =====
    DDP                R     P     R
    =================  ====  ====  =====

The collective is not placed by hand: it is the transition from the gradient's layout between microbatches to the layout that the
optimizer's state asks for; from P to R that is an all-reduce.
"""

from __future__ import annotations

from shardwise.core.layout import Factor, Layout
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.plan import ParameterRule, Plan
from shardwise.core.transition import Collective, transition

AXIS = "dp"


def data_parallel(plan: Plan, size: int) -> Plan:
    """``plan`` with axis ``dp`` of ``size`` ranks and every parameter under the DDP row of the table."""
    others = tuple(axis for axis in plan.mesh.axes if axis.name != AXIS)
    return plan.replace(mesh=Mesh((Axis(AXIS, size), *others)), parameters=(ParameterRule("*"),))


def batch_axes(plan: Plan) -> tuple[str, ...]:
    """The axes over which the rows of a microbatch are sharded."""
    return (AXIS,)


def gradient_layouts(rule: ParameterRule, numel: int, axes: tuple[str, ...]) -> tuple[Layout, Layout]:
    """A flat gradient buffer between microbatches, and as the optimizer takes it."""
    placed = {
        "R": Layout.replicated((numel,)),
        "P": Layout(((Factor(numel),),), frozenset(axes)),
        "S": Layout.sharded((numel,), {0: axes}),
    }
    return placed[rule.grad], placed[rule.state]


def reductions(plan: Plan, name: str, numel: int) -> tuple[Collective, ...]:
    """What happens once a step to the gradient of the parameter called ``name``, after the last microbatch."""
    axes = tuple(a for a in batch_axes(plan) if plan.mesh.axis_size(a) > 1)
    return transition(*gradient_layouts(plan.rule(name), numel, axes))
