"""A walk over the captured graph may decide on parameters where they are first used: until then they and their views
are *open*."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from shardwise.shard.assignment import Assignment
from shardwise.shard.batch_walk import BatchWalk
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy

OPEN = "?"
"""The state of a parameter that nothing has used yet, and of its views."""


class OpenParameters(BatchWalk):
    """This walk may leave parameters open, with their views."""

    def __init__(self, context: ShardingContext) -> None:
        super().__init__(context)
        self.views: dict[fx.Node, list[fx.Node]] = {}  # the views of each open parameter, in order
        self.origin: dict[fx.Node, fx.Node] = {}  # the parameter of each open node

    def run(self) -> Assignment:
        super().run()
        for node in list(self.views):
            self.settle(node, None)
        return self.found

    def visit(self, node: fx.Node) -> None:
        """Leave views of open parameters open; any other op that reads a view decides on its parameter."""
        form = self.forms.get(node)
        if form is not None and len(form.operands) == 1 and form.operands[0][0] in self.origin:
            self.found.states[node] = (OPEN,) * len(form.results)
            self.remember(node, form.operands[0][0])
            return
        if node in self.forms and form is None:
            for operand in filter(self.origin.__contains__, node.all_input_nodes):
                self.close(operand, None)
        super().visit(node)
        if node not in self.forms and node.args[0] in self.origin:
            self.remember(node, node.args[0])

    def leave_open(self, parameter: fx.Node) -> Placement:
        """Leave a parameter open, and return its state; what uses it first decides on it."""
        self.views[parameter], self.origin[parameter] = [], parameter
        return OPEN

    def remember(self, node: fx.Node, source: fx.Node) -> None:
        self.origin[node] = self.origin[source]
        self.views[self.origin[source]].append(node)

    def close(self, node: fx.Node, wanted: Placement | None) -> bool:
        """Decide on the parameter under ``node``, if it is open, so that ``node`` is as wanted; else make it whole.
        Return whether ``node`` is as wanted."""
        if node not in self.origin:
            return self.found.states[node][0] == wanted
        place = self.placed(node, wanted)
        self.settle(self.origin[node], place)
        return place is not None

    def placed(self, node: fx.Node, wanted: Placement | None) -> Shard | None:
        """Return where the open parameter under ``node`` is sharded if ``node`` is as wanted; None if it cannot be."""
        parameter = self.origin[node]
        places = self.candidates(parameter, node, wanted) if isinstance(wanted, Shard) else iter(())
        return next((one for one in places if self.under(parameter, one).get(node, (None,))[0] == wanted), None)

    def candidates(self, parameter: fx.Node, node: fx.Node, wanted: Shard) -> Iterator[Shard]:
        """Yield where a parameter might be sharded for a view of it to be sharded as wanted."""
        shape, size = self.context.shape(parameter), self.context.shape(node)[wanted.dim]
        for dim, whole in enumerate(shape):
            if not size or not whole:
                continue  # nothing to cut
            for pre in dict.fromkeys((wanted.pre, wanted.pre * whole // size if whole % size == 0 else wanted.pre)):
                if whole % (pre * wanted.post) == 0:
                    yield wanted._replace(dim=dim, pre=pre)

    def under(self, parameter: fx.Node, place: Shard | None) -> dict[fx.Node, tuple[Placement, ...]]:
        """Return the states of a parameter and its views if it is sharded at ``place`` (None means whole)."""
        found: dict[fx.Node, tuple[Placement, ...]] = {parameter: ("I" if place is None else place,)}
        for node in self.views[parameter]:
            form = self.forms.get(node)
            if form is None:
                found[node] = (found[node.args[0]][node.args[1]],)
                continue
            strategy = self.of_view(form, found[form.operands[0][0]][0])
            found[node] = strategy.results
        return found

    @staticmethod
    def of_view(form: OpSharding, state: Placement) -> Strategy:
        found = form.shards(0, state) if isinstance(state, Shard) else None
        return form.whole("I") if found is None else found

    def settle(self, parameter: fx.Node, place: Shard | None) -> None:
        self.found.states |= (states := self.under(parameter, place))
        for node in self.views.pop(parameter):
            form = self.forms.get(node)
            if form is not None:
                self.found.strategies[node] = self.of_view(form, states[form.operands[0][0]][0])
        for node in states:
            del self.origin[node]
