"""This lists what a solver may choose from: the strategies of each op on one axis of tensor parallelism, and where
parameters may be sharded.

Places come from the parameters (each dim, cut evenly or along what it is made of) and from the dims of what ops read,
and go on as far as ops take them.  What follows from batch fields alone has no gradient and is computed whole: slices
of it are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardwise.graph.schema import is_tensor
from shardwise.shard.assignment import Assignment, place_of
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy
from shardwise.shard.recipe.split_points import SplitPoints
from shardwise.shard.solver.cost_model import CostModel

PlaceSet = dict[Shard, None]
"""A set of places in the order of insertion."""


@dataclass
class AxisOptions:
    """This is what may be chosen on one axis: the ``strategies`` of each op that has a form, and the ``states`` of each
    parameter's placeholder; ``rows`` is the assignment of the axes of the batch."""

    rows: Assignment
    strategies: dict[fx.Node, tuple[Strategy, ...]]
    states: dict[fx.Node, tuple[Placement, ...]]


class Candidates(AxisOptions):
    """This finds all that may be chosen on axis ``axis``."""

    def __init__(self, context: ShardingContext, axis: str, prices: CostModel) -> None:
        self.context, self.forms, self.prices, self.axis, self.parts = (
            context,
            context.forms,
            prices,
            axis,
            prices.ranks_of[axis],
        )
        super().__init__(prices.batch, {}, {})
        self.following = following_parameters(context)
        self.cuts = SplitPoints(context, self.parts)
        self.places: dict[tuple[fx.Node, int], PlaceSet] = {}
        self.known: dict[Any, tuple[Strategy, ...]] = {}
        self.parameters = {n: self.seeds(n) for n in context.parameters}
        while True:
            before = sum(map(len, self.parameters.values()))
            self.walk()
            if sum(map(len, self.parameters.values())) == before:
                break
        fixed = context.tensor.layouts is not None
        self.states = {
            node: (self.resting(node),)
            if fixed
            else ("I", *["R"] * context.carrying[node], *places)
            if node.users
            else ("I",)
            for node, places in self.parameters.items()  # nothing reads a tied parameter under its other names
        }

    def only(self, several: Sequence[Assignment]) -> AxisOptions:
        """Return just the choices of some assignments, as far as they are legal; what none of them chooses is whole."""
        same: dict[tuple[Any, ...], tuple[Any, ...]] = {}

        def some(every: tuple[Any, ...], wanted: Iterable[Any]) -> tuple[Any, ...]:
            found = tuple(dict.fromkeys(one for one in wanted if one in every)) or every[:1]
            return same.setdefault(found, found)

        return AxisOptions(
            self.rows,
            {
                n: some(every, (one.strategies[n] for one in several if n in one.strategies))
                for n, every in self.strategies.items()
            },
            {
                n: some(every, (one.states[n][0] for one in several if n in one.states))
                for n, every in self.states.items()
            },
        )

    # ---- parameters --------------------------------------------------------------------------------------------------

    def seeds(self, node: fx.Node) -> PlaceSet:
        """Return even cuts of each dim of a parameter, or the cut that it has already."""
        if self.context.tensor.layouts is None:
            return dict.fromkeys(self.even(node))
        state = self.resting(node)
        return {state: None} if isinstance(state, Shard) else {}

    def resting(self, node: fx.Node) -> Placement:
        """Return the state of a parameter whose layout has been chosen before."""
        name = self.context.parameters[node]
        layout = (self.context.tensor.layouts or {}).get(name)
        state = place_of(layout, self.axis, self.context.tensor.axes)
        return "R" if state == "I" and self.axis in self.context.tensor.summed.get(name, ()) else state

    def even(self, node: fx.Node) -> Iterator[Shard]:
        """Yield a cut of each dim of a tensor: in equal pieces, or in uneven ones where these do not divide it."""
        for dim, size in enumerate(self.context.expressions(node)):
            if isinstance(size, int) and size >= self.parts:
                yield self.cuts.even(size, dim)

    def under(self, node: fx.Node) -> fx.Node | None:
        """Return the parameter that a value is a view or a cast of, or None."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return node if node in self.parameters else None

    def wish(self, node: fx.Node, place: Shard) -> None:
        """Let the parameter under ``node`` be sharded so that ``node`` may come out at ``place``."""
        parameter = self.under(node)
        if parameter is None or self.context.tensor.layouts is not None:
            return
        size = self.context.shape(node)[place.dim]
        if place.parts:  # only a weight itself is cut part by part
            if node is parameter:
                self.parameters[parameter].setdefault(place)
            return
        for dim, whole in enumerate(self.context.shape(parameter)):
            if node is not parameter or dim == place.dim:
                for pre in {place.pre, place.pre * whole // size if size and whole % size == 0 else place.pre}:
                    if whole % (pre * place.post) == 0 and whole // (pre * place.post) >= self.parts:
                        self.parameters[parameter].setdefault(Shard(dim, pre, place.post))

    def made_of(self, form: OpSharding) -> None:
        """Let weights be cut along the factors that views and splits of the product show; if it has several results, of
        the first."""
        product = self.cuts.results(form.node)[0]
        if product is None:
            return
        for operand, labels in form.operands:
            if self.under(operand) is None or form.moves is not None:
                continue
            for dim, label in enumerate(labels):
                if label is not None and label in form.results[0]:
                    at, size = list(form.results[0]).index(label), self.context.shape(operand)[dim]
                    for pre, post in self.cuts.made_of(product, at):
                        if size % (pre * post) == 0 and size // (pre * post) >= self.parts:
                            self.wish(operand, self.cuts.even(size, dim, pre, post))
                    joined = self.cuts.joined(product, at)
                    if joined is not None:
                        self.wish(operand, joined._replace(dim=dim))

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def walk(self) -> None:
        """Find the strategies of each op, from the first to the last."""
        for node in self.context.normal.graph.nodes:
            form = self.forms.get(node)
            if node in self.parameters:
                self.places[node, 0] = self.parameters[node]
            elif form is not None and node in self.following:
                self.visit(node, form)
            elif node not in self.forms and node.op == "call_function" and is_tensor(node):
                self.places[node, 0] = self.places.get((node.args[0], node.args[1]), {})

    def visit(self, node: fx.Node, form: OpSharding) -> None:
        if node not in self.strategies:
            self.made_of(form)
        candidates = tuple(tuple(self.candidates(o)) for o, _ in form.operands)
        states = tuple(self.rows.states[o][0] for o, _ in form.operands)
        key = (self.prices.works.key(node), candidates, states)
        if key not in self.known:
            self.known[key] = tuple(dict.fromkeys(self.legal(form, candidates)))
        self.strategies[node] = found = self.known[key]
        for i in range(len(form.results)):
            self.places[node, i] = dict.fromkeys(s.results[i] for s in found if isinstance(s.results[i], Shard))
        for i, (operand, _) in enumerate(form.operands):
            if self.under(operand) is not None:
                for one in found:
                    if isinstance(one.operands[i], Shard):
                        self.wish(operand, one.operands[i])

    def candidates(self, operand: fx.Node) -> Iterable[Shard]:
        """Return where an operand may be sharded: where its maker may shard it, along any other dim, and along rows."""
        found = dict(self.places.get((operand, 0), {}))
        dims = {(place.dim, place.pre) for place in found}
        if self.under(operand) is None:
            rows = self.rows.states[operand][0]
            more = [
                *self.even(operand),
                *([rows] if isinstance(rows, Shard) and self.prices.rows >= self.parts else []),
            ]
            found |= dict.fromkeys(place for place in more if (place.dim, place.pre) not in dims)
        return found

    def legal(self, form: OpSharding, candidates: tuple[tuple[Shard, ...], ...]) -> Iterator[Strategy]:
        """Yield all strategies that fit beside those of the batch axes."""
        yield form.whole("I")
        if any(self.context.carrying[o] for o, _ in form.operands):
            yield form.whole("R")
        for i, places in enumerate(candidates):
            for place in places:
                found = next((one for one in form.ways(i, place) if self.fits(form, one)), None)
                if found is not None:
                    yield found
        every = form.linear == "add"
        for i in range(len(form.operands)):
            if form.keeps([i]) and not (every and i):
                yield form.on_partial([i])

    def fits(self, form: OpSharding, strategy: Strategy) -> bool:
        return self.prices.together(form, self.rows.strategies[form.node], {self.axis: strategy})


def following_parameters(context: ShardingContext) -> set[fx.Node]:
    """Return the nodes that follow from parameters, frozen or not."""
    found: set[fx.Node] = set()
    for node in context.normal.graph.nodes:
        if node in context.parameters or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
