"""Data parallelism and ZeRO: every rank of the batch axes works on its share of each microbatch's rows.

A row of one table says who holds what (R replicated, P partial sum, S flat shard over ``dp``, O a range on each of the
ranks that own it, the servers of ``parallel/server.py``):

    =================  ====  ====  =====
    kind               rest  grad  state
    =================  ====  ====  =====
    DDP                R     P     R
    ZeRO-1             R     P     S
    ZeRO-2             R     S     S
    ZeRO-3             S     S     S
    parameter server   R     P     O
    =================  ====  ====  =====

(Rajbhandari et al., arXiv 1910.02054, section 5.)  No collective is placed by hand: each follows from the table.
A gradient leaves backward as a partial sum (P) over the batch axes; ``grad`` is what it is between microbatches and
``state`` what the optimizer takes: P → S is a reduce-scatter, P → R an all-reduce, P → O a push.  Parameters go from
``state`` (after a step) or ``rest`` to replicated.

Under hybrid sharding there is a second batch axis, ``dp_replicate``: shards are over ``dp`` alone, and what is sharded
between microbatches stays a partial sum over ``dp_replicate`` until the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwise.core.data_options import DATA_PARALLEL_ROWS, ParameterRule
from shardwise.core.errors import ConfigError, check_value, divisors
from shardwise.core.flat import FlatBuffer, FlatShard
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.pipeline import PIPELINE

SHARDS, REPLICAS = "dp", "dp_replicate"

ZERO = tuple(ParameterRule("*", *row) for row in DATA_PARALLEL_ROWS if row[2] != "O")
"""These are the rules of the stages of ZeRO; stage 0 is DDP."""


def data_parallel(plan: Plan, size: int, zero: int = 0, replicas: int = 1) -> Plan:
    """Return ``plan`` over ``size`` ranks in ``replicas`` groups, each of which shards as stage ``zero`` of ZeRO does.

    The axes are inside a pipeline's and outside all others.  Raises :class:`ConfigError` for numbers that do not fit.
    """
    check_value("zero", zero, isinstance(zero, int) and 0 <= zero < len(ZERO), f"0 to {len(ZERO) - 1}")
    if not isinstance(replicas, int) or replicas < 1 or size % replicas:
        raise ConfigError(f"replicas: {replicas!r} of {size} ranks is not legal; legal: {divisors(size)}.")
    own = (*((Axis(REPLICAS, replicas),) if replicas > 1 else ()), Axis(SHARDS, size // replicas))
    outer = tuple(axis for axis in plan.mesh.axes if axis.name == PIPELINE)
    inner = tuple(axis for axis in plan.mesh.axes if axis.name not in (PIPELINE, SHARDS, REPLICAS))
    return plan.replace(mesh=Mesh((*outer, *own, *inner)), parameters=(ZERO[zero],))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which the rows of a microbatch are sharded, the first slowest."""
    return tuple(axis for axis in (REPLICAS, SHARDS) if axis == SHARDS or axis in mesh.names)


def shard_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which S is sharded, those of one rank left out."""
    return (SHARDS,) if mesh.axis_size(SHARDS) > 1 else ()


def placement(plan: Plan, name: str, table: bool = False) -> ParameterRule:
    """Return the rule of a parameter as it comes out on the plan's mesh: a shard of one part is the whole.

    A ``table`` whose gradient has the rows that were looked up rests whole, and its gradient is a partial sum until the
    last microbatch: of neither is much communicated."""
    rule = plan.data.rule(name)
    if shard_axes(plan.mesh) or plan.serving.apart:
        return replace(rule, rest="R", grad="P") if table else rule
    return replace(rule, rest="R", grad="P", state="R", servers=0)


def held_range(rule: ParameterRule, layout: FlatBuffer, parts: int, index: int, learns: bool = True) -> FlatShard:
    """Return the range of a bucket whose masters and optimizer state rank ``index`` of ``parts`` has.

    For a frozen bucket, which does not learn, it is the range that the rank holds at rest.
    """
    kind = rule.state if learns else rule.rest
    if kind == "O":
        return layout.served(rule.servers, index)
    return layout.shard(parts, index) if kind == "S" else FlatShard(0, layout.numel)


class Reduction(NamedTuple):
    """This is a collective that sums a flat gradient over ``axes``; if it ``scatters``, each rank gets its shard, and
    if it ``serves``, the servers get their ranges."""

    axes: tuple[str, ...]
    scatters: bool
    serves: bool = False


def reductions(
    mesh: Mesh, rule: ParameterRule, summed: Sequence[str] = ()
) -> tuple[tuple[Reduction, ...], tuple[Reduction, ...]]:
    """Return the reductions of a flat gradient after the backward of each microbatch, and those once per step.

    The latter follow the last microbatch.  Over the axes ``summed`` the gradient is a partial sum, too, until then.
    """
    shards = shard_axes(mesh)
    rest = [a for a in (*batch_axes(mesh), *summed) if mesh.axis_size(a) > 1 and a not in shards]
    serves = rule.state == "O"
    elsewhere = serves and not rule.servers
    scatter = (Reduction(shards, not serves, serves),) if (shards or elsewhere) and rule.state != "R" else ()
    over = tuple(sorted(rest if scatter else (*rest, *shards)))
    whole = (Reduction(over, False),) if over else ()
    return (scatter, whole) if rule.grad == "S" else ((), (*scatter, *whole))
