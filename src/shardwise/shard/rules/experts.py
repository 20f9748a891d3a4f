"""The rule for layers of experts.

On a group of axes a layer can have a part of the tokens, and of the experts with them.  Where ranks have the same
tokens, each can have a part of what is inside each expert, the columns of the first product and the rows of the next,
or some experts *by number*, and nothing for the rows of others: in both ways results are partial sums.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from shardwise.core.layout import Factor, Layout
from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.captured import Uncapturable
from shardwise.graph.experts import Experts
from shardwise.graph.schema import is_tensor, selects_result
from shardwise.nn.grouped import ALIGNED
from shardwise.ops import experts as own
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, OpSharding, Placement, Shard, Strategy
from shardwise.shard.rules.table import Table, given, op_name, rank_of, tensors

RULES = Table()


@RULES.rule("_grouped_mm", "transformers::grouped_mm_fallback", "shardwise::grouped_mm")
def _grouped_product(context: ShardingContext, node: fx.Node) -> Any:
    x, weight = node.args[:2]
    ends = given(node, "offs")
    if rank_of(context, x) != 2 or rank_of(context, weight) != 3 or tensors(node) != [x, weight, ends]:
        return None
    pairs = [(x, [None, "in"]), (weight, [None, "in", "out"]), (ends, [None])]

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        if op_name(node) != "_grouped_mm" or _in_whole_bytes(emitter, solved.values[1]):
            return emitter.plain(node, solved)
        return emitter.emit(node, solved.values, {}, solved.layout, torch.ops.shardwise.grouped_mm.default)

    return context.labelled(node, pairs, ["row", "out"], (0, 1), emit=emit)


def _in_whole_bytes(emitter: Emitter, weight: fx.Node) -> bool:
    """Whether every rank's part of a weight has the sizes that PyTorch's grouped product takes."""
    axes = emitter.context.tensor.axes

    def local(factor: Factor) -> int:
        ranks = math.prod(axes[axis] for axis in factor.axes)
        return factor.size // ranks if factor.size % ranks == 0 else 1

    return all(math.prod(map(local, dim)) % ALIGNED == 0 for dim in weight.meta["layout"].dims[1:])


def layer(context: ShardingContext, node: fx.Node) -> OpSharding:
    """Return the form of a layer of experts, whose operands are ids, entries and weights."""
    target, operands = node.target, tensors(node)
    assert isinstance(target, Experts)
    first = 1 + len(target.slots)
    slots = (1, *target.slots)

    def by_number(place: Shard) -> Strategy:
        return Strategy((*["R"] * first, *[place if own else "R" for own in target.of_each]), ("P",))

    @functools.cache
    def ways() -> list[Strategy]:
        """Return how ranks may share experts whose tokens they all have."""
        if context.tensor.plan == "recipe":
            return [by_number(Shard(0))] if context.tensor.experts == "by-number" else inside()
        return [*inside(), by_number(Shard(0))]

    def inside() -> list[Strategy]:
        return [flow.strategy(first) for flow in flows(context, target)]

    def moves(position: int, place: Shard) -> Strategy | None:
        if position >= first:
            if target.of_each[position - first] and place.dim == 0:
                return by_number(place) if place.pre == 1 and not place.parts else None
            return next((way for way in ways() if way.operands[position] == place), None)
        post = place.post * slots[position]
        if place.dim or place.parts or any(post % n for n in slots):
            return None
        tokens = (place._replace(post=post // n) for n in slots)
        return Strategy((*tokens, *["R"] * (len(operands) - first)), (place._replace(post=post),))

    def divided(states: Sequence[Placement]) -> Strategy | None:
        tokens = moves(0, states[0]) if isinstance(states[0], Shard) else None
        mine = [state for own, state in zip(target.of_each, states[first:], strict=True) if own]
        # Some may come whole, as what follows from more than the parameters of these experts.
        cut = next((state for state in mine if isinstance(state, Shard)), None)
        weights = [(cut or state) if own else "R" for own, state in zip(target.of_each, states[first:], strict=True)]
        return tokens and Strategy((*tokens.operands[:first], *weights), tokens.results)

    form = OpSharding(
        node, [(o, [None] * rank_of(context, o)) for o in operands], [[None] * rank_of(context, node)],
        moves=moves, factors=True,
    )  # fmt: skip
    form.divided = divided
    form.suggested = lambda: [(i, s) for way in ways() for i, s in enumerate(way.operands) if isinstance(s, Shard)]
    form.emit = lambda emitter, solved: emit(emitter, target, solved)
    return form


def stacked(context: ShardingContext, node: fx.Node) -> OpSharding:
    """Return the form of parameters that become one: each rank has them whole, whatever slots it has."""
    ids, *parameters = node.args
    whole = ["R"] * len(parameters)

    def moves(position: int, place: Shard) -> Strategy | None:
        return Strategy((place, *whole), ("R",)) if position == 0 else None

    operands = [(one, [None] * rank_of(context, one)) for one in (ids, *parameters)]
    return OpSharding(node, operands, [[None] * rank_of(context, node)], moves=moves, factors=True)


# ---- inside ----------------------------------------------------------------------------------------------------------


class Unfit(Exception):
    """The ops of a body do not go together with a cut of a weight."""


@dataclass
class Flow:
    """The strategies of a body's ops where a weight is cut: ops decide on the other weights that they use."""

    context: ShardingContext
    target: Experts
    states: dict[fx.Node, tuple[Placement, ...]] = field(default_factory=dict)
    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    open: set[fx.Node] = field(default_factory=set)

    @property
    def ids(self) -> fx.Node:
        """Return the placeholder of the sorted numbers."""
        return self.target.places[len(self.target.slots)]

    def run(self, weight: fx.Node, place: Shard) -> None:
        """Raise :class:`Unfit` where an op does not take its operands as they come."""
        inputs = len(self.target.slots) + 2
        for i, one in enumerate(self.target.places):
            self.states[one] = ("R",)
            if i >= inputs and one is not weight:
                self.open.add(one)
        self.states[weight] = (place,)
        for node in self.target.body.nodes:
            if node.op == "call_function":
                self.visit(node)

    def strategy(self, first: int) -> Strategy:
        """Return the strategy of the layer."""
        weights = [self.states[one][0] for one in self.target.places[first + 1 :]]
        return Strategy((*["R"] * first, *weights), self.states[self.target.result])

    def visit(self, node: fx.Node) -> None:
        if selects_result(node):
            self.states[node] = (self.states[node.args[0]][node.args[1]],)
            return
        form = self.context.inner_forms[node]
        if form is None:
            raise Unfit
        operands = [operand for operand, _ in form.operands]
        if all(one in self.open or one is self.ids for one in operands):
            self.open.add(node)
            return
        self.strategies[node] = strategy = self.choose(form, operands)
        self.states[node] = strategy.results

    def choose(self, form: OpSharding, operands: Sequence[fx.Node]) -> Strategy:
        known = {i: self.states[one][0] for i, one in enumerate(operands) if one not in self.open}
        ways = [way for i, state in known.items() if isinstance(state, Shard) for way in form.ways(i, state)]
        partial = [i for i, state in known.items() if state == "P"]
        clears = op_name(form.node) == "masked_fill" and form.node.args[2] == 0  # rows without an expert
        if partial and form.keeps(partial):
            ways.append(form.on_partial(partial))
        elif partial == [0] and clears:
            ways.append(Strategy(("P", "R"), ("P",)))
        if set(known.values()) == {"R"}:
            ways.append(form.whole("R"))
        for way in ways:
            if all(way.operands[i] == state for i, state in known.items()):
                for i, one in enumerate(operands):
                    if one in self.open:
                        self.close(one, way.operands[i])
                return way
        raise Unfit

    def close(self, node: fx.Node, wanted: Placement) -> None:
        """Decide on a weight, so that it or the rows that are taken of it are as wanted."""
        self.open.discard(node)
        self.states[node] = (wanted,)
        if node.op == "placeholder":
            return
        form = self.context.inner_forms[node]
        assert form is not None
        others = ["R"] * (len(form.operands) - 1)  # the numbers of the experts
        whole = Strategy((wanted, *others), (wanted,))  # rows of a partial sum are one
        way = form.shards(0, wanted) if isinstance(wanted, Shard) else whole
        if way is None or way.results != (wanted,):
            raise Unfit
        self.strategies[node] = way
        for (operand, _), state in zip(form.operands, way.operands, strict=True):
            if operand in self.open:
                self.close(operand, state)


