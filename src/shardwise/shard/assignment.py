"""What is chosen: tensor parallelism as the plan asks for it, the strategy of each op on a group of axes, and what a
solver decided, as data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardwise.core.layout import Layout
from shardwise.core.mesh import axis_of
from shardwise.core.rates import Machine
from shardwise.shard.op_spec import Placement, Shard, Strategy

Name = tuple[str, str]
"""The name of an op: what it is, and the path of its module."""


@dataclass(frozen=True)
class Decisions:
    """What a solver decided for one capture of a model, for use by another: that of another precision, in which a plan
    is proven.

    ``ops``: by name the strategies, by axis, of all ops that have it, in the order of the graph; ``parameters``: the
    states of each, by axis, by the name of its placeholder.  ``rows`` is what places call the number of rows.
    """

    ops: Mapping[Name, tuple[Mapping[str, Strategy], ...]]
    parameters: Mapping[str, Mapping[str, Placement]]
    rows: Any = None

    def translated(self, strategy: Strategy, rows: Any) -> Strategy:
        """A strategy with what another capture calls the number of rows."""

        def own(state: Placement) -> Placement:
            if not isinstance(state, Shard) or isinstance(state.pre, int):
                return state
            return state._replace(pre=state.pre.subs(self.rows, rows))

        return Strategy(tuple(map(own, strategy.operands)), tuple(map(own, strategy.results)))


@dataclass(frozen=True)
class TensorParallelSpec:
    """Tensor parallelism over ``axes``, each with its number of ranks, by ``recipe``, or by another ``plan`` on its
    axes and ``pins``.

    ``layouts`` are those of parameters, where they have been chosen before (None: whole), and ``summed`` the axes over
    which their gradients are partial sums.  Plan "auto" is that which is fastest on ``machine``, or what was
    ``decided`` for another capture.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    recipe: str = "1d"
    layouts: Mapping[str, Layout | None] | None = None
    plan: str = "recipe"
    pins: Sequence[tuple[str, str]] = ()
    machine: Machine | None = None
    summed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decided: Decisions | None = None


@dataclass
class Assignment:
    """The assignment of one group of axes: the states of each node's results, and the strategy of each op that has a
    form; ``held``: what the result of an op is moved to where it is made, because a user says so."""

    states: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    held: dict[fx.Node, Placement] = field(default_factory=dict)


def place_of(layout: Layout | None, axis: str, parts: Mapping[str, int]) -> Placement:
    """Where ``axis`` shards a tensor of this layout (None: whole); "I" where it does not."""
    for dim, factors in enumerate(layout.dims if layout is not None else ()):
        whole, pre = math.prod(f.size for f in factors), 1
        for factor in factors:
            if axis in factor.axes:
                alone = len({axis_of(a) for a in factor.axes}) == len(factor.axes)  # no sub-axes, which cut alike
                equal = alone and factor.size == math.prod(parts[a] for a in factor.axes)
                return Shard(dim, pre, whole // (pre * (parts[axis] if equal else factor.size)), factor.parts)
            pre *= factor.size
    return "I"
