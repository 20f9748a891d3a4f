"""What the ops of a model are on an axis of tensor parallelism, by a recipe: which parameters are sharded, and where ranks communicate.

``1d`` (Shoeybi et al., arXiv 1909.08053, section 3): a product whose input is whole has its weight split by columns, and one whose
input is sharded along what it sums over, by rows; a table is split by rows where indices come from the batch, and a cross-entropy takes
scores that are split by classes.  For a transformer layer with b·s·h activations that is 8·b·s·h·(t-1)/t elements a rank and microbatch,
forward and backward, over t ranks.  ``1d-sp`` (Korthikanti et al., arXiv 2205.05198, section 4.2.2): what comes between the products is sharded along the
sequence; the all-reduces become a reduce-scatter and an all-gather each, of the same volume.

Nothing here knows models: what a dim is made of (heads, parts of a fused projection) follows from the views and splits that come after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from shardwise.core.layout import Layout
from shardwise.parallel.tensor import Role, role
from shardwise.trace import ops
from shardwise.trace.assign import Assignment, Walk
from shardwise.trace.capture import Uncapturable
from shardwise.trace.cuts import Cuts
from shardwise.trace.forms import Form, Place, State, Strategy
from shardwise.trace.sizes import factored

if TYPE_CHECKING:
    from shardwise.trace.sharding import Propagation

OPEN = "?"
"""The state of a parameter that nothing has used yet, and of views of it."""

TABLE = 8
"""Rows a rank from which on a table is split."""


class TensorWalk(Walk):
    """The walk for one axis, over which there are ``parts`` ranks; ``before`` are the assignments of those before it.

    ``known`` is what the axis does; none: all compute the same over it.
    """

    def __init__(
        self, p: Propagation, forms: Mapping[fx.Node, Form | None], axis: str, rows: Assignment, before: Mapping[str, Assignment],
        known: Role | None,
    ) -> None:  # fmt: skip
        super().__init__(p, forms)
        self.axis, self.parts, self.rows, self.before = axis, p.tensor.axes[axis], rows, before
        self.role, self.inert = known or Role(), known is None
        self.views: dict[fx.Node, list[fx.Node]] = {}  # of open parameters, by the parameter, in order
        self.origin: dict[fx.Node, fx.Node] = {}  # of an open node
        self.made: set[fx.Node] = set()  # partial sums that products made
        self.cuts = Cuts(p, forms, self.parts)

    def run(self) -> Assignment:
        super().run()
        for node in list(self.views):
            self.settle(node, None)
        return self.found

    def visit(self, node: fx.Node) -> None:
        """Views of open parameters stay open; what else reads these decides on them."""
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

    # ---- parameters ------------------------------------------------------------------------------------------------

    def birth(self, node: fx.Node) -> State:
        name = self.p.captured.parameters.get(node.name)
        if name is None or self.inert:
            return Place(0) if self.role.rows and node.name in self.p.captured.fields else "I"
        if self.p.tensor.layouts is not None:
            layout = self.p.tensor.layouts.get(name)
            return "I" if layout is None else place_of(layout, self.axis, self.p.tensor.axes)
        self.views[node], self.origin[node] = [], node
        return OPEN

    def remember(self, node: fx.Node, source: fx.Node) -> None:
        self.origin[node] = self.origin[source]
        self.views[self.origin[source]].append(node)

    def close(self, node: fx.Node, wanted: State | None) -> bool:
        """Decide on the parameter under ``node``, if that is open, so that ``node`` is what is wanted; else whole.  Whether it is."""
        if node not in self.origin:
            return self.found.states[node][0] == wanted
        parameter = self.origin[node]
        for place in self.candidates(parameter, node, wanted) if isinstance(wanted, Place) else ():
            if self.under(parameter, place).get(node, (None,))[0] == wanted:
                self.settle(parameter, place)
                return True
        self.settle(parameter, None)
        return False

    def candidates(self, parameter: fx.Node, node: fx.Node, wanted: Place) -> Iterator[Place]:
        """Where a parameter might be sharded for a view of it to be sharded as wanted."""
        shape, size = self.p.shape(parameter), self.p.shape(node)[wanted.dim]
        for dim, whole in enumerate(shape):
            for pre in dict.fromkeys((wanted.pre, wanted.pre * whole // size if whole % size == 0 else wanted.pre)):
                if whole % (pre * wanted.post) == 0:
                    yield Place(dim, pre, wanted.post)

    def under(self, parameter: fx.Node, place: Place | None) -> dict[fx.Node, tuple[State, ...]]:
        """The states of a parameter and its views if it is sharded there."""
        found: dict[fx.Node, tuple[State, ...]] = {parameter: ("I" if place is None else place,)}
        for node in self.views[parameter]:
            form = self.forms.get(node)
            if form is None:
                found[node] = (found[node.args[0]][node.args[1]],)
                continue
            strategy = self.of_view(form, found[form.operands[0][0]][0])
            found[node] = strategy.results
        return found

    @staticmethod
    def of_view(form: Form, state: State) -> Strategy:
        found = form.shards(0, state) if isinstance(state, Place) else None
        return form.whole("I") if found is None else found

    def settle(self, parameter: fx.Node, place: Place | None) -> None:
        self.found.states |= (states := self.under(parameter, place))
        for node in self.views.pop(parameter):
            form = self.forms.get(node)
            if form is not None:
                self.found.strategies[node] = self.of_view(form, states[form.operands[0][0]][0])
        for node in states:
            del self.origin[node]

    # ---- ops -----------------------------------------------------------------------------------------------------------

    def choose(self, form: Form) -> Strategy:
        opened = [i for i, (o, _) in enumerate(form.operands) if o in self.origin]
        if opened:
            self.decide(form, opened)
        states = [self.state(o) for o, _ in form.operands]
        found = self.column(form, states) or self.sharded(form, states)
        if found is not None:
            return self.noted(form, found)
        partial = [i for i, s in enumerate(states) if s == "P"]
        if partial and form.keeps(partial) and self.keeps(form, partial):
            return self.noted(form, form.on_partial(partial))
        for i in partial:
            found = self.in_stream(form, i)
            if found is not None:
                return found
        return form.whole("I")

    def shards(self, form: Form, position: int, place: Place) -> Strategy | None:
        """A form's strategy, if its shards go together with those of other axes."""
        strategy = form.shards(position, place)
        if strategy is None:
            return None
        others = [one.strategies[form.node] for one in (self.rows, *self.before.values()) if form.node in one.strategies]
        nodes = [
            *((o, i, "operands") for i, (o, _) in enumerate(form.operands)),
            *((form.node, i, "results") for i in range(len(form.results))),
        ]
        for node, i, side in nodes:
            own = getattr(strategy, side)[i]
            shape = self.p.shapes(form.node)[i] if side == "results" else self.p.shape(node)
            if isinstance(own, Place) and not self.fits(shape, own, [getattr(o, side)[i] for o in others]):
                return None
        return strategy

    def fits(self, shape: Sequence[int], place: Place, others: Sequence[State]) -> bool:
        """Whether a tensor can be sharded at ``place`` beside what others do with it."""
        names = (ops.ROWS, *self.before, self.axis)
        places = [
            (g, s.pre, s.post)
            for g, s in zip(names, (*others, place), strict=False)
            if isinstance(s, Place) and s.dim == place.dim
        ]
        try:
            factored(shape[place.dim], places, self.p.tensor.axes)
        except Uncapturable:
            return False
        return True

    def sharded(self, form: Form, states: list[State]) -> Strategy | None:
        """That of an operand that is sharded: of parameters first, then of the largest; but not of weights that are gathered at use."""
        order = []
        for i, (state, (operand, _)) in enumerate(zip(states, form.operands, strict=True)):
            if isinstance(state, Place):
                mine = self.learned(operand)
                if not (mine and self.role.at_use and not self.large_table(form, i)):
                    order.append((not mine, -math.prod(self.p.shape(operand)), i, state))
        for _, _, i, state in sorted(order, key=lambda one: one[:3]):
            found = self.shards(form, i, state)
            if found is not None:
                return found
        return None

    def column(self, form: Form, states: list[State]) -> Strategy | None:
        """Of a product by rows, if products are all by columns: its weight sharded otherwise than it rests."""
        if self.role.stream != "width":
            return None
        for i, (operand, labels) in enumerate(form.operands):
            state = states[i]
            if (
                isinstance(state, Place)
                and self.learned(operand)
                and self.product(form, i)
                and self.summed(form, labels[state.dim])
            ):
                place = self.by_columns(form, [i])
                return None if place is None else self.shards(form, *place)
        return None

    def noted(self, form: Form, strategy: Strategy) -> Strategy:
        """Remember where a partial sum is that of a product."""
        if "P" in strategy.results:
            product = any(
                self.product(form, i) or self.looks_up(form, i) for i, (o, _) in enumerate(form.operands) if self.learned(o)
            )
            if product or any(o in self.made for o, _ in form.operands):
                self.made.add(form.node)
        return strategy

    def keeps(self, form: Form, partial: list[int]) -> bool:
        """Whether an op is applied to a partial sum, which is reduced later."""
        others = [o for i, (o, _) in enumerate(form.operands) if i not in partial and self.grad[o]]
        if others:
            return False
        small = not self.p.shape(form.operands[partial[0]][0])
        together = form.linear == "add" and len(partial) == len(form.operands) > 1
        later = self.role.stream != "whole" and form.operands[0][0] in self.made and self.in_stream(form, partial[0]) is None
        return small or together or later

    def product(self, form: Form, weight: int) -> bool:
        """Whether an op sums over a label that the operand ``weight`` shares with others."""
        others = {label for j, (_, theirs) in enumerate(form.operands) if j != weight for label in theirs}
        return any(self.summed(form, label) and label in others for label in form.operands[weight][1])

    def large_table(self, form: Form, table: int) -> bool:
        """Whether an op looks up fewer elements than the table has, so that these are reduced rather than the table gathered."""
        rows, found = (math.prod(self.p.shape(node)) for node in (form.operands[table][0], form.node))
        return self.looks_up(form, table) and rows > found

    def looks_up(self, form: Form, table: int) -> bool:
        """Whether an op looks up rows of the operand ``table``."""
        labels = form.operands[table][1]
        return not self.product(form, table) and len(form.operands) > 1 and any(self.summed(form, label) for label in labels)

    def contracts(self, form: Form) -> bool:
        """Whether an op of several operands sums over a label: a product, or a lookup."""
        return len(form.operands) > 1 and any(self.summed(form, label) for _, labels in form.operands for label in labels)

    def learned(self, node: fx.Node) -> bool:
        """Whether a value follows from parameters alone."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return node.op == "placeholder" and node.name in self.p.captured.parameters

    def decide(self, form: Form, opened: list[int]) -> None:
        """Close the open operands of an op: as its other operands want it, or as the recipe says where these are whole."""
        if self.role.rows:
            place = self.at_rest(form, opened)
        else:
            place = self.by_rows(form, opened) or self.by_table(form, opened) or self.by_columns(form, opened)
        strategy = None if place is None else self.shards(form, *place)
        if place is None:
            known = [(i, self.state(o)) for i, (o, _) in enumerate(form.operands) if i not in opened]
            sharded = [(i, s) for i, s in known if isinstance(s, Place)]
            strategy = next((found for one in sharded if (found := self.shards(form, *one)) is not None), None)
        order = [place[0]] if place is not None and place[0] in opened else []
        for i in [*order, *(i for i in opened if i not in order)]:
            if self.role.at_use:
                wanted = place[1] if place is not None and i in order else None
            else:
                wanted = None if strategy is None else strategy.operands[i]
            good = self.close(form.operands[i][0], wanted)
            if not good and i in order:
                strategy = None

    def at_rest(self, form: Form, opened: list[int]) -> tuple[int, Place] | None:
        """(weight, where it rests) of a product whose weight is gathered where it is used: along what is summed over, else any dim."""
        if not self.role.at_use:
            return None
        for i in opened:
            operand, labels = form.operands[i]
            if not (self.product(form, i) or self.looks_up(form, i)):
                continue
            dims = sorted(range(len(labels)), key=lambda d: not self.summed(form, labels[d]))
            for dim in dims:
                size, inner = self.p.shape(operand)[dim], self.within(operand, dim)
                if inner is not None and size % (inner * self.parts) == 0:
                    return i, Place(dim, inner, size // (inner * self.parts))
        return None

    def within(self, operand: fx.Node, dim: int) -> int | None:
        """The number of pieces into which others cut a dim of a parameter; None where there is no telling."""
        pieces = 1
        for one in self.before.values():
            state = one.states[operand][0]
            if isinstance(state, Place) and state.dim == dim:
                if state.pre != 1 or pieces != 1:
                    return None
                pieces = self.p.shape(operand)[dim] // state.post
        return pieces

    def by_rows(self, form: Form, opened: list[int]) -> tuple[int, Place] | None:
        """(operand, where that is sharded): along a label that is summed over and that the weight has too."""
        for i, (operand, labels) in enumerate(form.operands if self.role.stream != "width" else ()):
            state = self.state(operand)
            if i in opened or not isinstance(state, Place) or not self.summed(form, labels[state.dim]):
                continue
            if any(labels[state.dim] in form.operands[j][1] for j in opened):
                return i, state
        return None

    def by_columns(self, form: Form, opened: list[int]) -> tuple[int, Place] | None:
        """(weight, where to shard it): along a dim of the result that the weight alone has, of a product."""
        for i in opened:
            labels = form.operands[i][1]
            others = {label for j, (_, theirs) in enumerate(form.operands) if j not in opened for label in theirs}
            if not any(self.summed(form, label) and label in others for label in labels):
                continue
            for dim, label in enumerate(labels):
                if label is not None and label in form.results[0] and label not in others:
                    place = self.cuts.split(form, i, dim, list(form.results[0]).index(label))
                    if place is not None:
                        return i, place
        return None

    def by_table(self, form: Form, opened: list[int]) -> tuple[int, Place] | None:
        """(table, where to shard it): along rows that are looked up by what comes from the batch, or along the width of each."""
        for i in opened:
            operand, labels = form.operands[i]
            if not self.looks_up(form, i):
                continue
            shape = self.p.shape(operand)
            row = next(d for d, label in enumerate(labels) if self.summed(form, label))
            if self.role.turned or self.role.stream == "width":
                wide = [d for d, label in enumerate(labels) if label in form.results[0] and shape[d] >= self.parts]
                return (i, self.cuts.even(shape[wide[-1]], wide[-1])) if wide else None
            looked = any(isinstance(self.rows.states[o][0], Place) for j, (o, _) in enumerate(form.operands) if j not in opened)
            if looked and shape[row] >= TABLE * self.parts:
                return i, self.cuts.even(shape[row], row)
        return None

    @staticmethod
    def summed(form: Form, label: Any) -> bool:
        return label is not None and all(label not in labels for labels in form.results) and form.moves is None

    def in_stream(self, form: Form, position: int) -> Strategy | None:
        """The strategy of an op on the partial sum of a product that is reduced to shards, if such are what goes between products."""
        operand = form.operands[position][0]
        if operand not in self.made:
            return None
        rows, shape = self.rows.states[operand][0], self.p.shape(operand)
        if self.role.rows or self.role.stream == "rows":
            return self.shards(form, position, rows) if isinstance(rows, Place) else None
        if self.role.stream != "sequence":
            return None
        at = rows.dim if isinstance(rows, Place) else -1
        for dim in range(len(shape) - 1):
            if dim != at and shape[dim] >= self.parts and isinstance(self.p.expressions(operand)[dim], int):
                return self.shards(form, position, self.cuts.even(shape[dim], dim))
        return None


def recipe(p: Propagation, forms: Mapping[fx.Node, Form | None], rows: Assignment) -> dict[str, Assignment]:
    """What the ops are on each axis by the recipe."""
    found: dict[str, Assignment] = {}
    roles = {axis: role(p.tensor.recipe, axis) for axis in p.tensor.axes}
    # What rests within others' pieces comes last.
    for axis, known in sorted(roles.items(), key=lambda one: one[1] is not None and one[1].at_use):
        found[axis] = TensorWalk(p, forms, axis, rows, found, known).run()
    return {axis: found[axis] for axis in roles}


def place_of(layout: Layout, axis: str, parts: Mapping[str, int]) -> State:
    """Where ``axis`` shards a tensor of this layout; "I" where it does not."""
    for dim, factors in enumerate(layout.dims):
        whole, pre = math.prod(f.size for f in factors), 1
        for factor in factors:
            if axis in factor.axes:
                equal = factor.size == math.prod(parts[a] for a in factor.axes)
                return Place(dim, pre, whole // (pre * (parts[axis] if equal else factor.size)))
            pre *= factor.size
    return "I"


__all__ = ["TensorWalk", "place_of", "recipe"]
