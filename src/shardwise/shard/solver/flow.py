"""This finds which op makes each value and which ops read it, and so what a microbatch takes under a tensor plan: the
ops, and the moves of values between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx

from shardwise.graph.schema import is_tensor, outputs_of
from shardwise.shard.assignment import Assignment
from shardwise.shard.context import ShardingContext
from shardwise.shard.solver.cost_model import Collective, CostModel, MicrobatchCost


class Reader(NamedTuple):
    """This reads a value: an op, at some of its operands; or, without one, what wants it in ``goal`` on every axis."""

    node: fx.Node | None
    positions: tuple[int, ...] = ()
    goal: str = "I"


class Flow:
    """This tells who makes and who reads the tensors of a captured graph."""

    def __init__(self, context: ShardingContext) -> None:
        self.context, self.forms = context, context.forms
        self.values = [n for n in context.normal.graph.nodes if isinstance(n.meta.get("val"), Tensor)]

    def maker(self, value: fx.Node) -> tuple[fx.Node, int]:
        """Return the placeholder or op that makes a value, and as which of its results."""
        picked: Any = value.args if value.op == "call_function" and value not in self.forms else (value, 0)
        maker, index = picked
        return maker, index

    def readers(self, value: fx.Node) -> Iterator[Reader]:
        for user in value.users:
            form = self.forms.get(user)
            if user.op == "output":
                loss, *updates = outputs_of(user.graph)
                yield from [Reader(None, (), "P")] * (value is loss) + [Reader(None)] * (value in updates)
            elif form is not None:
                yield Reader(user, tuple(i for i, (o, _) in enumerate(form.operands) if o is value))
            elif is_tensor(user):
                yield Reader(None)


def seconds(prices: CostModel, flow: Flow, found: Mapping[str, Assignment]) -> MicrobatchCost:
    """Return what a microbatch takes under assignments, whoever chose them."""
    axes = [found[axis] for axis in prices.axes]
    computing, collectives, once, nbytes = 0.0, list[Collective](), list[Collective](), 0
    for node, form in flow.forms.items():
        strategies = [one.strategies[node] for one in axes if node in one.strategies]
        computing += prices.op(node, form, strategies)
        collectives += prices.exchanges(form, strategies)
        nbytes += prices.kept(node, strategies)
    for node in flow.values:
        value, states = prices.value(node), tuple(one.states[node][0] for one in axes)
        goals = {
            tuple(one.strategies[r.node].operands[i] for one in axes) if r.node is not None else (r.goal,) * len(axes)
            for r in flow.readers(node)
            for i in (r.positions if r.node is not None else (0,))
        }
        maker, index = flow.maker(node)
        made = tuple(
            one.strategies[maker].results[index] if node in one.held and maker in one.strategies else s
            for one, s in zip(axes, states, strict=True)
        )
        for before, after in ((made, {states}), (states, goals)):
            steps = prices.steps(value, before, after)
            assert steps is not None, (node, before, after)
            collectives += [one for step in sorted(steps, key=repr) for one in prices.collectives(value, step)]
            nbytes += sum(prices.copied(value, step) for step in steps)
        if node in prices.context.parameters:
            nbytes += prices.resting(node, states)
            once += prices.once(node, states)
    communicating = sum(map(prices.seconds, (*collectives, *once)))
    return MicrobatchCost(computing, communicating, tuple(collectives), nbytes, tuple(once))
