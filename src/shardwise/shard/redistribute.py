"""Changing what a value of a local graph is on groups of mesh axes: which collective, and what it is for the gradient.

=====  ====================================  ====================
 from   to                                    gradient
=====  ====================================  ====================
 P      I, R: ``all_reduce``                  same, ``all_reduce``
 P      V: ``scatter``                        gathered
 V      I, R: ``gather``                      slice, scattered
 I      V: ``shard``, a slice                 gathered
 I      P: ``partial``, zero but on one rank  same
 I      R: ``replicate``, nothing             summed
 R      V: ``shard_leaf``, a slice            zero elsewhere
 R      I: ``own``, nothing                   of one rank
=====  ====================================  ====================

All others are two of these.  Groups that make the same move make it together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardwise.ops import collectives
from shardwise.shard.local_graph import LocalGraph
from shardwise.shard.op_spec import Placement, Shard


def communicated(node: fx.Node) -> tuple[str, str]:
    """The collective of a move's value and that of its gradient; "" where there is none, or where the node is no move."""
    with_dual = node.target in (collectives.all_reduce, collectives.gather) and len(node.args) > 3
    return collectives.COLLECTIVES.get((node.target, str(node.args[3]) if with_dual else "I"), ("", ""))


Step = tuple[str, Placement, tuple[Any, ...]]
"""The name of a function of ops, the state after it, and its last arguments."""


@dataclass
class Redistribution:
    """Conversions of one local graph; a value makes each move once, whoever needs it."""

    local: LocalGraph
    done: dict[tuple[fx.Node, str, tuple[str, ...], Placement, tuple[Any, ...]], fx.Node] = field(default_factory=dict)

    def convert(self, value: fx.Node, goals: Mapping[str, Placement]) -> fx.Node:
        """``value`` with the state ``goals[group]`` on each group; where it has no gradient I and R are the same."""
        while True:
            value = self.renamed(value, goals)
            states, grad = value.meta["states"], value.meta["grad"]
            steps = {g: step for g in goals if (step := step_towards(states[g], goals[g], grad)) is not None}
            if not steps:
                return value
            # Slices first, and gathers last: what is gathered after slices is smaller, and so is the gradient that is summed behind a gather.
            order = sorted(steps.items(), key=lambda one: ORDER.index(one[1][0]))
            ways = [(self._together(states, steps, *one), one[1]) for one in order]
            shape = value.meta["layout"].shape
            groups, first = next(
                (w for w in ways if self.local.context.fits(shape, {**states, **dict.fromkeys(w[0], w[1][1])})), ways[0]
            )
            value = self._move(value, groups, *first)

    @staticmethod
    def _together(states: Mapping[str, Placement], steps: Mapping[str, Step], group: str, step: Step) -> tuple[str, ...]:
        """The groups that make a step together with ``group``: those of a gather are sharded alike."""
        return tuple(g for g, one in steps.items() if one == step and (step[0] != "gather" or states[g] == states[group]))

    def renamed(self, value: fx.Node, goals: Mapping[str, Placement]) -> fx.Node:
        """``value`` with the places that are wanted, where these are other words for the cuts that it has: 2 heads of 3 are 6 thirds."""
        states = value.meta["states"]
        for group, goal in goals.items():
            state = states[group]
            if isinstance(goal, Shard) and isinstance(state, Shard) and goal != state and goal.dim == state.dim:
                after = {**states, group: goal}
                if self.local.context.same_cut(value, after, goal.dim):
                    value = self._move(value, (group,), "same", goal, ())
                    states = value.meta["states"]
        return value

    def _move(self, value: fx.Node, groups: tuple[str, ...], name: str, after: Placement, rest: tuple[Any, ...]) -> fx.Node:
        key = (value, name, groups, after, rest)
        if key not in self.done:
            self.done[key] = self._made(value, groups, name, after, rest)
        return self.done[key]

    def _made(self, value: fx.Node, groups: tuple[str, ...], name: str, after: Placement, rest: tuple[Any, ...]) -> fx.Node:
        local, before = self.local, value.meta["states"]
        states = {**before, **dict.fromkeys(groups, after)}
        where: tuple[Any, ...] = (groups,)
        if name in CUTTING:
            sharded = before if name == "gather" else states
            minor = local.context.minors(value, sharded, groups)
            if minor:  # what is sharded within these shards is put together first
                inner = {g: before[g] for g in minor}
                joined = self.convert(value, {**before, **dict.fromkeys(minor, "I")})
                return self.convert(self._move(joined, groups, name, after, rest), inner)
            where = (local.cut(value, sharded, groups),)
        new = local.graph.call_function(getattr(collectives, name), (local.env, value, *where, *rest))
        return local.annotate_move(new, value, states)


CUTTING = ("gather", "shard", "shard_leaf", "scatter")
ORDER = ("shard_leaf", "shard", "scatter", "own", "all_reduce", "replicate", "gather", "partial")


def step_towards(state: Placement, goal: Placement, grad: bool) -> Step | None:
    """The first move from a state towards another, if any is due."""
    if state == goal or (not grad and {state, goal} == {"I", "R"}):
        return None
    if isinstance(state, Shard):
        dual = "R" if goal == "R" else "I"
        return "gather", dual, (dual,)
    if isinstance(goal, Shard):
        return {"P": "scatter", "I": "shard", "R": "shard_leaf"}[state], goal, ()
    match state, goal:
        case "P", _:
            return "all_reduce", goal, (goal,)
        case "R", _:
            return "own", "I", ()
        case _, "P":
            return "partial", "P", ()
    return "replicate", "R", ()


__all__ = ["CUTTING", "ORDER", "Redistribution", "communicated", "step_towards"]