def flows(context: ShardingContext, target: Experts) -> Iterator[Flow]:
    """Yield what follows from cuts of the first weight by columns, along what its columns are made of."""
    product = next(node for node in target.body.nodes if has(node, Fact.GROUPED_PRODUCT))
    weight, size = product.args[1], context.shape(product)[-1]
    places = [Shard(2)]
    if size % 2 == 0:
        places += [Shard(2, 2), Shard(2, 1, 2)]  # halves, or pairs, of a gate and what it multiplies
    for place in places:
        flow = Flow(context, target)
        try:
            flow.run(weight, place)
        except Unfit:
            continue
        if flow.states[target.result] == ("P",):
            yield flow


Chosen: TypeAlias = tuple[Mapping[fx.Node, tuple[Placement, ...]], Mapping[fx.Node, Strategy]]
"""The states of a body's values, and the strategies of its ops, on a group."""

# ---- the local graph -------------------------------------------------------------------------------------------------


def emit(emitter: Emitter, target: Experts, solved: Emission) -> fx.Node:
    """Emit the ops of a layer on this rank's rows."""
    context, number = emitter.context, len(target.slots)
    ids, entries, weights = solved.values[0], solved.values[1 : number + 1], solved.values[number + 1 :]
    *rows, sorted_ids, ends = target.places[: number + 2]
    tokens = (one.operands[0] for one in solved.strategies.values())
    slots = next((place for place in tokens if isinstance(place, Shard)), Shard(0))
    chosen = {group: _chosen(context, target, one, slots) for group, one in solved.strategies.items()}
    states = {group: one[0] for group, one in chosen.items()}
    for group, (_, strategies) in chosen.items():
        emitter.assignments[group].strategies.update(strategies)

    def annotated(new: fx.Node, old: fx.Node, grad: bool) -> fx.Node:
        own_states = {group: found[old][0] for group, found in states.items()}
        emitter.annotate(new, context.layout_of(context.shape(old), own_states), own_states, grad, old)
        return new

    several = emitter.graph.call_function(own.by_expert, (ids, target.experts))
    results = [annotated(emitter.graph.call_function(operator.getitem, (several, i)), one, False)
               for i, one in enumerate((sorted_ids, sorted_ids, ends))]  # fmt: skip
    emitter.annotate(
        several, [one.meta["layout"] for one in results], [one.meta["states"] for one in results], False, sorted_ids
    )
    several.meta["val"] = tuple(one.meta["val"] for one in results)
    order, found, stops = results
    axes = tuple(group for group, one in solved.strategies.items() if _has_numbers(target, one))
    outer = tuple(group for group in axes if isinstance(solved.strategies[group].operands[0], Shard))
    inner = axes[len(outer) :]
    if axes != (*outer, *inner):
        raise Uncapturable(f"experts are shared over {', '.join(axes)}, of which {', '.join(outer)} must come first")
    if inner:
        order, stops = _pair(emitter, own.of_own_experts, (order, stops, outer, inner), (order, stops))
    for place, x, n in zip(rows, entries, target.slots, strict=True):
        taken = emitter.graph.call_function(own.taken, (x, order, n))
        emitter.value[place] = annotated(taken, place, x.meta["grad"])
    routes = _routes(emitter, target, stops, outer) if axes else None
    for place in rows if outer else ():
        sent = emitter.graph.call_function(own.dispatched, (emitter.env, emitter.value[place], routes, outer))
        emitter.value[place] = annotated(sent, place, emitter.value[place].meta["grad"])
    if axes:
        found, stops = _pair(emitter, own.own_experts, (emitter.value[rows[0]], routes, axes), (found, stops))
    emitter.value[sorted_ids], emitter.value[ends] = found, stops
    emitter.value.update(zip(target.places[number + 2 :], weights, strict=True))
    for node in target.body.nodes:
        if node.op == "call_function":
            emitter.value[node] = emitter.step(node)
    out = emitter.value[target.result]
    if outer:
        back = emitter.graph.call_function(own.collected, (emitter.env, out, routes, outer, order))
        out = annotated(back, target.result, out.meta["grad"])
    new = emitter.graph.call_function(own.placed, (out, order, ids))
    return emitter.annotate(new, solved.layout, None, out.meta["grad"], emitter.current)


