"""Propagation of the batch dim: from the graph of the whole batch to the local graph of one rank.

Batch fields start sharded over the batch axes on dim 0; every op's rule (package ``rules``) says where the sharding goes.  One
sentence gives all gradient reductions: *an op whose result is sharded or partial needs its replicated operands as R* (replicated,
gradient partial).  Parameters, and what is made of them alone, are R by birth: what accumulates in the gradient buffers is reduced at
the end of the step.

A tensor has at most one sharded factor here, the rows of the batch, inside one of its dims: pre × rows × post.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.core.layout import Layout
from shardwise.trace.capture import Uncapturable
from shardwise.trace.functional import Normal
from shardwise.trace.moves import Moves, Place, layout_at, place_of
from shardwise.trace.normalise import eliminate_dead
from shardwise.trace.sizes import Sizes, concrete, expression
from shardwise.trace.torch_private import schema

aten = torch.ops.aten

Rule = Callable[["Propagation", fx.Node], Any]
"""What emits the local form of a captured op, or returns None where it does not cover the op, so used."""

_BY_STRIDE = {"as_strided", "as_strided_scatter", "as_strided_copy", "_reshape_alias"}
_FACTORY_OPTIONS = ("pin_memory", "layout")


@dataclass
class Sharded:
    """A local graph.  Its placeholders are ``env`` and those of the normal graph; its output is ``(loss as partial sum, *updates)``.

    ``replicated`` counts the ops without a rule, as (op, module path), that every rank computes for the whole batch;
    ``collectives`` those that the batch dim's propagation put in, as (kind, op that needs it, module path).
    """

    graph: fx.Graph
    normal: Normal
    replicated: Counter[tuple[str, str]] = field(default_factory=Counter)
    collectives: Counter[tuple[str, str, str]] = field(default_factory=Counter)


def propagate(
    normal: Normal, rules: Callable[[fx.Node], Rule | None], axes: tuple[str, ...], *, counted: fx.Node | None = None,
    summands: Collection[fx.Node] = (), dropout: str = "exact", device: torch.device | None = None,
) -> Sharded:  # fmt: skip
    """Shard ``normal`` over the batch ``axes``.

    ``counted`` is the cross-entropy whose count of targets the step knows beforehand; ``summands`` as :func:`loss.summands` finds them.
    """
    return Propagation(normal, rules, axes, counted, summands, dropout, device or torch.device("cpu")).run()


class Propagation:
    """The state of the walk, and what rules call."""

    def __init__(
        self, normal: Normal, rules: Callable[[fx.Node], Rule | None], axes: tuple[str, ...], counted: fx.Node | None,
        summands: Collection[fx.Node], dropout: str, device: torch.device,
    ) -> None:  # fmt: skip
        self.normal, self.captured = normal, normal.captured
        self.rules, self.axes, self.counted, self.summands = rules, axes, counted, summands
        self.dropout, self.device = dropout, device
        self.graph = fx.Graph()
        self.env = self.graph.placeholder("env")
        self.value: dict[fx.Node, Any] = {}
        self.leaves: set[fx.Node] = set()
        self.moves = Moves(self.graph, self.env, axes, self.leaves, self.count, self._annotate_move)
        self.sharded = Sharded(self.graph, normal)
        self.current: fx.Node | None = None

    # ---- the walk ------------------------------------------------------------------------------------------------

    def run(self) -> Sharded:
        nodes = list(self.normal.graph.nodes)
        places = [n for n in nodes if n.op == "placeholder"]
        copies = [self.graph.placeholder(n.name) for n in places]
        self.sizes = Sizes(self.graph, self.env)
        for node, copy in zip(places, copies, strict=True):
            self.placeholder(node, copy)
        for node in nodes:
            self.current = node
            if node.op == "call_function":
                self.value[node] = self.step(node)
            elif node.op == "output":
                loss, *updates = node.args[0]
                partial = Layout((), frozenset(self.axes))
                self.graph.output((self.convert(self.value[loss], partial), *(self.whole(u) for u in updates)))
        eliminate_dead(self.graph)
        return self.sharded

    def placeholder(self, node: fx.Node, new: fx.Node) -> None:
        value = node.meta["val"]
        new.meta["val"] = value
        layout = Layout.replicated(self.shape(node))
        grad = False
        if node.name in self.captured.fields:
            layout = self.at(self.shape(node), (0, 1, 1))
            if isinstance(value.shape[0], torch.SymInt):
                self.sizes.symbol = value.shape[0].node.expr
        elif node.name in self.captured.parameters:
            self.leaves.add(new)
            grad = bool(self.captured.trainable.get(self.captured.parameters[node.name], True))
        self.annotate(new, layout, grad)
        self.value[node] = new

    def step(self, node: fx.Node) -> Any:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = self.value[node.args[0]]
            new = self.graph.call_function(operator.getitem, (source, node.args[1]))
            if source in self.leaves:
                self.leaves.add(new)
            layout = source.meta["layout"][node.args[1]]
            return self.annotate(new, layout, source.meta["grad"] and differentiable(node.meta["val"]), node)
        if not is_tensor(node):
            return self.number(node)
        rule = self.rules(node)
        new = rule(self, node) if rule else None
        return self.replicate(node) if new is None else new

    def number(self, node: fx.Node) -> Any:
        """Arithmetic on sizes; an op that reads a tensor's value (``item``) reads that of the whole batch."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.has_hint():
            return self.sizes.node(value)
        new = self.graph.call_function(node.target, self.operands(node.args), self.operands(node.kwargs))
        if isinstance(value, torch.SymInt):
            self.sizes.data[value.node.expr] = new
        return new

    def replicate(self, node: fx.Node) -> fx.Node:
        """The fall-back: every rank computes the op for the whole batch."""
        name = getattr(schema(node.target), "name", str(node.target)).removeprefix("aten::")
        if getattr(schema(node.target), "is_mutable", False) or "ordinal" in node.meta:
            raise Uncapturable(f"{node.target} draws random numbers or writes in place, and there is no rule for it")
        if name in _BY_STRIDE:
            raise Uncapturable(f"{node.target} depends on how a tensor lies in memory, which is different on several ranks")
        operands = [a for a in node.all_input_nodes if is_tensor(a)]
        if any(self.layout(self.value[a]).axes_used for a in operands):
            self.sharded.replicated[(str(node.target), module_path(node))] += 1
        layouts = [Layout.replicated(s) for s in self.shapes(node)]
        many = isinstance(node.meta["val"], tuple | list)
        new = self.emit(node, self.operands(node.args), self.operands(node.kwargs), layouts if many else layouts[0])
        if not many:
            self.learn_sizes(new, node.meta["val"])
        return new

    def learn_sizes(self, new: fx.Node, value: Tensor) -> None:
        """Sizes that depend on data can be asked of the tensor that has them."""
        for d, size in enumerate(value.shape):
            unknown = isinstance(size, torch.SymInt) and not size.node.has_hint() and size.node.expr.is_Symbol
            if unknown and size.node.expr not in self.sizes.data:
                self.sizes.data[size.node.expr] = self.graph.call_function(aten.sym_size.int, (new, d))

    # ---- values and layouts ----------------------------------------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(concrete(s) for s in node.meta["val"].shape)

    def shapes(self, node: fx.Node) -> list[tuple[int, ...]]:
        value = node.meta["val"]
        return [tuple(concrete(s) for s in v.shape) for v in (value if isinstance(value, tuple | list) else [value])]

    def expressions(self, node: fx.Node) -> list[Any]:
        """The sizes of a tensor, comparable for every number of rows."""
        return [expression(s) for s in node.meta["val"].shape]

    @property
    def rows(self) -> Any:
        """The number of rows as an expression: a symbol, or a number where the batch dim is static."""
        return self.captured.rows if self.sizes.symbol is None else self.sizes.symbol

    def at(self, shape: Sequence[int], place: Place | None) -> Layout:
        """The layout of a tensor of whole ``shape`` whose rows are sharded at ``place``."""
        return layout_at(shape, place, self.axes)

    @staticmethod
    def layout(value: Any) -> Any:
        return value.meta["layout"]

    def place(self, node: fx.Node) -> Place | None:
        """Where the rows of a captured node's value are sharded, if they are."""
        return place_of(self.value[node].meta["layout"])

    def annotate(self, new: fx.Node, layout: Any, grad: bool, old: fx.Node | None = None) -> fx.Node:
        new.meta["layout"], new.meta["grad"] = layout, grad
        if old is not None:
            new.meta["val"] = old.meta.get("val")
            new.meta["path"] = module_path(old)
            new.meta["origin"] = old
        return new

    def _annotate_move(self, new: fx.Node, source: fx.Node, layout: Layout) -> None:
        self.annotate(new, layout, source.meta["grad"])
        new.meta["val"], new.meta["path"] = source.meta.get("val"), module_path(self.current)

    def count(self, kind: str, what: str = "") -> None:
        """Note a collective that the current op needs."""
        self.sharded.collectives[(kind, what or str(getattr(self.current, "target", "")), module_path(self.current))] += 1

    def arguments(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda n: self.value[n])

    def operands(self, argument: Any) -> Any:
        """Arguments with every tensor as I."""
        return fx.map_arg(argument, lambda n: self.whole(n) if is_tensor(n) else self.value[n])

    def convert(self, value: fx.Node, goal: Layout, need: str = "I") -> fx.Node:
        """``value`` in layout ``goal``; ``need`` says whether a replicated goal is I or R."""
        return self.moves.convert(value, goal, need)

    def whole(self, node: fx.Node) -> fx.Node:
        """A captured node's value as I."""
        value = self.value[node]
        return self.convert(value, Layout.replicated(value.meta["layout"].shape))

    # ---- the solver ---------------------------------------------------------------------------------------------------

    def solve(
        self, operands: Sequence[tuple[fx.Node, Sequence[Any]]], linear: str | Iterable[int] = ()
    ) -> tuple[list[fx.Node], tuple[Any, int, int] | None, bool]:
        """Bring operands into agreeing layouts.

        Each operand comes with a label per dim: dims with the same label go together, None is a dim that must be whole.  ``linear``
        names operands in which the op is linear, by position, or is "add" where it is in all of them together.

        Returns the operands' values, then the label that is sharded with its (pre, post), then whether the result is a partial sum
        because an operand is.
        """
        chosen: tuple[Any, int, int] | None = None
        weight = -1
        for node, labels in operands:
            place = self.place(node)
            size = math.prod(self.shape(node))
            if place is not None and labels[place[0]] is not None and size > weight:
                chosen, weight = (labels[place[0]], place[1], place[2]), size
        partial = [i for i, (node, _) in enumerate(operands) if self.layout(self.value[node]).partial]
        keep = chosen is None and bool(partial) and (linear == "add" or partial in [[i] for i in linear])
        born = all(self.value[node] in self.leaves for node, _ in operands if self.value[node].meta["grad"])
        need = "R" if chosen is not None or keep or born else "I"
        values = []
        for i, (node, labels) in enumerate(operands):
            value, shape = self.value[node], self.shape(node)
            if chosen is not None and chosen[0] in labels:
                place = (list(labels).index(chosen[0]), *chosen[1:])
                values.append(self.convert(value, self.at(shape, place)))
            elif keep and (linear == "add" or i in partial):
                values.append(self.convert(value, Layout(Layout.replicated(shape).dims, frozenset(self.axes))))
            else:
                values.append(self.convert(value, Layout.replicated(shape), need))
        return values, chosen, keep

    def result(self, shape: Sequence[int], labels: Sequence[Any], chosen: tuple[Any, int, int] | None, partial: bool) -> Layout:
        """The layout of a result with these labels: sharded where the chosen label is, a partial sum where it was summed away."""
        if chosen is not None and chosen[0] in labels:
            return self.at(shape, (list(labels).index(chosen[0]), *chosen[1:]))
        return Layout(Layout.replicated(shape).dims, frozenset(self.axes) if partial or chosen is not None else frozenset())

    def labelled(
        self, node: fx.Node, operands: Sequence[tuple[fx.Node, Sequence[Any]]], labels: Sequence[Any] | Sequence[Sequence[Any]],
        linear: str | Iterable[int] = (), several: bool = False,
    ) -> fx.Node:  # fmt: skip
        """Solve and emit an op whose arguments stay as they are; ``operands`` in the order of the node's arguments."""
        values, chosen, partial = self.solve(operands, linear)
        args, kwargs = self.filled(node, values)
        layouts: Any
        if several:
            layouts = [self.result(s, lab, chosen, partial) for s, lab in zip(self.shapes(node), labels, strict=True)]
        else:
            layouts = self.result(self.shape(node), labels, chosen, partial)
        return self.emit(node, args, kwargs, layouts)

    def filled(self, node: fx.Node, values: Iterable[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        grad = any(a.meta["grad"] for a in operands) and differentiable(node.meta["val"]) and target is not aten.detach.default
        if grad and not _axes_used(layout) and all(a in self.leaves for a in operands if a.meta["grad"]):
            self.leaves.add(new)  # made of parameters alone: a partial gradient passes through it to them
        return self.annotate(new, layout, grad, node)

    def local_sizes(self, node: fx.Node, layout: Layout, given: Sequence[Any] | None = None) -> list[Any]:
        """The sizes of a node's result in ``layout``, local on the sharded dim; ``given`` are the op's own size arguments."""
        place = place_of(layout)
        out = []
        for d, size in enumerate(node.meta["val"].shape):
            if place is not None and d == place[0]:
                out.append(self.sizes.local(place[1] * place[2]))
            elif given is None or (isinstance(given[d], int) and given[d] == -1):
                out.append(self.sizes.node(size))
            else:
                out.append(self.arguments(given[d]) if isinstance(given[d], fx.Node) else given[d])
        return out


def differentiable(value: Any) -> bool:
    """Whether a value, or one of several, can have a gradient."""
    if isinstance(value, tuple | list):
        return any(differentiable(v) for v in value)
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _axes_used(layout: Any) -> bool:
    return any(one.axes_used for one in (layout if isinstance(layout, list) else [layout]))


def _is_factory(target: Any) -> bool:
    described = schema(target)
    return (
        described is not None
        and any(a.name == "device" for a in described.arguments)
        and not any(isinstance(a.type, torch.TensorType) for a in described.arguments)
    )


def is_tensor(node: fx.Node) -> bool:
    """Whether a captured node's value is a tensor or holds some."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value))


def module_path(node: fx.Node | None) -> str:
    """The path of the module that a captured op came from, in the user's model."""
    if node is None:
        return ""
    if "path" in node.meta:
        return str(node.meta["path"])
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("module").removeprefix(".")
