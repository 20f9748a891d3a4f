"""In-place operations made functional, and torch's wrappers around ops removed: one pass that copies a captured graph.

Every value has a base (itself, or what it is a view of).  Writing to a view scatters the new value into its source, up to
the base; reading a view after its base was written makes the view again.  What a buffer holds at the end of the graph is
its update.  Random ops get their ordinal here, in the order in which the model draws.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.trace import ops
from shardwise.trace.capture import Captured, Uncapturable

aten = torch.ops.aten

_IDENTITIES = {aten.alias.default, aten.lift_fresh.default}
_DROPPED_PREFIXES = ("aten::_assert", "aten::sym_constrain", "aten::_print")
_NOT_REPLAYED = {"resize_", "set_", "resize_as_", "requires_grad_", "swap_"}
_RENAMED: dict[str, Callable[..., Any]] = {
    "zero_": aten.zeros_like.default,
    "fill_": aten.full_like.default,
    "copy_": aten.copy.default,
    "detach_": aten.detach.default,
    "normal_": aten.normal_functional.default,
}


@dataclass
class Normal:
    """A functional graph: placeholders as in :class:`Captured`, output ``(loss, *updates)``."""

    graph: fx.Graph
    captured: Captured
    updates: list[str] = field(default_factory=list)  # buffers (by name) whose new value is an output, after the loss
    notes: list[str] = field(default_factory=list)


def functionalise(captured: Captured) -> Normal:
    """Copy ``captured`` without in-place ops, wrappers and asserts; raises :class:`Uncapturable` on what has no functional form."""
    walker = _Walker(captured)
    walker.run(captured.graph, captured.owner)
    return walker.finish()


class _Walker:
    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.new = fx.Graph()
        self.value: dict[fx.Node, Any] = {}
        self.source: dict[fx.Node, fx.Node] = {}  # view → what it was taken from
        self.writes: dict[fx.Node, int] = {}  # base → number of writes
        self.seen: dict[fx.Node, int] = {}  # value → writes of its base when it was made
        self.ordinal = 0
        self.loss: fx.Node | None = None

    # ---- reading and writing -------------------------------------------------------------------------------------

    def base(self, old: fx.Node) -> fx.Node:
        while old in self.source:
            old = self.source[old]
        return old

    def read(self, old: fx.Node) -> Any:
        now = self.writes.get(self.base(old), 0)
        if self.seen.get(old, 0) != now and old in self.source:
            self.value[old] = self.emit(old)
            self.seen[old] = now
        return self.value[old]

    def bind(self, old: fx.Node, new: Any, source: fx.Node | None = None) -> None:
        self.value[old] = new
        if source is not None:
            self.source[old] = source
        self.seen[old] = self.writes.get(self.base(old), 0)

    def write(self, old: fx.Node, new: fx.Node) -> None:
        if old in self.source:
            source = self.source[old]
            if old.op == "call_function" and old.target is operator.getitem:
                source = self.source[source]
            self.write(source, self.scatter(old, self.read(source), new))
        else:
            if self.captured.parameters.get(old.name):
                raise Uncapturable(f"forward writes to the parameter {self.captured.parameters[old.name]}")
            self.writes[old] = self.writes.get(old, 0) + 1
        self.value[old] = new
        self.seen[old] = self.writes.get(self.base(old), 0)

    def scatter(self, view: fx.Node, base: fx.Node, new: fx.Node) -> fx.Node:
        """``base`` with ``new`` where ``view`` looks at it."""
        target, args = view.target, view.args
        rest = [self.map(a) for a in args[1:]]
        if target is operator.getitem:
            split = view.args[0]
            assert isinstance(split, fx.Node)
            dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
            sizes = [v.shape[dim] for v in split.meta["val"]]
            start = sum(sizes[: view.args[1]])
            return self.call(aten.slice_scatter.default, (base, new, dim, start, start + sizes[view.args[1]]), split.args[0])
        if target is aten.slice.Tensor:
            return self.call(aten.slice_scatter.default, (base, new, *rest), args[0])
        if target is aten.select.int:
            return self.call(aten.select_scatter.default, (base, new, *rest), args[0])
        if target is aten.transpose.int:
            return self.call(target, (new, *rest), args[0])
        if target is aten.permute.default:
            order = list(args[1])
            return self.call(target, (new, [order.index(i) for i in range(len(order))]), args[0])
        if target in _SHAPED:
            return self.call(aten.view_as.default, (new, base), args[0])
        if target in _WHOLE:
            return new
        raise Uncapturable(f"in-place write through {target} has no functional form")

    # ---- emitting ------------------------------------------------------------------------------------------------

    def map(self, argument: Any) -> Any:
        return fx.map_arg(argument, self.read)

    def call(self, target: Any, args: tuple[Any, ...], like: Any) -> fx.Node:
        node = self.new.call_function(target, args)
        node.meta = {k: like.meta[k] for k in ("val", "nn_module_stack") if k in like.meta}
        return node

    def emit(self, old: fx.Node, target: Any = None) -> fx.Node:
        node = self.new.create_node(old.op, target or old.target, self.map(old.args), self.map(old.kwargs))
        node.meta = {k: old.meta[k] for k in ("val", "nn_module_stack") if k in old.meta}
        return node

    # ---- the walk ------------------------------------------------------------------------------------------------

    def run(self, graph: fx.Graph, owner: fx.GraphModule, inputs: list[fx.Node] | None = None) -> Any:
        """Copy ``graph``; of a wrapped sub-graph whose ``inputs`` are given, returns the nodes that it outputs."""
        pending = list(inputs or [])
        for old in graph.nodes:
            if old.op == "placeholder":
                if inputs is not None:
                    outer = pending.pop(0)
                    self.bind(old, self.read(outer), outer)
                else:
                    new = self.new.placeholder(old.name)
                    new.meta = {"val": old.meta.get("val")}
                    self.bind(old, new)
            elif old.op == "output":
                if inputs is not None:
                    return old.args[0]
                self.loss = self.read(old.args[0][0])
            elif old.op == "get_attr":
                self.value[old] = (getattr(owner, str(old.target)), owner)
            else:
                self.step(old, owner)
        return None

    def step(self, old: fx.Node, owner: fx.GraphModule) -> None:
        target = old.target
        schema = getattr(target, "_schema", None)
        if isinstance(target, torch._ops.HigherOrderOperator):
            self.inline(old)
        elif target is operator.getitem:
            self.item(old)
        elif schema is not None and schema.name.startswith(_DROPPED_PREFIXES):
            return
        elif target is aten.lift_fresh_copy.default:  # nothing writes to constants any more: no copy is needed
            self.bind(old, self.read(old.args[0]))
        elif target in _IDENTITIES:
            self.bind(old, self.read(old.args[0]), old.args[0])
        elif target is aten.batch_norm.default and old.args[5]:
            self.batch_norm(old)
        elif schema is not None and schema.is_mutable:
            self.mutate(old)
        elif _is_random(old) and not _draws(old):
            self.bind(old, self.read(old.args[0]), old.args[0])
        else:
            if target is aten.instance_norm.default and isinstance(old.args[3], fx.Node):
                raise Uncapturable("instance_norm with running statistics")
            node = self.emit(old)
            if _is_random(old):
                node.meta["ordinal"], self.ordinal = self.ordinal, self.ordinal + 1
            self.bind(old, node, _aliased(old))

    def item(self, old: fx.Node) -> None:
        tuple_, index = old.args
        value = self.read(tuple_)
        if isinstance(value, tuple | list):  # outputs of an inlined sub-graph
            inner, detach = value[index]
            new = self.read(inner)
            if detach and isinstance(inner.meta.get("val"), Tensor) and inner.meta["val"].is_floating_point():
                new = self.call(aten.detach.default, (new,), inner)
            self.bind(old, new)
        else:
            self.bind(old, self.emit(old), tuple_ if tuple_ in self.source else None)

    def inline(self, old: fx.Node) -> None:
        name = old.target.name()
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inputs = old.args
        elif name == "wrap_with_autocast" and old.args[2] is False:
            (enabled, body), inputs = (True, old.args[4]), list(old.args[5:])
        else:
            raise Uncapturable(f"higher-order op {name}")
        module = self.value[body][0]
        outputs = self.run(module.graph, module, inputs)
        self.value[old] = [(o, not enabled) for o in outputs]

    def batch_norm(self, old: fx.Node) -> None:
        """BatchNorm in training, whose statistics are of all rows: an op of ours, which returns the new running statistics."""
        x, weight, bias, *running, _, momentum, eps = old.args[:8]
        written = [r for r in running if isinstance(r, fx.Node)]
        node = self.call(ops.batch_norm, self.map((x, weight, bias, *running, momentum, eps)), old)
        node.meta["val"] = tuple(v.meta["val"] for v in (old, *written))
        y, *new = (self.call(operator.getitem, (node, i), v) for i, v in enumerate((old, *written)))
        self.bind(old, y)
        for goal, value in zip(written, new, strict=True):
            self.write(goal, value)

    def mutate(self, old: fx.Node) -> None:
        schema = old.target._schema
        name = schema.name.removeprefix("aten::")
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        if written != [0] or name in _NOT_REPLAYED or not name.endswith("_") or not schema.name.startswith("aten::"):
            raise Uncapturable(f"in-place op {old.target} has no functional form")
        goal = old.args[0]
        if _is_random(old) and not _draws(old):
            self.bind(old, self.read(goal), goal)
            return
        target = _RENAMED.get(name)
        if target is None:
            packet = getattr(aten, name[:-1], None)
            target = packet and getattr(packet, _functional_overload(name, old.target._overloadname), None)
        if target is None:
            raise Uncapturable(f"in-place op {old.target} has no functional form")
        args = old.args[:1] if name == "zero_" else old.args
        new = self.new.call_function(target, self.map(args), self.map(old.kwargs))
        new.meta = {k: old.meta[k] for k in ("val", "nn_module_stack") if k in old.meta}
        if _is_random(old):
            new.meta["ordinal"], self.ordinal = self.ordinal, self.ordinal + 1
        new = self.cast_back(new, goal)
        self.write(goal, new)
        self.bind(old, new, goal)

    def cast_back(self, new: fx.Node, goal: fx.Node) -> fx.Node:
        """An in-place op keeps its tensor's dtype, where the functional one may promote."""
        dtype = goal.meta["val"].dtype
        return new if new.target is aten.copy.default else self.call(aten.to.dtype, (new, dtype), goal)

    def finish(self) -> Normal:
        assert self.loss is not None
        names, outputs = [], []
        for old in self.captured.graph.nodes:
            if old.op == "placeholder" and old.name in self.captured.buffers and self.writes.get(old):
                names.append(self.captured.buffers[old.name])
                outputs.append(self.value[old])
        output = self.new.output((self.loss, *outputs))
        output.meta = {}
        live: set[fx.Node] = set()
        stack: list[fx.Node] = [output]
        while stack:
            node = stack.pop()
            if node not in live:
                live.add(node)
                stack.extend(node.all_input_nodes)
        for node in reversed(list(self.new.nodes)):
            if node not in live and node.op != "placeholder":
                self.new.erase_node(node)
        return Normal(self.new, self.captured, names)


_SHAPED = {
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.squeeze.dims, aten.flatten.using_ints, aten.unflatten.int, aten._unsafe_view.default, aten.view_as.default,
}  # fmt: skip
_WHOLE = {aten.alias.default, aten.detach.default, aten.contiguous.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device}
_SPLITS = {aten.split.Tensor, aten.chunk.default, aten.split_with_sizes.default, aten.split.sizes, aten.unbind.int}


def _aliased(old: fx.Node) -> fx.Node | None:
    """The argument whose memory ``old`` shares, if any."""
    value, first = old.meta.get("val"), old.args[0] if old.args else None
    if not isinstance(first, fx.Node):
        return None
    theirs = first.meta.get("val")
    mine = value[0] if isinstance(value, tuple | list) and value else value
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return None
    same = StorageWeakRef(mine.untyped_storage()).cdata == StorageWeakRef(theirs.untyped_storage()).cdata
    return first if same else None


def _functional_overload(name: str, overload: str) -> str:
    return {"bernoulli_": "p"}.get(name, overload)


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(argument(node, 4, "dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in tags


def _draws(node: fx.Node) -> bool:
    """Dropout outside training draws nothing: it is the identity."""
    if "dropout" in str(node.target):
        return bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("train", True))
    return True


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a node, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
