"""From the graph of the whole batch to the local graph of one rank.

Rules (package ``rules``) describe how each op treats shards, ``assign.py`` chooses a strategy for each op on each group of mesh axes, and
here the local op is emitted: operands are moved to what the strategies want, sizes become local, results get their layouts.

The axes of the batch are one group, ``ROWS``: fields start sharded on dim 0, and parameters, and what is made of them alone, are R by
birth, for what accumulates in the gradient buffers is reduced at the end of the step.  Every axis of tensor parallelism is a group of
its own, on which parameters are what ``tensor`` makes them.  All values keep the meta data of the whole batch's graph.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.core.layout import Layout
from shardwise.core.pins import PLANS
from shardwise.trace import ops
from shardwise.trace.assign import Assignment, Tensors, Walk, postpone, with_gradient
from shardwise.trace.capture import Uncapturable
from shardwise.trace.decisions import Decisions
from shardwise.trace.forms import Form, Labels, Solved, State
from shardwise.trace.functional import Normal
from shardwise.trace.layouts import Layouts
from shardwise.trace.moves import Moves
from shardwise.trace.naming import module_path
from shardwise.trace.normalise import eliminate_dead
from shardwise.trace.pinned import PinnedWalk
from shardwise.trace.pins import read_pins
from shardwise.trace.price import Seconds
from shardwise.trace.schema import differentiable, is_tensor, op_name
from shardwise.trace.sizes import Sizes, concrete, of_data
from shardwise.trace.solve import predicted, solve
from shardwise.trace.tensor import recipe
from shardwise.trace.torch_private import schema
from shardwise.trace.work import Repeats, repeats

aten = torch.ops.aten

ROWS = ops.ROWS

Rule = Callable[["Propagation", fx.Node], Form | None]
"""Describes a captured op, or returns None where it does not cover the op, so used."""

_BY_STRIDE = {"as_strided", "as_strided_scatter", "as_strided_copy", "_reshape_alias"}
_LIKE = {f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")} | {
    f"new_{name}" for name in ("zeros", "ones", "full", "empty")
}  # of the shape of a tensor, and no more of it: without a gradient
_FACTORY_OPTIONS = ("pin_memory", "layout")


@dataclass
class Sharded:
    """A local graph.  Its placeholders are ``env`` and those of the normal graph; its output is ``(loss as partial sum, *updates)``.

    ``replicated`` are the ops without a rule that every rank computes whole, by (op, module path), and ``repeats`` (rows) what those that cost something do;
    ``collectives`` those that were put in, as (kind, op that needs it, module path).  ``layouts`` are those of parameters that tensor
    parallelism shards, by name, and ``summed`` the axes over which their gradients are partial sums; ``decided`` says which pin or op made
    them so, by name and axis, and ``notes`` what did not get its way, or may be not the best.  ``tensor`` are the axes, or sub-axes, with their sizes.
    ``predicted()`` are the seconds of a microbatch, by which a solver chooses, and ``decisions`` what one has chosen.
    """

    graph: fx.Graph
    normal: Normal
    replicated: dict[tuple[str, str], list[fx.Node]] = field(default_factory=dict)
    collectives: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    layouts: dict[str, Layout] = field(default_factory=dict)
    summed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    decided: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    tensor: Mapping[str, int] = field(default_factory=dict)
    predicted: Callable[[], Seconds] | None = None
    repeats: Repeats | None = None
    decisions: Decisions | None = None


def propagate(
    normal: Normal, rules: Callable[[fx.Node], Rule | None], *, counted: fx.Node | None = None,
    summands: Collection[fx.Node] = (), dropout: str = "exact", device: torch.device | None = None, tensor: Tensors | None = None,
) -> Sharded:  # fmt: skip
    """Shard ``normal`` over the batch axes, and over those of ``tensor`` as that says.

    ``counted`` is the cross-entropy whose count of targets the step knows beforehand; ``summands`` as :func:`loss.summands` finds them.
    """
    return Propagation(normal, rules, counted, summands, dropout, device or torch.device("cpu"), tensor or Tensors()).run()


class Propagation(Layouts):
    """The state of the walk, and what rules call."""

    def __init__(
        self, normal: Normal, rules: Callable[[fx.Node], Rule | None], counted: fx.Node | None, summands: Collection[fx.Node],
        dropout: str, device: torch.device, tensor: Tensors,
    ) -> None:  # fmt: skip
        self.normal, self.captured, self.tensor = normal, normal.captured, tensor
        self.rules, self.counted, self.summands = rules, counted, summands
        self.dropout, self.device = dropout, device
        self.graph = fx.Graph()
        self.env = self.graph.placeholder("env")
        self.value: dict[fx.Node, Any] = {}
        self.moves = Moves(self)
        self.sharded = Sharded(self.graph, normal)
        self.current: fx.Node | None = None
        self.groups = (ROWS, *tensor.axes)
        self.carrying = with_gradient(self.captured, normal.graph)
        self.of_batch = _following(normal.graph, self.captured.fields)

    # ---- the walk ------------------------------------------------------------------------------------------------

    def run(self) -> Sharded:
        nodes = list(self.normal.graph.nodes)
        places = [n for n in nodes if n.op == "placeholder"]
        copies = [self.graph.placeholder(n.name) for n in places]
        self.sizes = Sizes(self.graph, self.env)
        for node in places:
            size = node.meta["val"].shape[0] if node.name in self.captured.fields else None
            if isinstance(size, torch.SymInt):
                self.sizes.symbol, self.sizes.example = size.node.expr, concrete(size)
        forms = {n: self.form(n) for n in nodes if n.op == "call_function" and is_tensor(n) and not picks(n)}
        rows = Walk(self, forms).run()
        self.assignments: dict[str, Assignment] = {ROWS: rows}
        found, divided = self.assigned(forms, rows)
        if divided is not None:
            self.tensor = replace(self.tensor, axes=divided)
            found, _ = self.assigned(forms, rows)
        self.groups, self.sharded.tensor = (ROWS, *self.tensor.axes), self.tensor.axes
        self.assignments |= {axis: found[axis] for axis in self.tensor.axes}
        for axis in self.tensor.axes:
            postpone(self, forms, axis, rows, found[axis])
        self.sharded.predicted = functools.cache(lambda: predicted(self, forms))
        self.sharded.repeats = lambda rows: repeats(self, rows)
        for node, copy in zip(places, copies, strict=True):
            self.placeholder(node, copy)
        for node in nodes:
            self.current = node
            if node.op == "call_function":
                self.value[node] = self.held(node, self.step(node, forms.get(node)))
            elif node.op == "output":
                loss, *updates = node.args[0]
                partial = self.convert(self.value[loss], dict.fromkeys(self.groups, "P"))
                self.graph.output((partial, *(self.whole(u) for u in updates)))
        eliminate_dead(self.graph)
        return self.sharded

    def assigned(
        self, forms: Mapping[fx.Node, Form | None], rows: Assignment
    ) -> tuple[Mapping[str, Assignment], Mapping[str, int] | None]:  # fmt: skip
        """What is done over each axis of tensor parallelism; and the axes to take instead, if one has to be two sub-axes."""
        if self.tensor.axes and self.tensor.plan == "auto":
            found = solve(self, forms).assignments
            self.sharded.decisions = Decisions.of(self, forms, found)
            return found, None
        if self.tensor.axes and self.tensor.plan in PLANS:
            pins, pinned = read_pins(self), dict[str, Assignment]()
            for axis in self.tensor.axes:
                pinned[axis] = PinnedWalk(self, forms, axis, rows, pinned, pins).run()
            return pinned, None
        return recipe(self, forms, rows)

    def form(self, node: fx.Node) -> Form | None:
        self.current = node
        rule = self.rules(node)
        return None if rule is None else rule(self, node)

    def placeholder(self, node: fx.Node, new: fx.Node) -> None:
        value = node.meta["val"]
        new.meta["val"] = value
        parameter = self.captured.parameters.get(node.name)
        states = {group: one.states[node][0] for group, one in self.assignments.items()}
        # A field comes with all rows of this rank's part of the batch, of which axes that shard rows again take theirs.
        born = {g: s if g == ROWS or parameter is not None else "I" for g, s in states.items()}
        layout = self.layout_of(self.shape(node), born)
        if parameter is not None and layout.axes_used:
            self.sharded.layouts[parameter] = layout
        if parameter is not None:
            self.sharded.summed[parameter] = tuple(g for g, s in states.items() if s == "R" and g != ROWS)
        grad = parameter is not None and bool(self.captured.trainable.get(parameter, True))
        self.annotate(new, layout, born, grad)
        self.value[node] = self.convert(new, states)

    def step(self, node: fx.Node, form: Form | None) -> Any:
        if picks(node):
            source, index = self.value[node.args[0]], node.args[1]
            new = self.graph.call_function(operator.getitem, (source, index))
            states = source.meta["states"][index]
            grad = source.meta["grad"] and differentiable(node.meta["val"]) and index not in source.meta.get("alike", ())
            self.annotate(new, source.meta["layout"][index], states, grad, node)
            self.learn_sizes(new, node.meta["val"])
            return new
        if not is_tensor(node):
            return self.number(node)
        return self.replicate(node) if form is None else self.local(node, form)

    def held(self, node: fx.Node, value: Any) -> Any:
        """The value of a node, moved to where users want it to be."""
        goals = {group: one.held[node] for group, one in self.assignments.items() if node in one.held}
        return self.convert(value, goals) if goals else value

    def local(self, node: fx.Node, form: Form) -> fx.Node:
        """Emit an op by its strategies."""
        strategies = {group: one.strategies[node] for group, one in self.assignments.items()}
        goals = [{g: s.operands[i] for g, s in strategies.items()} for i in range(len(form.operands))]
        values = [self.convert(self.value[o], goal) for (o, _), goal in zip(form.operands, goals, strict=True)]
        states = [{g: s.results[i] for g, s in strategies.items()} for i in range(len(form.results))]
        layouts = [self.layout_of(shape, one) for shape, one in zip(self.shapes(node), states, strict=True)]
        solved = Solved(values, layouts, strategies)
        new = self.plain(node, solved) if form.emit is None else form.emit(self, solved)
        several = isinstance(node.meta["val"], tuple | list)
        new.meta["states"] = states if several else states[0]
        new.meta["alike"] = form.alike
        return new

    def plain(self, node: fx.Node, solved: Solved) -> fx.Node:
        """The same op, on local operands."""
        args, kwargs = self.filled(node, solved.values)
        several = isinstance(node.meta["val"], tuple | list)
        return self.emit(node, args, kwargs, solved.layouts if several else solved.layout)

    def number(self, node: fx.Node) -> Any:
        """Arithmetic on sizes; an op that reads a tensor's value (``item``) reads that of the whole batch."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and not of_data(value):
            return self.sizes.node(value)
        new = self.graph.call_function(node.target, self.operands(node.args), self.operands(node.kwargs))
        if isinstance(value, torch.SymInt):
            self.sizes.data[value.node.expr] = new
        return new

    def replicate(self, node: fx.Node) -> fx.Node:
        """The fall-back: every rank computes the op whole."""
        name = getattr(schema(node.target), "name", str(node.target)).removeprefix("aten::")
        if getattr(schema(node.target), "is_mutable", False) or "ordinal" in node.meta:
            raise Uncapturable(f"{node.target} draws random numbers or writes in place, and there is no rule for it")
        if name in _BY_STRIDE:
            raise Uncapturable(f"{node.target} depends on how a tensor lies in memory, which is different on several ranks")
        operands = [a for a in node.all_input_nodes if is_tensor(a)]
        if (self.tensor.axes or node in self.of_batch) and self.large(node, operands):
            self.sharded.replicated.setdefault((str(node.target), module_path(node)), []).append(node)
        layouts = [Layout.replicated(s) for s in self.shapes(node)]
        many = isinstance(node.meta["val"], tuple | list)
        new = self.emit(node, self.operands(node.args), self.operands(node.kwargs), layouts if many else layouts[0])
        states = dict.fromkeys(self.groups, "I")
        new.meta["states"] = [states] * len(layouts) if many else states
        if not many:
            self.learn_sizes(new, node.meta["val"])
        return new

    def large(self, node: fx.Node, operands: Sequence[fx.Node]) -> bool:
        """Whether an op has to do with more than single numbers; what it costs is measured when that is asked for."""
        shapes = [*self.shapes(node), *(shape for o in operands for shape in self.shapes(o))]
        return any(math.prod(shape) > 1 for shape in shapes)

    def learn_sizes(self, new: fx.Node, value: Tensor) -> None:
        """Sizes that depend on data can be asked of the tensor that has them."""
        for d, size in enumerate(value.shape):
            if of_data(size) and size.node.expr.is_Symbol and size.node.expr not in self.sizes.data:
                self.sizes.data[size.node.expr] = self.graph.call_function(aten.sym_size.int, (new, d))

    # ---- values ----------------------------------------------------------------------------------------

    @staticmethod
    def layout(value: Any) -> Any:
        return value.meta["layout"]

    def annotate(self, new: fx.Node, layout: Any, states: Any, grad: bool, old: fx.Node | None = None) -> fx.Node:
        new.meta["layout"], new.meta["states"], new.meta["grad"] = layout, states, grad
        if old is not None:
            new.meta["val"] = old.meta.get("val")
            new.meta["path"] = module_path(old)
            new.meta["origin"] = old
        return new

    def annotate_move(self, new: fx.Node, source: fx.Node, states: Mapping[str, State]) -> fx.Node:
        layout = self.layout_of(source.meta["layout"].shape, states)
        self.annotate(new, layout, states, source.meta["grad"])
        new.meta["val"], new.meta["path"] = source.meta.get("val"), module_path(self.current)
        new.meta["cause"] = str(getattr(self.current, "target", ""))
        return new

    def count(self, kind: str, what: str = "") -> None:
        """Note a collective that the current op needs."""
        self.sharded.collectives[(kind, what or str(getattr(self.current, "target", "")), module_path(self.current))] += 1

    def arguments(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda n: self.value[n])

    def operands(self, argument: Any) -> Any:
        """Arguments with every tensor as I."""
        return fx.map_arg(argument, lambda n: self.whole(n) if is_tensor(n) else self.value[n])

    def convert(self, value: fx.Node, goals: Mapping[str, State]) -> fx.Node:
        """``value`` in other states."""
        return self.moves.convert(value, goals)

    def whole(self, node: fx.Node) -> fx.Node:
        """A captured node's value as I."""
        return self.convert(self.value[node], dict.fromkeys(self.groups, "I"))

    # ---- what rules describe and emit ------------------------------------------------------------------------------------

    def labelled(
        self, node: fx.Node, operands: Sequence[tuple[fx.Node, Labels]], labels: Labels | Sequence[Labels],
        linear: str | Sequence[int] = (), several: bool = False, **more: Any,
    ) -> Form:  # fmt: skip
        """The form of an op; ``labels`` are those of its result, or of each of ``several``."""
        how: frozenset[int] | str = linear if isinstance(linear, str) else frozenset(linear)
        return Form(node, list(operands), list(labels) if several else [labels], how, **more)

    def filled(self, node: fx.Node, values: Sequence[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node with its tensors, in their order, replaced."""
        feed = iter(values)

        def replaced(a: fx.Node) -> Any:
            return next(feed) if is_tensor(a) else self.value[a]

        args = fx.map_arg(node.args, replaced)
        return args, fx.map_arg(node.kwargs, replaced)

    def emit(self, node: fx.Node, args: Any, kwargs: Any, layout: Any, target: Any = None) -> fx.Node:
        """Add an op; factories get this rank's device."""
        target = target or node.target
        kwargs = {k: (self.device if k == "device" else v) for k, v in dict(kwargs).items() if k not in _FACTORY_OPTIONS}
        if _is_factory(target):
            kwargs["device"] = self.device
        new = self.graph.call_function(target, tuple(args), kwargs)
        operands = [a for a in new.all_input_nodes if "grad" in a.meta]
        grad = any(a.meta["grad"] for a in operands) and differentiable(node.meta["val"])
        grad = grad and target is not aten.detach.default and op_name(node) not in _LIKE
        return self.annotate(new, layout, None, grad, node)


def _following(graph: fx.Graph, names: Collection[str]) -> set[fx.Node]:
    """The nodes that depend on the placeholders ``names``."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name in names if node.op == "placeholder" else any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def picks(node: fx.Node) -> bool:
    """Whether a node takes one of several results."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def _is_factory(target: Any) -> bool:
    described = schema(target)
    return (
        described is not None
        and any(a.name == "device" for a in described.arguments)
        and not any(isinstance(a.type, torch.TensorType) for a in described.arguments)
    )
