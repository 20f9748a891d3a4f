"""A walk over the captured graph chooses the strategy of each op on a group of axes, from the states of its operands.

On the axes of the batch there are no alternatives: fields come in sharded, and what is sharded stays so as long as ops
take it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from shardwise.core.fields import has_rows
from shardwise.graph.schema import is_tensor, selects_result
from shardwise.shard.assignment import Assignment
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy


class BatchWalk:
    """This is the walk for the axes of the batch."""

    def __init__(self, context: ShardingContext) -> None:
        self.context, self.forms = context, context.forms
        self.found = Assignment()
        self.grad = context.carrying
        self.whole: set[fx.Node] = set()  # the ops that select elements of all ranks

    def run(self) -> Assignment:
        while True:
            self.walk()
            wrong = misfits(self.context, self.found, self.whole)
            if not wrong:
                return self.found
            self.whole |= wrong
            self.found = Assignment()

    def walk(self) -> None:
        for node in self.context.normal.graph.nodes:
            if node.op == "placeholder":
                self.found.states[node] = (self.initial_state(node),)
            elif node.op == "call_function" and is_tensor(node):
                self.visit(node)

    def visit(self, node: fx.Node) -> None:
        """Choose the strategy of an op."""
        form, states = self.forms.get(node), self.found.states
        if node not in self.forms:  # it takes one of several results
            states[node] = (states[node.args[0]][node.args[1]],)
        elif form is None:
            states[node] = ("I",) * len(self.context.shapes(node))
        else:
            self.found.strategies[node] = strategy = self.choose(form)
            states[node] = strategy.results

    def initial_state(self, node: fx.Node) -> Placement:
        """Return the state with which a placeholder starts."""
        if node.name in self.context.captured.fields:
            return Shard(0) if has_rows(self.context.captured.fields[node.name]) else "I"
        return "R" if node in self.context.parameters else "I"

    def state(self, node: fx.Node) -> Placement:
        """Return the state of an operand."""
        return self.found.states[node][0]

    def choose(self, form: OpSharding) -> Strategy:
        """Return the strategy that keeps the largest sharded operand which the op can take sharded; else the one on
        partial sums, the one that makes the result sharded, or the one on whole operands."""
        states = [self.state(o) for o, _ in form.operands]
        if form.selects and form.node not in self.whole and own_selection(states):
            return Strategy(tuple(states), (Shard(0),))
        sizes = [math.prod(self.context.shape(o)) for o, _ in form.operands]
        for i in sorted(range(len(states)), key=lambda i: -sizes[i]):
            state = states[i]
            found = form.shards(i, state) if isinstance(state, Shard) else None
            if found is not None:
                return found
        partial = [i for i, s in enumerate(states) if s == "P"]
        learned = [i for i in partial if self.grad[form.operands[i][0]]]
        for kept in (partial, learned):  # what follows from fields alone can be summed beforehand
            if form.keeps(kept):
                return form.on_partial(kept)
        if form.fresh is not None:
            return Strategy(("R",) * len(states), (form.fresh,))
        return self.replicated(form, states)

    def replicated(self, form: OpSharding, states: list[Placement]) -> Strategy:
        """Return the strategy on whole operands: "R" where all that have a gradient are R, as parameters are."""
        carrying = [s for (o, _), s in zip(form.operands, states, strict=True) if self.grad[o]]
        return form.whole("R" if carrying and all(s == "R" for s in carrying) else "I")


def own_selection(states: Sequence[Placement]) -> bool:
    """Return whether each rank can select elements of its own rows by its part of a mask, and all in their order."""
    x, mask = states
    return isinstance(x, Shard) and x == mask and x.dim == 0 and x.pre == 1 and not x.parts


def misfits(context: ShardingContext, found: Assignment, whole: Collection[fx.Node]) -> set[fx.Node]:
    """Return the ops that select elements of a rank's rows, and that must select those of all: some op takes their
    results as a whole, together with what is cut in another way, or draws a random number for each."""
    selected: dict[fx.Node, set[fx.Node]] = {}  # the selections that a value's number of elements depends on
    wrong: set[fx.Node] = set()
    for node in context.normal.graph.nodes:
        form = context.forms.get(node)
        if form is not None and form.selects and node in found.strategies and found.strategies[node].sharded:
            selected[node] = {node}
            continue
        above = {n: selected[n] for n in node.all_input_nodes if n in selected}
        if not above or not is_tensor(node):
            continue
        every = set().union(*above.values())
        strategy = found.strategies.get(node)
        if selects_result(node) or strategy is None or form is None:
            selected[node] = every
            wrong |= set() if selects_result(node) else every
            continue
        masks = [one.all_input_nodes[-1] for one in every]
        fits = all(_same(masks[0], mask) for mask in masks) and "ordinal" not in node.meta
        for (operand, _), state in zip(form.operands, strategy.operands, strict=True):
            own = found.states[operand][0]
            fits &= state == own if operand in above else not isinstance(state, Shard)
        if not fits:
            wrong |= every
        elif any(isinstance(one, Shard) for one in strategy.results):
            selected[node] = every
    return wrong - set(whole)


def _same(one: Any, other: Any) -> bool:
    """Return whether two arguments of captured ops are equal: the same node, or the same op on equal ones."""
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        if one is other:
            return True
        if one.op != "call_function" or one.target is not other.target or "ordinal" in one.meta:
            return False
        return _same((one.args, dict(one.kwargs)), (other.args, dict(other.kwargs)))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


def postpone(context: ShardingContext, axis: str, rows: Assignment, found: Assignment) -> None:
    """Make whole parameters R on ``axis`` from the start where ops want them as R or in pieces, and with them what
    follows from them alone.  Their gradients are then summed over ranks once a step, as over the axes of the batch, and
    not for each microbatch where they are used."""
    nodes, wanted = list(context.normal.graph.nodes), set[fx.Node]()
    alone = {n for n, states in rows.states.items() if context.carrying.get(n) and set(states) == {"R"}}
    for node, strategy in found.strategies.items():
        form = context.forms[node]
        operands = (o for o, _ in form.operands) if form is not None else ()
        wanted |= {o for o, s in zip(operands, strategy.operands, strict=True) if s == "R" or isinstance(s, Shard)}
    for node in reversed(nodes):
        name = context.parameters.get(node)
        if name is not None and context.tensor.layouts is not None:
            (wanted.add if axis in context.tensor.summed.get(name, ()) else wanted.discard)(node)
        if node in alone and node in wanted and set(found.states[node]) == {"I"}:
            found.states[node] = ("R",) * len(found.states[node])
            form = context.forms.get(node)
            if form is not None:
                found.strategies[node] = form.whole("R")
            wanted |= set(node.all_input_nodes)
