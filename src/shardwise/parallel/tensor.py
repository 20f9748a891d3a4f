"""Tensor parallelism: mesh axes over which parameters themselves are sharded.

Every rank of such axes has the same rows of a batch.  What each has of a parameter is the parameter's ``Layout``, which follows from the
trace; data parallelism and ZeRO work on these local pieces as on whole parameters.
"""

from __future__ import annotations

from shardwise.core.errors import check_choice, check_count
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.plan import Plan, Tensor
from shardwise.parallel.data import REPLICAS, SHARDS
from shardwise.parallel.pipeline import PIPELINE

TENSOR = "tp"
"""The axis of recipes that have one."""

OVER_ONE: tuple[Tensor, ...] = ("1d", "1d-sp")
"""Those recipes."""

OTHERS = (PIPELINE, REPLICAS, SHARDS)
"""The axes of a mesh that shard no parameter by its dims."""


def tensor_parallel(plan: Plan, size: int, kind: Tensor = "1d") -> Plan:
    """``plan`` with parameters sharded over ``size`` ranks by the recipe ``kind``.

    The axis is the innermost: ranks that share the products of a layer are neighbours, for they wait for each other most often.
    """
    check_count(TENSOR, size)
    check_choice("tensor", kind, OVER_ONE)
    others = tuple(axis for axis in plan.mesh.axes if axis.name != TENSOR)
    return plan.replace(mesh=Mesh((*others, *((Axis(TENSOR, size),) if size > 1 else ()))), tensor=kind)


def tensor_axes(plan: Plan) -> tuple[str, ...]:
    """The tensor-parallel axes of the plan's mesh, in its order, those of one rank left out."""
    return tuple(axis.name for axis in plan.mesh.axes if axis.name not in OTHERS and axis.size > 1)
