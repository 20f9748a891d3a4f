"""What a solver decided for one capture of a model, as data that another capture takes up: that of another precision, in which a plan is proven.

An op goes by what it is, by the path of its module, and by its number among those of that name.  Casts are left out, for each precision has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from shardwise.core.errors import ShardwiseError
from shardwise.trace.assign import Assignment
from shardwise.trace.choices import Chosen, learned
from shardwise.trace.forms import Form, Place, State, Strategy
from shardwise.trace.naming import module_path
from shardwise.trace.normalise import CASTS

if TYPE_CHECKING:
    from shardwise.trace.sharding import Propagation

Name = tuple[str, str]
"""Of an op: what it is, and the path of its module."""


@dataclass(frozen=True)
class Decisions:
    """``ops``: by name the strategies, by axis, of all ops that have it, in the order of the graph; ``parameters``: the states of each, by axis, by the name of
    its placeholder.  ``rows`` is what places call the number of rows."""

    ops: Mapping[Name, tuple[Mapping[str, Strategy], ...]]
    parameters: Mapping[str, Mapping[str, State]]
    rows: Any = None

    @staticmethod
    def of(p: Propagation, forms: Mapping[fx.Node, Form | None], found: Mapping[str, Assignment]) -> Decisions:
        """What assignments say of all that there was to choose."""
        ops = {
            name: tuple({axis: one.strategies[node] for axis, one in found.items()} for node in nodes)
            for name, nodes in _named(p, forms).items()
        }
        parameters = {
            node.name: {axis: one.states[node][0] for axis, one in found.items()}
            for node in p.normal.graph.nodes
            if node.op == "placeholder" and node.name in p.captured.parameters
        }
        return Decisions(ops, parameters, p.rows)

    def leave(
        self, p: Propagation, forms: Mapping[fx.Node, Form | None], choices: Mapping[str, Chosen]
    ) -> dict[str, Chosen]:  # fmt: skip
        """``choices``, of which casts are left free, and what this capture alone has; that is noted."""
        here, out = _named(p, forms), dict[str, Chosen]()
        known = {name: nodes for name, nodes in here.items() if len(nodes) == len(self.ops.get(name, ()))}
        if other := sorted(name for name in {**here, **self.ops} if name not in known):
            what = ", ".join(f"{op} in {path or 'the model'}" for op, path in other[:3]) + (", ..." if other[3:] else "")
            p.sharded.notes[
                f"tensor_plan: {p.captured.precision} has other ops than the precision that trains: {what}; how these are shared out is chosen anew"
            ] = None
        for axis, one in choices.items():
            strategies, states = dict(one.strategies), dict(one.states)
            for name, nodes in known.items():
                for node, decided in zip(nodes, self.ops[name], strict=True):
                    strategies[node] = (self._translated(decided[axis], p),)
            for node in states:
                if node.name in self.parameters:
                    states[node] = (self.parameters[node.name][axis],)
            out[axis] = Chosen(one.rows, strategies, states)
        return out

    def check(self, p: Propagation, forms: Mapping[fx.Node, Form | None], found: Mapping[str, Assignment]) -> None:
        """:class:`ShardwiseError` where what was taken up is not what was decided."""
        taken = Decisions.of(p, forms, found)
        for name, own in taken.ops.items():
            wanted = self.ops.get(name, ())
            if len(wanted) == len(own) and own != tuple({a: self._translated(s, p) for a, s in w.items()} for w in wanted):
                raise ShardwiseError(f"{name[0]} in {name[1]} was decided as {wanted}, and is taken up as {own}")
        for parameter, states in taken.parameters.items():
            if self.parameters.get(parameter, states) != states:
                raise ShardwiseError(f"{parameter} was decided as {self.parameters[parameter]}, and is taken up as {states}")

    def _translated(self, strategy: Strategy, p: Propagation) -> Strategy:
        """With the rows of another capture."""

        def own(state: State) -> State:
            if not isinstance(state, Place) or isinstance(state.pre, int):
                return state
            return state._replace(pre=state.pre.subs(self.rows, p.rows))

        return Strategy(tuple(map(own, strategy.operands)), tuple(map(own, strategy.results)))


def _named(p: Propagation, forms: Mapping[fx.Node, Form | None]) -> dict[Name, list[fx.Node]]:
    """The ops that a solver chooses for."""
    mine, found = learned(p), dict[Name, list[fx.Node]]()
    for node, form in forms.items():
        if form is not None and node in mine and node.target not in CASTS:
            found.setdefault((str(node.target), module_path(node)), []).append(node)
    return found


__all__ = ["Decisions"]
