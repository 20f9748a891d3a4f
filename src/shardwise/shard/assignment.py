"""This module holds choices as data: the tensor parallelism that a plan asks for, the strategy of each op on a group of
mesh axes, and what a solver decided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardwise.core.layout import Layout
from shardwise.core.mesh import axis_of
from shardwise.core.rates import SolverObjective
from shardwise.shard.op_spec import Placement, Shard, Strategy

Name = tuple[str, str]
"""The name of an op: its target, and the path of its module."""


@dataclass(frozen=True)
class Decisions:
    """This holds what a solver decided for one capture of a model, so that a capture in another precision, in which a
    plan is verified, can use it too.

    ``ops`` maps a name to the strategies, by axis, of all ops of that name in the order of the graph.  ``parameters``
    maps the name of a placeholder to its states by axis.  ``rows`` is what places call the number of rows.
    """

    ops: Mapping[Name, tuple[Mapping[str, Strategy], ...]]
    parameters: Mapping[str, Mapping[str, Placement]]
    rows: Any = None

    def translated(self, strategy: Strategy, rows: Any) -> Strategy:
        """Return ``strategy`` with ``rows``, which is what another capture calls the number of rows."""

        def own(state: Placement) -> Placement:
            if not isinstance(state, Shard) or isinstance(state.pre, int):
                return state
            return state._replace(pre=state.pre.subs(self.rows, rows))

        return Strategy(tuple(map(own, strategy.operands)), tuple(map(own, strategy.results)))


@dataclass(frozen=True)
class TensorParallelSpec:
    """This asks for tensor parallelism over ``axes``, each with its number of ranks, by ``recipe``, or by another
    ``plan`` on the same axes with ``pins``.

    ``layouts`` are those of parameters where they have been chosen before (None means whole), and ``summed`` are the
    axes over which their gradients are partial sums.  Plan "auto" is the one that is predicted to be fastest on
    ``machine``, or the one that was ``decided`` for another capture.  ``context`` says how attention joins the parts of
    a sequence (``parallel/context.py``), and ``experts`` how ranks with the same tokens share a layer of experts.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    recipe: str = "1d"
    layouts: Mapping[str, Layout | None] | None = None
    plan: str = "recipe"
    pins: Sequence[tuple[str, str]] = ()
    machine: SolverObjective | None = None
    summed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decided: Decisions | None = None
    context: str = "gathered"
    experts: str = "inside"


@dataclass
class Assignment:
    """This is the assignment of one group of axes: the states of each node's results, and the strategy of each op that
    has a form.  ``held`` has the states to which results of ops are moved where they are made, because a user pins
    them."""

    states: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    held: dict[fx.Node, Placement] = field(default_factory=dict)


def place_of(layout: Layout | None, axis: str, parts: Mapping[str, int]) -> Placement:
    """Return where ``axis`` shards a tensor of this layout (None means whole), or "I" where it does not."""
    for dim, factors in enumerate(layout.dims if layout is not None else ()):
        whole, pre = math.prod(f.size for f in factors), 1
        for factor in factors:
            if axis in factor.axes:
                alone = len({axis_of(a) for a in factor.axes}) == len(factor.axes)  # two sub-axes of one axis cut alike
                sizes = [parts.get(a, 0) for a in factor.axes]  # 0: an axis of which the walk knows nothing
                equal = alone and factor.size == math.prod(sizes)
                return Shard(dim, pre, whole // (pre * (parts[axis] if equal else factor.size)), factor.parts)
            pre *= factor.size
    return "I"
