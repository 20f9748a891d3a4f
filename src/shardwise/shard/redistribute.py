"""A value of a local graph changes its state on groups of mesh axes by these moves; its gradient moves back as stated.

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

Any other change is two of these moves.  Groups that make the same move make it together.  :func:`path` says which
moves are due; the emitter makes them, and the solver prices them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import fx

from shardwise.graph.sizes import expression
from shardwise.ops import collectives
from shardwise.ops.env import ROWS
from shardwise.shard.local_graph import LocalGraph
from shardwise.shard.op_spec import Placement, Shard


def communicated(node: fx.Node) -> tuple[str, str]:
    """Return the collectives of a move's value and of its gradient; "" where there is none, or the node is no move."""
    return collectives.kinds(node.target, str(node.args[3]) if len(node.args) > 3 else "I")


CUTTING = ("gather", "shard", "shard_leaf", "scatter")
"""The moves of pieces; the others are of whole values."""
ORDER = ("shard_leaf", "shard", "scatter", "own", "all_reduce", "replicate", "gather", "partial")
"""The order of moves.  Slices come first and gathers late: what is gathered after slices is smaller, and so is the
gradient that is summed behind a gather."""

Placements = tuple[Placement, ...]
"""The states of a value, one on each group of axes."""


class Step(NamedTuple):
    """This is one move of a value in ``states``: ``name`` is a function of ``ops.collectives``, ``groups`` (by number)
    make it, and ``after`` is the state on these after it."""

    states: Placements
    name: str
    groups: tuple[int, ...]
    after: Placement

    @property
    def result(self) -> Placements:
        """Return the state on each group after the move."""
        return _with(self.states, self.groups, self.after)

    @property
    def sharded(self) -> Placements:
        """Return the states before or after a move of pieces, whichever are sharded."""
        return self.states if self.name == "gather" else self.result


class Movable(Protocol):
    """The moves of a value depend on this, beside its state on each group of axes."""

    @property
    def grad(self) -> bool:
        """Return whether it has a gradient; where it has none, I and R are the same."""
        ...

    @property
    def together(self) -> Collection[int]:
        """Return the groups on which a partial sum is summed whole before it is cut, so that microbatches can, too."""
        ...

    def fits(self, states: Placements) -> bool:
        """Return whether it can be in these states together."""
        ...

    def same_cut(self, states: Placements, after: Placements, dim: int) -> bool:
        """Return whether each rank has the same elements of a dim in both states."""
        ...


def path(value: Movable, states: Placements, goals: Placements) -> list[Step]:
    """Return the moves, in order, that bring ``value`` to the state in ``goals`` on each group of axes."""
    found: list[Step] = []
    _convert(value, states, goals, found)
    return found


def _convert(value: Movable, states: Placements, goals: Placements, found: list[Step]) -> Placements:
    while True:
        for i, goal in enumerate(goals):
            if _renames(value, states, i, goal):
                found.append(Step(states, "same", (i,), goal))
                states = found[-1].result
        steps = [
            _towards(s, g, value.grad, i in value.together) for i, (s, g) in enumerate(zip(states, goals, strict=True))
        ]
        due = sorted((ORDER.index(step[0]), i, step) for i, step in enumerate(steps) if step is not None)
        if not due:
            return states
        ways = [Step(states, step[0], _together(states, steps, i), step[1]) for _, i, step in due]
        best = ways[0] if len(ways) == 1 else next((way for way in ways if value.fits(way.result)), ways[0])
        states = _move(value, best, found)


def _renames(value: Movable, states: Placements, group: int, goal: Placement) -> bool:
    """Return whether a goal is the present cut in other words: over 2 ranks, 2 × 3 elements are cut like 6."""
    own = states[group]
    if not isinstance(own, Shard) or not isinstance(goal, Shard) or own == goal or own.dim != goal.dim:
        return False
    return value.same_cut(states, _with(states, (group,), goal), goal.dim)


def _together(states: Placements, steps: Sequence[tuple[str, Placement] | None], group: int) -> tuple[int, ...]:
    """Return the groups that make a step together with ``group``; those of a gather are sharded in the same way."""
    step = steps[group]
    gathers = step is not None and step[0] == "gather"
    return tuple(j for j, one in enumerate(steps) if one == step and (not gathers or states[j] == states[group]))


