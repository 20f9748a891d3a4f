"""A walk over the captured graph chooses the strategy of each op on a group of axes, from the states of its operands.

On the axes of the batch there are no alternatives: fields come in sharded, and what is sharded stays so as long as ops
take it.
"""

from __future__ import annotations

import math

from torch import fx

from shardwise.graph.schema import is_tensor
from shardwise.shard.assignment import Assignment
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy


class BatchWalk:
    """This is the walk for the axes of the batch."""

    def __init__(self, context: ShardingContext) -> None:
        self.context, self.forms = context, context.forms
        self.found = Assignment()
        self.grad = context.carrying

    def run(self) -> Assignment:
        for node in self.context.normal.graph.nodes:
            if node.op == "placeholder":
                self.found.states[node] = (self.initial_state(node),)
            elif node.op == "call_function" and is_tensor(node):
                self.visit(node)
        return self.found

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
            return Shard(0)
        return "R" if node in self.context.parameters else "I"

    def state(self, node: fx.Node) -> Placement:
        """Return the state of an operand."""
        return self.found.states[node][0]

    def choose(self, form: OpSharding) -> Strategy:
        """Return the strategy that keeps the largest sharded operand which the op can take sharded; else the one on
        partial sums, the one that makes the result sharded, or the one on whole operands."""
        states = [self.state(o) for o, _ in form.operands]
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
