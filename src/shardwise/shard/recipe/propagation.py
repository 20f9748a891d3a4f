"""Layouts follow from pins, as in GSPMD (Xu et al., arXiv 2105.04663, section 3.5): what a user says of a few tensors
goes on through the ops, forward and backward, until nothing new follows.

An op passes on where a tensor is sharded to its other operands and results as its form says.  What is passed on without
a choice comes first: through ops that are no products both ways, then from weights to results, then from what a product
sums over to its weight, and last between its inputs and results.  The first to reach a tensor decides on it; what
another op wants of it later is a conflict, which is reported, and at which values are gathered.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import fx

from shardwise.core.pins import starred
from shardwise.graph.naming import op_in_words
from shardwise.parallel.tensor import Role
from shardwise.shard.assignment import Assignment, place_of
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy
from shardwise.shard.recipe.pins import Pin, PinnedPlaces, Pins, check_table, used_parameters
from shardwise.shard.recipe.walk import TensorWalk
from shardwise.shard.sizes import ratio

THROUGH, FROM_WEIGHT, TO_WEIGHT, FORWARD, BACKWARD = range(5)
"""An op passes on what is known in this order."""


class KnownPlace(NamedTuple):
    """This says where a tensor is sharded (None means whole), by which pin, and through which op that follows from it
    ("" means that the tensor is pinned itself)."""

    place: Shard | None
    pin: str
    op: str = ""


class PinnedWalk(TensorWalk):
    """This is the walk for one axis: pins make parameters what they are, and ops take operands as the facts say."""

    def __init__(
        self, context: ShardingContext, axis: str, rows: Assignment, before: Mapping[str, Assignment], pins: Pins
    ) -> None:  # fmt: skip
        super().__init__(context, axis, rows, before, Role())
        self.pins, self.facts, self.later = pins, dict[fx.Node, KnownPlace](), dict[fx.Node, KnownPlace]()
        self.following = Following(self)

    def run(self) -> Assignment:
        self.pin()
        self.following.run()
        return super().run()

    def pin(self) -> None:
        """Note the facts that users state; a cut along what a product sums over may wait for how its input comes."""
        places = PinnedPlaces(self)
        if self.context.tensor.layouts is None:
            if self.context.tensor.plan == "table":
                check_table(self.context, self.pins, places)
            for node, pin in self.about(self.pins.parameters):
                found = places.parameter(node, pin)
                place, summed = (None, False) if found is None else found
                (self.later if summed else self.facts)[node] = KnownPlace(place, pin.text)
        else:
            for node, name in self.context.parameters.items():
                state = place_of(self.context.tensor.layouts.get(name), self.axis, self.context.tensor.axes)
                self.facts[node] = KnownPlace(state if isinstance(state, Shard) else None, name)
        for node, pin in self.about(self.pins.results):
            self.facts[node] = KnownPlace(places.result(node, pin), pin.text)
            self.found.held[node] = self.facts[node].place or "I"

    def about(self, pins: Mapping[fx.Node, Mapping[str, Pin]]) -> list[tuple[fx.Node, Pin]]:
        """Return what is said of this axis."""
        return [(node, by_axis[self.axis]) for node, by_axis in pins.items() if self.axis in by_axis]

    def initial_state(self, node: fx.Node) -> Placement:
        fact = self.facts.get(node) if node in self.context.parameters else None
        return "I" if fact is None or fact.place is None else fact.place

    def visit(self, node: fx.Node) -> None:
        super().visit(node)
        if node in self.found.held:
            self.found.states[node] = (self.found.held[node],)

    def state(self, node: fx.Node) -> Placement:
        """Return the state of a value; if it is not sharded, return where it is to be sharded."""
        found, fact = super().state(node), self.facts.get(node)
        if isinstance(found, Shard) or fact is None or fact.place is None or node in self.found.held:
            return found
        return fact.place


class Following:
    """This finds all that follows from the facts of a walk, up to a fixed point."""

    def __init__(self, walk: PinnedWalk) -> None:
        self.walk, self.facts = walk, walk.facts
        self.count = itertools.count()
        self.waiting: list[tuple[int, int, OpSharding, str, int, fx.Node]] = []
        self.conflicts: dict[str, None] = {}

    def run(self) -> None:
        for node in list(self.facts):
            self.push(node)
        self.spread(TO_WEIGHT)
        for node, fact in self.walk.later.items():
            if node not in self.facts:
                self.facts[node] = fact
                self.push(node)
        self.spread(BACKWARD)
        self.walk.context.notes.update(self.conflicts)
        for name, node in used_parameters(self.walk.context).items():
            self.walk.context.decided.setdefault(name, {})[self.walk.axis] = self.why(self.facts.get(node))

    @staticmethod
    def why(fact: KnownPlace | None) -> str:
        if fact is None:
            return "whole, for nothing follows"
        return f"{fact.op}, from {fact.pin}" if fact.op else fact.pin

    # ---- what is to be looked at -------------------------------------------------------------------------------------

    def push(self, node: fx.Node) -> None:
        """Let all ops that read or make a tensor with a place pass that on."""
        if self.facts[node].place is None:
            return
        for _, position, form in self.walk.cuts.uses(node):
            self.add(form, "operands", position, node)
        source, index = (
            (node.args[0], node.args[1]) if node.op == "call_function" and node not in self.walk.forms else (node, 0)
        )
        made = self.walk.forms.get(source)
        if made is not None:
            self.add(made, "results", index, node)

    def add(self, form: OpSharding, side: str, index: int, node: fx.Node) -> None:
        level = self.level(form, side, index, node)
        heapq.heappush(self.waiting, (level, next(self.count), form, side, index, node))

    def level(self, form: OpSharding, side: str, index: int, node: fx.Node) -> int:
        """Return how soon an op passes on where this operand or result is sharded."""
        place = self.facts[node].place
        if form.moves is not None or place is None or not form.multiplies:
            return THROUGH
        label = form.operands[index][1][place.dim] if side == "operands" else form.results[index][place.dim]
        if all(label in labels for _, labels in form.operands):
            return THROUGH
        if side == "results":
            return BACKWARD
        if self.walk.context.learned(node):
            return FROM_WEIGHT
        return TO_WEIGHT if form.sums(label) else FORWARD

    def spread(self, most: int) -> None:
        """Pass on what is waiting, up to the level ``most``."""
        while self.waiting and self.waiting[0][0] <= most:
            _, _, form, side, index, node = heapq.heappop(self.waiting)
            strategy = self.strategy(form, side, index, node)
            if strategy is None:
                continue
            results = self.walk.cuts.results(form.node)
            tensors = [
                *zip((o for o, _ in form.operands), strategy.operands, strict=True),
                *zip(results, strategy.results, strict=True),
            ]
            for other, state in tensors:
                if other is not None and other is not node and isinstance(state, Shard):
                    self.propose(other, state, node, form)

    def strategy(self, form: OpSharding, side: str, index: int, node: fx.Node) -> Strategy | None:
        """Return the strategy that has a tensor sharded where it is, or None."""
        place = self.facts[node].place
        assert place is not None
        if side == "operands":
            return self.walk.shards(form, index, place)
        for position in range(len(form.operands)):
            for candidate in self.before(form, position, index, place):
                found = self.walk.shards(form, position, candidate)
                if found is not None and found.results[index] == place:
                    return found
        return None

    def before(self, form: OpSharding, position: int, index: int, place: Shard) -> Iterator[Shard]:
        """Yield where an operand may be sharded for a result of its op to be at ``place``."""
        operand, labels = form.operands[position]
        if form.moves is None:
            label = form.results[index][place.dim]
            if label is not None and label in labels:
                yield Shard(list(labels).index(label), place.pre, place.post)
            return
        result = self.walk.cuts.results(form.node)[index]
        assert result is not None
        sizes, goal = self.walk.context.expressions(operand), self.walk.context.expressions(result)
        outer, inner = place.pre * math.prod(goal[: place.dim]), place.post * math.prod(goal[place.dim + 1 :])
        for dim, size in enumerate(sizes):
            pres = dict.fromkeys((place.pre, ratio(outer, math.prod(sizes[:dim]))))
            posts = dict.fromkeys((place.post, ratio(inner, math.prod(sizes[dim + 1 :]))))
            for pre, post in itertools.product(pres, posts):
                known = isinstance(size, int) and isinstance(pre, int)
                if (
                    pre
                    and post
                    and (size >= pre * post and size % (pre * post) == 0 if known else not isinstance(size, int))
                ):
                    yield Shard(dim, pre, post)

    # ---- what is found -----------------------------------------------------------------------------------------------

    def propose(self, node: fx.Node, place: Shard, source: fx.Node, form: OpSharding) -> None:
        """Shard a tensor at ``place``, as an op wants it, or note the conflict."""
        size, by = self.walk.context.expressions(node)[place.dim], self.facts[source]
        if isinstance(size, int):
            if size < self.walk.parts:
                return
            place = self.walk.cuts.even(size, place.dim, place.pre, place.post)
        if not self.walk.fits(node, place):
            return
        known, waits = self.facts.get(node), self.walk.later.get(node)
        if known is None and waits is not None and waits.place is not None and waits.place.dim == place.dim:
            self.facts[node] = KnownPlace(place, waits.pin)
            self.push(node)
        elif known is None and waits is None:
            self.facts[node] = KnownPlace(place, by.pin, op_in_words(form.node))
            self.push(node)
        else:
            has = known or waits
            assert has is not None
            if has.place is not None and has.place != place and (has.place.dim, has.pin) != (place.dim, by.pin):
                what = self.walk.context.parameters.get(node, "")
                self.conflicts[
                    f"pins: {op_in_words(form.node)}: {by.pin} wants {starred(what) or 'a value'} in pieces of dim "
                    f"{place.dim}, and {has.pin} of dim "
                    f"{has.place.dim}, which stays"
                ] = None


__all__ = ["PinnedWalk"]