def _move(value: Movable, step: Step, found: list[Step]) -> Placements:
    minor = _minors(step.sharded, step.groups) if step.name in CUTTING else ()
    if minor:  # what is sharded within these shards is gathered first
        joined = _convert(value, step.states, _with(step.states, minor, "I"), found)
        after = _move(value, step._replace(states=joined), found)
        inner = tuple(step.states[i] if i in minor else s for i, s in enumerate(after))
        return _convert(value, after, inner, found)
    found.append(step)
    return step.result


def _minors(states: Placements, groups: Sequence[int]) -> tuple[int, ...]:
    """Return the groups that shard the same factor as ``groups`` within their shards."""
    own = states[groups[0]]
    assert isinstance(own, Shard)
    later = ((i, s) for i, s in enumerate(states) if i > groups[0] and i not in groups)
    return tuple(i for i, s in later if isinstance(s, Shard) and (s.dim, s.pre) == (own.dim, own.pre))


def _with(states: Placements, groups: Sequence[int], after: Placement) -> Placements:
    return tuple(after if i in groups else s for i, s in enumerate(states))


def _towards(state: Placement, goal: Placement, grad: bool, together: bool) -> tuple[str, Placement] | None:
    """Return the first move from a state towards another, if any is due: its name, and the state after it."""
    if state == goal or (not grad and {state, goal} == {"I", "R"}):
        return None
    if isinstance(state, Shard):
        return "gather", "R" if goal == "R" else "I"
    if isinstance(goal, Shard) and not (together and state == "P"):
        return {"P": "scatter", "I": "shard", "R": "shard_leaf"}[state], goal
    match state, goal:
        case "P", _:
            return "all_reduce", "R" if isinstance(goal, Shard) else goal
        case "R", _:
            return "own", "I"
        case _, "P":
            return "partial", "P"
    return "replicate", "R"


def dual(step: Step) -> str:
    """Return whether the whole result of a move is "I" or "R"; only moves to whole values have both."""
    return str(step.after) if step.name in ("all_reduce", "gather") else "I"


@dataclass(frozen=True)
class _Node:
    """This is a value of a local graph, as a :class:`Movable`."""

    local: LocalGraph
    node: fx.Node
    groups: tuple[str, ...]

    @property
    def grad(self) -> bool:
        return bool(self.node.meta["grad"])

    @property
    def together(self) -> Collection[int]:
        return {i for i, group in enumerate(self.groups) if self.local.context.over_batch and group == ROWS}

    def named(self, states: Placements) -> dict[str, Placement]:
        return dict(zip(self.groups, states, strict=True))

    def fits(self, states: Placements) -> bool:
        return self.local.context.fits(self.node.meta["layout"].shape, self.named(states))

    def same_cut(self, states: Placements, after: Placements, dim: int) -> bool:
        fixed = isinstance(expression(self.node.meta["val"].shape[dim]), int)
        context, shape = self.local.context, self.node.meta["layout"].shape
        return fixed and context.same_cut(shape, self.named(states), self.named(after), dim)


@dataclass
class Redistribution:
    """This converts the values of one local graph; a value makes each move once, whoever needs it."""

    local: LocalGraph
    done: dict[tuple[fx.Node, str, tuple[int, ...], Placement], fx.Node] = field(default_factory=dict)

    def convert(self, value: fx.Node, goals: Mapping[str, Placement]) -> fx.Node:
        """Return ``value`` in the state ``goals[group]`` on each group; without a gradient, I and R are the same."""
        states = value.meta["states"]
        groups = tuple(states)
        subject = _Node(self.local, value, groups)
        for step in path(subject, tuple(states.values()), tuple(goals.get(g, s) for g, s in states.items())):
            key = (value, *step[1:])
            if key not in self.done:
                self.done[key] = self._made(value, step, groups)
            value = self.done[key]
        return value

    def _made(self, value: fx.Node, step: Step, groups: tuple[str, ...]) -> fx.Node:
        local, moved = self.local, tuple(groups[i] for i in step.groups)
        sharded, states = (dict(zip(groups, s, strict=True)) for s in (step.sharded, step.result))
        where = local.cut(value, sharded, moved) if step.name in CUTTING else moved
        rest = (step.after,) if step.name in ("all_reduce", "gather") else ()
        new = local.graph.call_function(getattr(collectives, step.name), (local.env, value, where, *rest))
        return local.annotate_move(new, value, states)


__all__ = ["CUTTING", "Movable", "Placements", "Redistribution", "Step", "communicated", "dual", "path"]
