"""What a solver decided for one capture of a model is taken up by another.

An op is known by its target, by the path of its module, and by its number among those of that name.  Casts are left
out, because each precision has its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from shardwise.core.errors import ShardwiseError
from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.naming import module_path
from shardwise.shard.assignment import Assignment, Decisions, Name
from shardwise.shard.context import ShardingContext
from shardwise.shard.solver.candidates import AxisOptions, following_parameters


def decisions_of(context: ShardingContext, found: Mapping[str, Assignment]) -> Decisions:
    """Return what assignments say of all that there was to choose."""
    ops = {
        name: tuple({axis: one.strategies[node] for axis, one in found.items()} for node in nodes)
        for name, nodes in _named(context).items()
    }
    parameters = {node.name: {axis: one.states[node][0] for axis, one in found.items()} for node in context.parameters}
    return Decisions(ops, parameters, context.rows)


def take_up(
    decided: Decisions, context: ShardingContext, choices: Mapping[str, AxisOptions]
) -> dict[str, AxisOptions]:  # fmt: skip
    """Return ``choices`` as decided; casts, and ops of this capture alone, which are noted, are left free."""
    here, out = _named(context), dict[str, AxisOptions]()
    known = {name: nodes for name, nodes in here.items() if len(nodes) == len(decided.ops.get(name, ()))}
    if other := sorted(name for name in {**here, **decided.ops} if name not in known):
        what = ", ".join(f"{op} in {path or 'the model'}" for op, path in other[:3]) + (", ..." if other[3:] else "")
        context.notes[
            f"tensor_plan: {context.captured.precision} has other ops than the precision that trains: {what}; how "
            "these are shared out is chosen anew"
        ] = None
    for axis, one in choices.items():
        strategies, states = dict(one.strategies), dict(one.states)
        for name, nodes in known.items():
            for node, wanted in zip(nodes, decided.ops[name], strict=True):
                strategies[node] = (decided.translated(wanted[axis], context.rows),)
        for node in states:
            if node.name in decided.parameters:
                states[node] = (decided.parameters[node.name][axis],)
        out[axis] = AxisOptions(one.rows, strategies, states)
    return out


def check_taken(decided: Decisions, context: ShardingContext, found: Mapping[str, Assignment]) -> None:
    """Raise :class:`ShardwiseError` where what was taken up is not what was decided."""
    taken = decisions_of(context, found)
    for name, own in taken.ops.items():
        wanted = decided.ops.get(name, ())
        if len(wanted) == len(own) and own != tuple(
            {a: decided.translated(s, context.rows) for a, s in w.items()} for w in wanted
        ):
            raise ShardwiseError(f"{name[0]} in {name[1]} was decided as {wanted}, and is taken up as {own}")
    for parameter, states in taken.parameters.items():
        if decided.parameters.get(parameter, states) != states:
            raise ShardwiseError(
                f"{parameter} was decided as {decided.parameters[parameter]}, and is taken up as {states}"
            )


def _named(context: ShardingContext) -> dict[Name, list[fx.Node]]:
    """Return the ops that a solver chooses for, by name."""
    mine, found = following_parameters(context), dict[Name, list[fx.Node]]()
    for node, form in context.forms.items():
        if form is not None and node in mine and not has(node, Fact.CASTS):
            found.setdefault((str(node.target), module_path(node)), []).append(node)
    return found
