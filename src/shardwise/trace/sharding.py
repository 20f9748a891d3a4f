"""Propagation of the batch dim: from the graph of the whole batch to the local graph of one rank.

Batch fields start sharded over the batch axes on dim 0; every op's rule (``rules.py``) says where the sharding goes.  One
sentence gives all gradient reductions: *an op whose result is sharded or partial needs its replicated operands as R* (replicated,
gradient partial).  Parameters, and what is made of them alone, are R by birth: what accumulates in the gradient buffers is reduced at
the end of the step.

A tensor has at most one sharded factor here, the rows of the batch, inside one of its dims: pre × rows × post.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.core.layout import Factor, Layout
from shardwise.trace import ops
from shardwise.trace.capture import Uncapturable
from shardwise.trace.functional import Normal
from shardwise.trace.normalise import concrete, eliminate_dead

Place = tuple[int, int, int]
"""(dim, pre, post): dim ``dim`` of a tensor is pre × rows × post, and the rows are sharded."""

Rule = Callable[["Propagation", fx.Node], Any]


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
    dropout: str = "exact", device: torch.device | None = None,
) -> Sharded:  # fmt: skip
    """Shard ``normal`` over the batch ``axes``.  ``counted`` is the cross-entropy whose count of targets the step knows beforehand."""
    walk = Propagation(normal, rules, axes, counted, dropout, device or torch.device("cpu"))
    return walk.run()


class Propagation:
    """The state of the walk, and what rules call."""

    def __init__(
        self, normal: Normal, rules: Callable[[fx.Node], Rule | None], axes: tuple[str, ...], counted: fx.Node | None,
        dropout: str, device: torch.device,
    ) -> None:  # fmt: skip
        self.normal, self.captured = normal, normal.captured
        self.rules, self.axes, self.counted, self.dropout, self.device = rules, axes, counted, dropout, device
        self.graph = fx.Graph()
        self.env = self.graph.placeholder("env")
        self.value: dict[fx.Node, Any] = {}
        self.leaves: set[fx.Node] = set()
        self.moved: dict[tuple[fx.Node, Layout, str], fx.Node] = {}
        self.sharded = Sharded(self.graph, normal)
        self.current: fx.Node | None = None
        self.size = self.captured.hint
        self.symbol: Any = None

    # ---- the walk ------------------------------------------------------------------------------------------------

    def run(self) -> Sharded:
        nodes = list(self.normal.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.placeholder(node)
        self.rows = self.graph.call_function(ops.rows, (self.env,))
        self.local_rows = self.graph.call_function(ops.local_rows, (self.env,))
        for node in nodes:
            self.current = node
            if node.op == "call_function":
                self.value[node] = self.step(node)
            elif node.op == "output":
                loss, *updates = node.args[0]
                partial = Layout((), frozenset(self.axes))
                outputs = (self.convert(self.value[loss], partial), *(self.whole(u) for u in updates))
                self.graph.output(outputs)
        eliminate_dead(self.graph)
        return self.sharded

    def placeholder(self, node: fx.Node) -> None:
        new = self.graph.placeholder(node.name)
        value = node.meta["val"]
        new.meta["val"] = value
        layout = Layout.replicated(self.shape(node))
        grad = False
        if node.name in self.captured.fields:
            layout = self.at(self.shape(node), (0, 1, 1))
            if isinstance(value.shape[0], torch.SymInt):
                self.symbol = value.shape[0].node.expr
        elif node.name in self.captured.parameters:
            self.leaves.add(new)
            grad = bool(self.captured.trainable.get(self.captured.parameters[node.name], True))
        self.annotate(new, layout, grad)
        self.value[node] = new

    def step(self, node: fx.Node) -> Any:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = self.value[node.args[0]]
            new = self.graph.call_function(operator.getitem, (source, node.args[1]))
            grad = source.meta["grad"] and node.meta["val"].is_floating_point()
            if source in self.leaves:
                self.leaves.add(new)
            return self.annotate(new, source.meta["layout"][node.args[1]], grad, node)
        if node.target is torch.ops.aten.sym_size.int:
            return self.symbolic(node.meta["val"])
        if not _is_tensor(node):
            return self.graph.call_function(node.target, self.arguments(node.args), self.arguments(node.kwargs))
        rule = self.rules(node)
        new = rule(self, node) if rule else None
        return self.replicate(node) if new is None else new

    def replicate(self, node: fx.Node) -> fx.Node:
        """The fall-back: every rank computes the op for the whole batch."""
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False) or "ordinal" in node.meta:
            raise Uncapturable(f"{node.target} draws random numbers or writes in place, and there is no rule for it")
        operands = [a for a in node.all_input_nodes if _is_tensor(a)]
        if any(self.layout(self.value[a]).axes_used for a in operands):
            self.sharded.replicated[(str(node.target), module_path(node))] += 1
        args = fx.map_arg(node.args, lambda a: self.whole(a) if _is_tensor(a) else self.value[a])
        kwargs = fx.map_arg(node.kwargs, lambda a: self.whole(a) if _is_tensor(a) else self.value[a])
        return self.emit(node, args, kwargs, self.replicated_layouts(node))

    # ---- values and layouts ----------------------------------------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(concrete(s) for s in node.meta["val"].shape)

    def shapes(self, node: fx.Node) -> list[tuple[int, ...]]:
        value = node.meta["val"]
        values = value if isinstance(value, tuple | list) else [value]
        return [tuple(concrete(s) for s in v.shape) for v in values]

    def is_rows(self, size: Any) -> bool:
        """Whether a size in the captured graph is the symbolic number of rows."""
        return isinstance(size, torch.SymInt) and size.node.expr == self.symbol

    def at(self, shape: Sequence[int], place: Place | None) -> Layout:
        """The layout of a tensor of whole ``shape`` whose rows are sharded at ``place``."""
        dims: list[tuple[Factor, ...]] = [(Factor(s),) for s in shape]
        if place is not None:
            dim, pre, post = place
            ones = [Factor(f) for f in (pre,) if f != 1], [Factor(f) for f in (post,) if f != 1]
            dims[dim] = (*ones[0], Factor(shape[dim] // (pre * post), self.axes), *ones[1])
        return Layout(tuple(dims))

    @staticmethod
    def layout(value: Any) -> Any:
        return value.meta["layout"]

    @staticmethod
    def place(layout: Layout) -> Place | None:
        """Where the rows are sharded, if they are."""
        for dim, factors in enumerate(layout.dims):
            for i, factor in enumerate(factors):
                if factor.axes:
                    return dim, math.prod(f.size for f in factors[:i]), math.prod(f.size for f in factors[i + 1 :])
        return None

    def replicated_layouts(self, node: fx.Node) -> Any:
        layouts = [Layout.replicated(s) for s in self.shapes(node)]
        return layouts if isinstance(node.meta["val"], tuple | list) else layouts[0]

    def annotate(self, new: fx.Node, layout: Any, grad: bool, old: fx.Node | None = None) -> fx.Node:
        new.meta["layout"], new.meta["grad"] = layout, grad
        if old is not None:
            new.meta["val"] = old.meta.get("val")
            new.meta["path"] = module_path(old)
            new.meta["origin"] = old
        return new

    def symbolic(self, value: Any) -> Any:
        """A size of the whole batch, as a number or as a node."""
        if not isinstance(value, torch.SymInt):
            return int(value)
        expr = value.node.expr
        if expr == self.symbol:
            return self.rows
        if expr.is_number:
            return int(expr)
        ratio = expr / self.symbol
        if ratio.is_Integer:
            return self.graph.call_function(operator.mul, (self.rows, int(ratio)))
        raise Uncapturable(f"a size of {expr} cannot be told from the number of rows")

    def arguments(self, argument: Any) -> Any:
        return fx.map_arg(argument, lambda n: self.value[n])

    # ---- conversions -------------------------------------------------------------------------------------------------

    def convert(self, value: fx.Node, goal: Layout, need: str = "I") -> fx.Node:
        """``value`` in layout ``goal``; ``need`` says whether a replicated goal is I or R."""
        source: Layout = value.meta["layout"]
        start, end = self.place(source), self.place(goal)
        if start == end and source.partial == goal.partial and (start or source.partial):
            return value
        key = (value, goal, need)
        if key not in self.moved:
            self.moved[key] = self._convert(value, source, goal, start, end, need)
        return self.moved[key]

    def _convert(self, value: fx.Node, source: Layout, goal: Layout, start: Place | None, end: Place | None, need: str) -> fx.Node:
        plain, leaf = Layout.replicated(source.shape), value in self.leaves
        if start is not None:
            if end is not None or goal.partial:
                return self.convert(self.convert(value, plain), goal)
            return self.move(ops.gather, value, (*start, need), plain, "all_gather")
        if source.partial:
            if end is not None:
                return self.move(ops.scatter, value, end, goal, "reduce_scatter")
            return self.move(ops.all_reduce, value, (need,), plain, "all_reduce")
        if end is not None:
            return self.move(ops.shard_leaf if leaf else ops.shard, value, end, goal, "" if leaf else "slice")
        if goal.partial:
            return self.move(ops.partial, self.convert(value, plain), (), goal, "")
        if leaf == (need == "R") or not value.meta["grad"]:
            return value
        return self.move(ops.own if leaf else ops.replicate, value, (), plain, "" if leaf else "all_reduce in backward")

    def move(self, function: Any, value: fx.Node, args: tuple[Any, ...], layout: Layout, kind: str) -> fx.Node:
        new = self.graph.call_function(function, (self.env, value, *args))
        self.annotate(new, layout, value.meta["grad"])
        new.meta["val"], new.meta["path"] = value.meta.get("val"), module_path(self.current)
        if kind:
            self.sharded.collectives[(kind, str(getattr(self.current, "target", "")), module_path(self.current))] += 1
        return new

    def whole(self, node: fx.Node) -> fx.Node:
        """An operand as I."""
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
            place = self.place(self.layout(self.value[node]))
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

    def result(
        self, shape: Sequence[int], labels: Sequence[Any], chosen: tuple[Any, int, int] | None, partial: bool
    ) -> Layout:
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
        feed = iter(values)

        def replaced(a: fx.Node) -> Any:
            return next(feed) if _is_tensor(a) else self.value[a]

        args, kwargs = fx.map_arg(node.args, replaced), fx.map_arg(node.kwargs, replaced)
        layouts: Any
        if several:
            layouts = [self.result(s, lab, chosen, partial) for s, lab in zip(self.shapes(node), labels, strict=True)]
        else:
            layouts = self.result(self.shape(node), labels, chosen, partial)
        return self.emit(node, args, kwargs, layouts)

    def emit(self, node: fx.Node, args: Any, kwargs: Any, layout: Any, target: Any = None) -> fx.Node:
        """Add an op; factories get this rank's device."""
        target = target or node.target
        kwargs = {k: (self.device if k == "device" else v) for k, v in dict(kwargs).items() if k not in ("pin_memory", "layout")}
        if node.op == "call_function" and _is_factory(target):
            kwargs["device"] = self.device
        new = self.graph.call_function(target, tuple(args), kwargs)
        operands = [a for a in new.all_input_nodes if "grad" in a.meta]
        value = node.meta["val"]
        first = value[0] if isinstance(value, tuple | list) else value
        grad = any(a.meta["grad"] for a in operands) and first.is_floating_point() and target is not torch.ops.aten.detach.default
        if grad and not _axes_used(layout) and all(a in self.leaves for a in operands if a.meta["grad"]):
            self.leaves.add(new)  # made of parameters alone: a partial gradient passes through it to them
        return self.annotate(new, layout, grad, node)

    def local_sizes(self, sizes: Sequence[Any], layout: Layout) -> list[Any]:
        """Size arguments for a result in ``layout``: local on the sharded dim, and without -1 where that is known."""
        place = self.place(layout)
        out = list(sizes)
        if place is None:
            return out
        dim, pre, post = place
        for d, size in enumerate(layout.shape):
            if d != dim and isinstance(out[d], int) and out[d] == -1:
                out[d] = size
        times = pre * post
        out[dim] = self.local_rows if times == 1 else self.graph.call_function(operator.mul, (self.local_rows, times))
        return out


def _axes_used(layout: Any) -> bool:
    return any(one.axes_used for one in (layout if isinstance(layout, list) else [layout]))


def _is_factory(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(a.name == "device" for a in schema.arguments) and not any(
        isinstance(a.type, torch.TensorType) for a in schema.arguments
    )


def _is_tensor(node: fx.Node) -> bool:
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
