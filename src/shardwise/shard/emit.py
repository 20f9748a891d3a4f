"""The emitter makes the local graph of one rank from what has been chosen for each op of the captured graph.

It moves operands to the states that an op's strategies want, makes sizes local, and gives results their layouts.  All
values keep the metadata of the whole batch's graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.backend import Backend
from shardwise.core.fields import is_kept, is_output
from shardwise.core.layout import Layout
from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.captured import Uncapturable
from shardwise.graph.naming import module_path
from shardwise.graph.normalise import eliminate_dead
from shardwise.graph.schema import as_result, differentiable, is_tensor, selects_result
from shardwise.graph.sizes import depends_on_data, expression
from shardwise.graph.torch_private import schema
from shardwise.ops import collectives
from shardwise.ops.env import ROWS
from shardwise.shard.assignment import Assignment
from shardwise.shard.context import ShardingContext
from shardwise.shard.local_graph import LocalGraph
from shardwise.shard.op_spec import Emission, OpSharding, OwnCall, Placement, Shard
from shardwise.shard.redistribute import Redistribution

aten = torch.ops.aten

_FACTORY_OPTIONS = ("pin_memory", "layout")


class Emitter(LocalGraph):
    """This makes the local graph by ``assignments``, one for each group of axes.

    The graph's output is ``(loss as partial sum, *updates, *outputs)``; of the model's outputs it has this rank's rows,
    whole over the other axes.  ``replicated`` are the ops without a rule that every
    rank computes whole, by (op, module path); ``layouts`` are those of the parameters that tensor parallelism shards,
    by name, and ``summed`` are the axes over which parameters' gradients are partial sums.
    """

    def __init__(self, context: ShardingContext, assignments: Mapping[str, Assignment]) -> None:
        super().__init__(context)
        self.assignments, self.groups = assignments, (ROWS, *context.tensor.axes)
        self.moves = Redistribution(self)
        self.of_batch = _following(context.normal.graph, context.captured.fields)
        self.replicated: dict[tuple[str, str], list[fx.Node]] = {}
        self.layouts: dict[str, Layout] = {}
        self.summed: dict[str, tuple[str, ...]] = {}
        self.kept: dict[str, Placement] = {}  # how what is kept lies on the axes of the batch, by name

    def run(self) -> None:
        """Make the whole graph."""
        for node, copy in zip(self.places, self.copies, strict=True):
            self.placeholder(node, copy)
        for node in self.context.normal.graph.nodes:
            self.current = node
            if node.op == "call_function":
                self.value[node] = self.held(node, self.step(node))
            elif node.op == "output":
                loss, *updates = node.args[0]
                partial = self.convert(self.value[loss], dict.fromkeys(self.groups, "P"))
                self.graph.output((partial, *map(self.beside_loss, updates, self.context.normal.updates)))
        eliminate_dead(self.graph)

    def placeholder(self, node: fx.Node, new: fx.Node) -> None:
        value = node.meta["val"]
        new.meta["val"] = value
        parameter = self.context.parameters.get(node)
        states = {group: one.states[node][0] for group, one in self.assignments.items()}
        # A field comes with all rows of this rank's part of the batch; axes that shard rows again take pieces of these.
        born = {g: s if g == ROWS or parameter is not None else "I" for g, s in states.items()}
        layout = self.context.layout_of(self.context.shape(node), born)
        if parameter is not None and layout.sharding_axes:
            self.layouts[parameter] = layout
        if parameter is not None:
            self.summed[parameter] = tuple(g for g, s in states.items() if s == "R" and g != ROWS)
        grad = parameter is not None and bool(self.context.captured.trainable.get(parameter, True))
        self.annotate(new, layout, born, grad)
        self.value[node] = self.convert(new, states)

    def step(self, node: fx.Node) -> Any:
        if selects_result(node):
            source, index = self.value[node.args[0]], node.args[1]
            new = self.graph.call_function(operator.getitem, (source, index))
            states = source.meta["states"][index]
            grad = (
                source.meta["grad"] and differentiable(node.meta["val"]) and index not in source.meta.get("alike", ())
            )
            self.annotate(new, source.meta["layout"][index], states, grad, node)
            self.learn_sizes(new, node.meta["val"])
            return new
        if not is_tensor(node):
            return self.number(node)
        inside = node in self.context.inner_forms
        form = (self.context.inner_forms if inside else self.context.forms)[node]
        return self.replicate(node) if form is None else self.local(node, form)

    def held(self, node: fx.Node, value: Any) -> Any:
        """Return the value of a node, moved to the states that users pinned."""
        goals = {group: one.held[node] for group, one in self.assignments.items() if node in one.held}
        return self.convert(value, goals) if goals else value

    def local(self, node: fx.Node, form: OpSharding) -> fx.Node:
        """Emit an op by its strategies."""
        strategies = {group: one.strategies[node] for group, one in self.assignments.items()}
        goals, states = form.states(strategies)
        values = [self.convert(self.value[o], goal) for (o, _), goal in zip(form.operands, goals, strict=True)]
        layouts = [
            self.context.layout_of(shape, one) for shape, one in zip(self.context.shapes(node), states, strict=True)
        ]
        solved = Emission(values, layouts, strategies)
        call = form.call and form.call(strategies, values)
        if call is not None:
            kwargs = dict(call.kwargs) if call.count is None else {**call.kwargs, "count": self.count(node, call)}
            new = self.emit(node, (self.env, *self.local_args(call)), kwargs, as_result(node, layouts), call.function)
        else:
            new = self.plain(node, solved) if form.emit is None else form.emit(self, solved)
        new.meta["states"] = as_result(node, states)
        new.meta["alike"] = form.alike
        return new

    def local_args(self, call: OwnCall) -> Any:
        """Return the arguments of a call with local nodes in place of captured ones."""
        return fx.map_arg(call.args, lambda a: a if a.graph is self.graph else self.value[a])

    def count(self, node: fx.Node, call: OwnCall) -> Any:
        """Emit what an own function counts: a scalar, which is summed over all ranks that have rows, or a number."""
        if not isinstance(call.count, OwnCall):
            return self.sizes.product(call.count or ())
        given = self.local_args(call.count)
        new = self.graph.call_function(call.count.function, (self.env, *given), dict(call.count.kwargs))
        weights = [a.meta["val"] for a in given if isinstance(a, fx.Node) and a.meta["val"].is_floating_point()]
        dtype = Backend.of(self.context.device).widest_float if weights else torch.int64
        return self.total(node, new, dtype, call.spread)

    def total(self, node: fx.Node, new: fx.Node, dtype: torch.dtype, spread: tuple[str, ...]) -> fx.Node:
        """Return the sum over the ranks of ``spread`` of ``new``, a scalar that follows from what ``node`` is given."""
        states: dict[str, Placement] = {g: "P" if g in spread else "I" for g in self.groups}
        self.annotate(new, Layout.replicated(()), states, False, node)
        new.meta["val"] = node.meta["val"].new_empty((), dtype=dtype)
        return self.convert(new, dict.fromkeys(self.groups, "I"))

    def plain(self, node: fx.Node, solved: Emission) -> fx.Node:
        """Emit the same op on local operands."""
        args, kwargs = self.filled(node, solved.values)
        return self.emit(node, args, kwargs, as_result(node, solved.layouts))

    def number(self, node: fx.Node) -> Any:
        """Emit arithmetic on sizes; an op that reads a tensor's value (``item``) reads that of the whole batch."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and not depends_on_data(value):
            return self.sizes.node(value)
        if isinstance(value, torch.SymInt) and expression(value) in self.sizes.data:
            return self.sizes.data[expression(value)]
        new = self.graph.call_function(node.target, self.operands(node.args), self.operands(node.kwargs))
        if isinstance(value, torch.SymInt):
            self.sizes.data[value.node.expr] = new
        return new

    def replicate(self, node: fx.Node) -> fx.Node:
        """Emit an op that every rank computes whole; :class:`Uncapturable` is raised where that would be wrong."""
        if getattr(schema(node.target), "is_mutable", False) or "ordinal" in node.meta:
            raise Uncapturable(f"{node.target} draws random numbers or writes in place, and there is no rule for it")
        if has(node, Fact.BY_STRIDE):
            raise Uncapturable(
                f"{node.target} depends on how a tensor lies in memory, which is different on several ranks"
            )
        self.note_whole(node)
        layouts = [Layout.replicated(s) for s in self.context.shapes(node)]
        new = self.emit(node, self.operands(node.args), self.operands(node.kwargs), as_result(node, layouts))
        new.meta["states"] = as_result(node, [dict.fromkeys(self.groups, "I")] * len(layouts))
        if isinstance(node.meta["val"], Tensor):
            self.learn_sizes(new, node.meta["val"])
        return new

    def note_whole(self, node: fx.Node) -> None:
        """Note that every rank computes an op whole."""
        operands = [a for a in node.all_input_nodes if is_tensor(a)]
        shapes = [*self.context.shapes(node), *(shape for o in operands for shape in self.context.shapes(o))]
        large = any(math.prod(shape) > 1 for shape in shapes)  # its cost is measured only when asked for
        if (self.context.tensor.axes or node in self.of_batch) and large:
            self.replicated.setdefault((str(node.target), module_path(node)), []).append(node)

    def selected(self, node: fx.Node, new: fx.Node, mask: fx.Node, spread: tuple[str, ...]) -> None:
        """Add nodes of how many elements ``mask`` selects: of this rank's, which are in ``new``, and of all ranks'."""
        symbol = expression(node.meta["val"].shape[0])
        if symbol in self.sizes.data:
            return
        self.sizes.own[symbol] = self.graph.call_function(aten.sym_size.int, (new, 0))
        whole = self.total(node, self.graph.call_function(aten.sum.default, (mask,)), torch.int64, spread)
        self.sizes.data[symbol] = self.graph.call_function(collectives.number, (self.env, whole))

    def learn_sizes(self, new: fx.Node, value: Tensor) -> None:
        """Add nodes that read sizes which depend on data from ``new``, the tensor that has them."""
        for d, size in enumerate(value.shape):
            if depends_on_data(size) and (symbol := expression(size)).is_Symbol and symbol not in self.sizes.data:
                self.sizes.data[symbol] = self.graph.call_function(aten.sym_size.int, (new, d))

    # ---- values ----------------------------------------------------------------------------------------

    @staticmethod
    def layout(value: Any) -> Any:
        return value.meta["layout"]

    def operands(self, argument: Any) -> Any:
        """Return arguments with the local value of every node, and every tensor as I."""
        return fx.map_arg(argument, lambda n: self.whole(n) if is_tensor(n) else self.value[n])

    def convert(self, value: fx.Node, goals: Mapping[str, Placement]) -> fx.Node:
        """Return ``value`` in other states."""
        return self.moves.convert(value, goals)

    def whole(self, node: fx.Node) -> fx.Node:
        """Return a captured node's value as I."""
        return self.convert(self.value[node], dict.fromkeys(self.groups, "I"))

    def beside_loss(self, node: fx.Node, name: str) -> fx.Node:
        """Return what follows the loss: a buffer's new value as I, or what this rank has of a value that is kept."""
        if not is_kept(name):
            return self.whole(node)
        found = self.rows_of(node) if is_output(name) else self.left(node)
        self.kept[name] = found.meta["states"][ROWS]
        return found

    def left(self, node: fx.Node) -> fx.Node:
        """Return a value that is kept for the user's loop: this rank's rows, or its part of a sum over ranks."""
        value = self.value[node]
        place = value.meta["states"][ROWS]
        split = isinstance(place, Shard) and (place.parts or not isinstance(place.pre, int))
        return self.convert(value, {g: "I" for g in self.groups if g != ROWS or split})

    def rows_of(self, node: fx.Node) -> fx.Node:
        """Return this rank's rows of an output of the model, whole over the other axes, as a node of their own."""
        goals: dict[str, Placement] = {group: Shard(0) if group == ROWS else "I" for group in self.groups}
        value = self.convert(self.value[node], goals)
        new = self.graph.call_function(aten.alias.default, (value,))
        return self.annotate(new, value.meta["layout"], goals, False, node)

    # ---- what rules emit ------------------------------------------------------------------------------------

    def filled(self, node: fx.Node, values: Sequence[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node with its tensors, in their order, replaced by ``values``."""
        feed = iter(values)

        def replaced(a: fx.Node) -> Any:
            return next(feed) if is_tensor(a) else self.value[a]

        args = fx.map_arg(node.args, replaced)
        return args, fx.map_arg(node.kwargs, replaced)

    def emit(self, node: fx.Node, args: Any, kwargs: Any, layout: Any, target: Any = None) -> fx.Node:
        """Add an op; factories get this rank's device."""
        target = target or node.target
        kwargs = {
            k: (self.context.device if k == "device" else v)
            for k, v in dict(kwargs).items()
            if k not in _FACTORY_OPTIONS
        }
        if _is_factory(target):
            kwargs["device"] = self.context.device
        new = self.graph.call_function(target, tuple(args), kwargs)
        operands = [a for a in new.all_input_nodes if "grad" in a.meta]
        grad = any(a.meta["grad"] for a in operands) and differentiable(node.meta["val"])
        grad = grad and target is not aten.detach.default and not has(node, Fact.LIKE)
        return self.annotate(new, layout, None, grad, node)


def _following(graph: fx.Graph, names: Collection[str]) -> set[fx.Node]:
    """Return the nodes that depend on the placeholders ``names``."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name in names if node.op == "placeholder" else any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _is_factory(target: Any) -> bool:
    described = schema(target)
    return (
        described is not None
        and any(a.name == "device" for a in described.arguments)
        and not any(isinstance(a.type, torch.TensorType) for a in described.arguments)
    )
