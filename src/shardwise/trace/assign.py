"""Which strategy each op has on a group of axes: a walk over the captured graph, from states of operands to states of results.

Over the batch axes nothing is to choose: fields come in sharded, and what is sharded stays so as long as ops take it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from shardwise.core.layout import Layout
from shardwise.core.mesh import axis_of
from shardwise.core.rates import Machine
from shardwise.trace.forms import Form, Place, State, Strategy
from shardwise.trace.schema import differentiable, is_tensor

if TYPE_CHECKING:
    from shardwise.trace.capture import Captured
    from shardwise.trace.decisions import Decisions
    from shardwise.trace.sharding import Propagation


@dataclass(frozen=True)
class Tensors:
    """Tensor parallelism over ``axes``, each with its number of ranks, by ``recipe``, or by another ``plan`` on its axes and ``pins``.

    ``layouts`` are those of parameters, where they have been chosen before (None: whole), and ``summed`` the axes over which their
    gradients are partial sums.  Plan "auto" is that which is fastest on ``machine``, or what was ``decided`` for another capture.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    recipe: str = "1d"
    layouts: Mapping[str, Layout | None] | None = None
    plan: str = "recipe"
    pins: Sequence[tuple[str, str]] = ()
    machine: Machine | None = None
    summed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    decided: Decisions | None = None


@dataclass
class Assignment:
    """Of one group: the states of each node's results, and the strategy of each op that has a form; ``held``: what the result of an op
    is moved to where it is made, because a user says so."""

    states: dict[fx.Node, tuple[State, ...]] = field(default_factory=dict)
    strategies: dict[fx.Node, Strategy] = field(default_factory=dict)
    held: dict[fx.Node, State] = field(default_factory=dict)


class Walk:
    """The walk for the axes of the batch."""

    def __init__(self, p: Propagation, forms: Mapping[fx.Node, Form | None]) -> None:
        self.p, self.forms = p, forms
        self.found = Assignment()
        self.grad = p.carrying

    def run(self) -> Assignment:
        for node in self.p.normal.graph.nodes:
            if node.op == "placeholder":
                self.found.states[node] = (self.birth(node),)
            elif node.op == "call_function" and is_tensor(node):
                self.visit(node)
        return self.found

    def visit(self, node: fx.Node) -> None:
        """Choose the strategy of an op."""
        form, states = self.forms.get(node), self.found.states
        if node not in self.forms:  # one of several results
            states[node] = (states[node.args[0]][node.args[1]],)
        elif form is None:
            states[node] = ("I",) * len(self.p.shapes(node))
        else:
            self.found.strategies[node] = strategy = self.choose(form)
            states[node] = strategy.results

    def birth(self, node: fx.Node) -> State:
        """The state of a placeholder."""
        captured = self.p.captured
        return Place(0) if node.name in captured.fields else "R" if node.name in captured.parameters else "I"

    def state(self, node: fx.Node) -> State:
        """Of an operand."""
        return self.found.states[node][0]

    def choose(self, form: Form) -> Strategy:
        """The sharding of the largest operand that the op takes; else it is applied to a partial sum; else to whole operands."""
        states = [self.state(o) for o, _ in form.operands]
        sizes = [math.prod(self.p.shape(o)) for o, _ in form.operands]
        for i in sorted(range(len(states)), key=lambda i: -sizes[i]):
            state = states[i]
            found = form.shards(i, state) if isinstance(state, Place) else None
            if found is not None:
                return found
        partial = [i for i, s in enumerate(states) if s == "P"]
        if form.keeps(partial):
            return form.on_partial(partial)
        if form.fresh is not None:
            return Strategy(("R",) * len(states), (form.fresh,))
        return self.replicated(form, states)

    def replicated(self, form: Form, states: list[State]) -> Strategy:
        """Of whole operands; of nothing but parameters a partial gradient passes through to them."""
        carrying = [s for (o, _), s in zip(form.operands, states, strict=True) if self.grad[o]]
        return form.whole("R" if carrying and all(s == "R" for s in carrying) else "I")


def with_gradient(captured: Captured, graph: fx.Graph) -> dict[fx.Node, bool]:
    """Whether a node's value depends on trainable parameters in a differentiable way."""
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            name = captured.parameters.get(node.name)
            found[node] = name is not None and bool(captured.trainable.get(name, True))
        elif node.op == "call_function":
            value: Any = node.meta.get("val")
            reached = any(found.get(n, False) for n in node.all_input_nodes)
            good = isinstance(value, Tensor | tuple | list) and differentiable(value)
            found[node] = reached and good and node.target is not torch.ops.aten.detach.default
    return found


def postpone(
    p: Propagation, forms: Mapping[fx.Node, Form | None], axis: str, rows: Assignment, found: Assignment
) -> None:  # fmt: skip
    """Whole parameters that ops want as R or in pieces on ``axis`` are R by birth, and so is what follows from them alone: their gradients
    are summed over ranks once a step, as over the axes of the batch, and not for each microbatch where they are used."""
    nodes, wanted = list(p.normal.graph.nodes), set[fx.Node]()
    alone = {n for n, states in rows.states.items() if p.carrying.get(n) and set(states) == {"R"}}
    for node, strategy in found.strategies.items():
        form = forms[node]
        operands = (o for o, _ in form.operands) if form is not None else ()
        wanted |= {o for o, s in zip(operands, strategy.operands, strict=True) if s == "R" or isinstance(s, Place)}
    for node in reversed(nodes):
        name = p.captured.parameters.get(node.name)
        if name is not None and p.tensor.layouts is not None:
            (wanted.add if axis in p.tensor.summed.get(name, ()) else wanted.discard)(node)
        if node in alone and node in wanted and set(found.states[node]) == {"I"}:
            found.states[node] = ("R",) * len(found.states[node])
            form = forms.get(node)
            if form is not None:
                found.strategies[node] = form.whole("R")
            wanted |= set(node.all_input_nodes)


def place_of(layout: Layout | None, axis: str, parts: Mapping[str, int]) -> State:
    """Where ``axis`` shards a tensor of this layout (None: whole); "I" where it does not."""
    for dim, factors in enumerate(layout.dims if layout is not None else ()):
        whole, pre = math.prod(f.size for f in factors), 1
        for factor in factors:
            if axis in factor.axes:
                alone = len({axis_of(a) for a in factor.axes}) == len(factor.axes)  # no sub-axes, which cut alike
                equal = alone and factor.size == math.prod(parts[a] for a in factor.axes)
                return Place(dim, pre, whole // (pre * (parts[axis] if equal else factor.size)), factor.parts)
            pre *= factor.size
    return "I"