def _has_numbers(target: Experts, strategy: Strategy) -> bool:
    """Return whether a rank has some experts by their numbers, not all, or parts of each."""
    weights = strategy.operands[1 + len(target.slots) :]
    shards = [one for one in itertools.compress(weights, target.of_each) if isinstance(one, Shard)]
    return any(one.dim == 0 for one in shards)


def _routes(emitter: Emitter, target: Experts, stops: fx.Node, axes: tuple[str, ...]) -> fx.Node:
    """Emit how many rows each rank has for each expert, from where a rank's rows of each end."""
    new = emitter.graph.call_function(own.routes, (emitter.env, stops, axes))
    shape = (math.prod(emitter.context.tensor.axes[axis] for axis in axes), target.experts)
    emitter.annotate(new, Layout.replicated(shape), stops.meta["states"], False, stops.meta["origin"])
    new.meta["val"] = stops.meta["val"].new_empty(shape, dtype=torch.int64)
    return new


def _pair(emitter: Emitter, function: Any, args: tuple[Any, ...], like: Sequence[fx.Node]) -> list[fx.Node]:
    """Emit a function of two results, which are annotated ``like`` those that they replace."""
    both = emitter.graph.call_function(function, (emitter.env, *args))
    layouts, states = [one.meta["layout"] for one in like], [one.meta["states"] for one in like]
    emitter.annotate(both, layouts, states, False, like[0].meta["origin"])
    both.meta["val"] = tuple(one.meta["val"] for one in like)
    items = [emitter.graph.call_function(operator.getitem, (both, i)) for i in range(len(like))]
    for item, one, layout, state in zip(items, like, layouts, states, strict=True):
        emitter.annotate(item, layout, state, False, one.meta["origin"])
    return items


def _chosen(context: ShardingContext, target: Experts, strategy: Strategy, rows: Shard) -> Chosen:
    """Return the states of a body's values, and the strategies of its ops, on a group; ``rows`` are those of slots."""
    first = 1 + len(target.slots)
    place = strategy.operands[0]
    if isinstance(place, Shard) or _has_numbers(target, strategy):
        return _of_rows(context, target, place if isinstance(place, Shard) else rows, strategy.operands[first:])
    if strategy.results == ("P",):
        flow = next(one for one in flows(context, target) if one.strategy(first) == strategy)
        return flow.states, flow.strategies
    return _whole(context, target, str(strategy.results[0]))


def _of_rows(context: ShardingContext, target: Experts, place: Shard, weights: Sequence[Placement]) -> Chosen:
    """Return states and strategies where a rank has some of the rows: those of a part of the tokens, or of some of the
    experts."""
    states: dict[fx.Node, tuple[Placement, ...]] = {}
    strategies: dict[fx.Node, Strategy] = {}
    inputs = [*[place] * (len(target.slots) + 1), "P", *weights]
    for one, state in zip(target.places, inputs, strict=True):
        states[one] = (state,)
    for node in target.body.nodes:
        if node.op == "call_function":
            if selects_result(node):
                states[node] = (states[node.args[0]][node.args[1]],)
                continue
            form = context.inner_forms[node]
            if form is None:
                raise Uncapturable(f"{node.target}, in a layer of experts, has no rule")
            operands = tuple(states[operand][0] for operand, _ in form.operands)
            strategies[node] = Strategy(operands, (place,) * len(form.results))
            states[node] = strategies[node].results
    return states, strategies


def _whole(context: ShardingContext, target: Experts, state: str) -> Chosen:
    ops = [node for node in target.body.nodes if node.op == "call_function" and is_tensor(node)]
    forms = {node: context.inner_forms[node] for node in ops if not selects_result(node)}
    strategies = {node: form.whole(state) for node, form in forms.items() if form is not None}
    states = {node: (state,) * len(context.shapes(node)) for node in (*target.places, *ops)}
    return states, strategies


__all__ = ["RULES", "layer"]
