"""Make in-place operations functional and remove torch's wrappers, in one pass that copies a captured graph.

Every value has a base (itself, or what it is a view of).  Writing to a view scatters the new value into its source, up
to the base; reading a view after its base was written makes the view again.  An op that changes a tensor's shape in
place (``t_``) writes no values: the tensor is a view from then on, which is what the graph's later ops read, and
earlier views stay what they are.  What a buffer holds at the end of the graph is its update.  Random ops get their
ordinal here, in the order in which the model draws.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.core.errors import ConfigError
from shardwise.core.fields import KEPT, OUTPUT
from shardwise.graph.aliases import aliased, is_random, looks_alike, operand_itself, refuse_without_memory
from shardwise.graph.aten_ops import Fact, has, permutation, regroups
from shardwise.graph.captured import Captured, Uncapturable
from shardwise.graph.in_place import functional_form
from shardwise.graph.naming import place
from shardwise.graph.schema import differentiable, given, op_name
from shardwise.graph.torch_private import HigherOrderOperator, schema
from shardwise.graph.tracked import Tracked
from shardwise.ops import custom_function, norms

aten = torch.ops.aten

_IDENTITIES = {aten.alias.default, aten.lift_fresh.default}
_DROPPED_PREFIXES = ("aten::_assert", "aten::sym_constrain", "aten::_print")


@dataclass
class Normal:
    """This is a functional graph: placeholders are as in :class:`Captured`, the output is ``(loss, *updates)``: the
    values that are kept beside the loss, by their names in ``core/fields.py``, and the new values of buffers."""

    graph: fx.Graph
    captured: Captured
    updates: list[str] = field(default_factory=list)  # the names of what follows the loss
    checks: Any = None  # the `capture/checks.py` of what forward reads in Python, once taken out of the outputs
    draws: Any = None  # the `capture/host_draws.py` of what it draws in Python, once taken out of the graph


def functionalise(captured: Captured) -> Normal:
    """Copy ``captured`` without in-place ops, wrappers and asserts.

    Raises :class:`Uncapturable` for what has no functional form."""
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
        self.grad = True  # whether autograd records the ops that are being copied
        self.unrecorded: set[fx.Node] = set()  # ops copied where it does not
        self.passed: set[fx.Node] = set()  # nodes that are their source, such as outputs of wrapped sub-graphs
        self.tracked = Tracked(captured)
        self.cut: dict[fx.Node, fx.Node] = {}  # new node → its detached self
        self.lent: dict[fx.Node, list[fx.Node]] = {}  # base → the calls of functions that were given its memory
        self.ordinal = 0
        self.loss: fx.Node | None = None
        self.kept: list[fx.Node] = []  # what is kept beside the loss

    # ---- reading and writing -------------------------------------------------------------------------------------

    def base(self, old: fx.Node) -> fx.Node:
        while old in self.source:
            old = self.source[old]
        return old

    def read(self, old: fx.Node) -> Any:
        now = self.writes.get(self.base(old), 0)
        if self.seen.get(old, 0) != now and old in self.source:
            if self.same(old):
                self.value[old] = self.read(self.source[old])
            else:
                before, self.grad = self.grad, old not in self.unrecorded
                self.value[old] = self.emit(old)
                self.grad = before
            self.seen[old] = now
        return self.value[old]

    def same(self, old: fx.Node) -> bool:
        """Return whether a node is its source: it passes that into or out of a wrapped sub-graph, or returns it."""
        return old.op == "placeholder" or old in self.passed

    def bind(self, old: fx.Node, new: Any, source: fx.Node | None = None) -> None:
        self.value[old] = new
        if source is not None:
            self.source[old] = source
        self.seen[old] = self.writes.get(self.base(old), 0)

    def write(self, old: fx.Node, new: fx.Node, hidden: bool = False) -> None:
        """Make ``old``, and what it is a view of, hold ``new``; ``hidden`` says that autograd does not see it."""
        hidden = hidden or not self.grad
        parameter = self.captured.parameters.get(self.base(old).name)
        if parameter:
            raise ConfigError(f"model: forward writes to the parameter {parameter}; legal: to write to buffers")
        if self.base(old).name in self.captured.constants:
            name = self.base(old).name.removeprefix("c_module_")
            legal = "a buffer (self.register_buffer)"
            raise ConfigError(f"model: forward writes to {name}, a tensor that is no buffer; legal: {legal}")
        if hidden:
            self.refuse_tracked(old)
            new = self.detached(new)
        if old in self.source:
            source = self.source[old]
            if old.target is operator.getitem and old not in self.passed:
                source = self.source[source]
            self.write(source, self.scatter(old, self.read(source), new), hidden or old.target is aten.detach.default)
        else:
            self.writes[old] = self.writes.get(old, 0) + 1
        self.value[old] = new
        self.seen[old] = self.writes.get(self.base(old), 0)

    def refuse_tracked(self, old: fx.Node) -> None:
        if self.tracked(self.read(old)):
            raise Uncapturable(
                "forward writes, unseen by autograd (no_grad, detach or .data), to a tensor that has a gradient"
            )

    def scatter(self, view: fx.Node, base: fx.Node, new: fx.Node) -> fx.Node:
        """Return ``base`` with ``new`` in place of the elements that ``view`` shows."""
        target, source = view.target, view.args[0] if view.args else None
        if self.same(view):
            return new
        assert isinstance(source, fx.Node)
        rest = [self.map(a) for a in view.args[1:]]
        if target is operator.getitem:
            return self.scatter_part(source, base, new, view.args[1])
        scattered = {
            aten.slice.Tensor: aten.slice_scatter,
            aten.select.int: aten.select_scatter,
            aten.diagonal.default: aten.diagonal_scatter,
        }
        if target in scattered:
            return self.call(scattered[target].default, (base, new, *rest), source)
        order = permutation(view)
        if order is not None and view.meta["val"].is_conj() == source.meta["val"].is_conj():
            return self.call(aten.permute.default, (new, [order.index(d) for d in range(len(order))]), source)
        if regroups(view):
            return self.call(aten.view_as.default, (new, base), source)
        if target in _WHOLE or looks_alike(view.meta["val"], source.meta["val"]):
            return new
        raise Uncapturable(f"in-place write through {target} has no functional form")

    def scatter_part(self, split: fx.Node, base: fx.Node, new: fx.Node, index: Any) -> fx.Node:
        """Return ``base`` with ``new`` in place of part ``index`` of a split."""
        like, dim = split.args[0], given(split, "dim", 0)
        assert isinstance(like, fx.Node)
        if split.target is aten.unbind.int:
            return self.call(aten.select_scatter.default, (base, new, dim, index), like)
        sizes = [v.shape[dim] for v in split.meta["val"]]
        if not has(split, Fact.SPLIT) or not all(isinstance(s, int) for s in sizes):
            raise Uncapturable(f"in-place write through {split.target} has no functional form")
        start = sum(sizes[:index])
        return self.call(aten.slice_scatter.default, (base, new, dim, start, start + sizes[index]), like)

    # ---- gradients -----------------------------------------------------------------------------------------------

    def detached(self, new: Any) -> Any:
        """Return a new node without its gradient."""
        if not self.tracked(new):
            return new
        if new not in self.cut:
            self.cut[new] = self.call(aten.detach.default, (new,), new)
        return self.cut[new]

    # ---- emitting ------------------------------------------------------------------------------------------------

    def map(self, argument: Any) -> Any:
        def value(old: fx.Node) -> Any:
            new = self.read(old)
            return new if self.grad else self.detached(new)

        return fx.map_arg(argument, value)

    def call(self, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: dict[str, Any] | None = None) -> fx.Node:
        node = self.new.call_function(target, args, kwargs)
        node.meta = {k: like.meta[k] for k in ("val", "nn_module_stack", "stack_trace") if k in like.meta}
        return node

    def emit(self, old: fx.Node) -> fx.Node:
        return self.call(old.target, self.map(old.args), old, self.map(old.kwargs))

    def draw(self, new: fx.Node) -> None:
        """Give a random op its ordinal, and in a loop over rows the row that it draws for."""
        number, draws = self.ordinal, self.captured.draws
        new.meta["ordinal"], self.ordinal = number, number + 1
        if number < len(draws):
            new.meta["ordinal"], row = draws[number]
            if row is not None:
                new.meta["row"] = row

    # ---- the walk ------------------------------------------------------------------------------------------------

    def run(self, graph: fx.Graph, owner: fx.GraphModule, inputs: list[fx.Node] | None = None) -> Any:
        """Copy ``graph``; for a wrapped sub-graph, whose ``inputs`` are given, return the nodes that it outputs."""
        pending = list(inputs or [])
        for old in graph.nodes:
            refuse_without_memory(old)
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
                self.loss, *self.kept = map(self.read, old.args[0])
            elif old.op == "get_attr":
                self.value[old] = (getattr(owner, str(old.target)), owner)
            else:
                self.step(old)
        return None

    def step(self, old: fx.Node) -> None:
        if old.target is aten.narrow.default and all(isinstance(a, int) for a in old.args[2:4]):
            start, length = old.args[2:4]
            end = start + length
            old.target, old.args = aten.slice.Tensor, (*old.args[:2], start, None if start < 0 and end == 0 else end)
        target = old.target
        described = schema(target)
        if not self.grad:
            self.unrecorded.add(old)
        if isinstance(target, HigherOrderOperator):
            self.inline(old)
        elif target is operator.getitem:
            self.item(old)
        elif described is not None and described.name.startswith(_DROPPED_PREFIXES):
            return
        elif target is aten.lift_fresh_copy.default:  # nothing writes to constants any more: no copy is needed
            self.bind(old, self.read(old.args[0]))
        elif target is custom_function.OP:
            tensors, number = old.args
            for one in tensors:
                self.lent.setdefault(self.base(one), []).append(old)
            function = self.captured.functions[number]
            self.bind(old, self.call(function, tuple(self.map(tensors)), old))
            self.value[old].meta["val"] = tuple(old.meta["val"])
        elif target in _IDENTITIES:
            self.bind(old, self.map(old.args[0]), old.args[0])
        elif (operand := operand_itself(old)) is not None:
            self.pass_on(old, operand)
        elif target is aten.batch_norm.default and old.args[5]:
            self.batch_norm(old)
        elif described is not None and described.is_mutable:
            if torch.Tag.inplace_view in target.tags and not (
                target is aten.detach_.default and not self.viewed(old.args[0])
            ):
                self.change_view(old)
            else:
                self.mutate(old)
        else:
            if target is aten.instance_norm.default and isinstance(old.args[3], fx.Node):
                raise Uncapturable("instance_norm with running statistics")
            node = self.emit(old)
            if is_random(old):
                self.draw(node)
            self.bind(old, node, aliased(old))

    def pass_on(self, old: fx.Node, source: fx.Node) -> None:
        self.passed.add(old)
        self.bind(old, self.read(source), source)

    def item(self, old: fx.Node) -> None:
        tuple_, index = old.args
        value = self.read(tuple_)
        if isinstance(value, tuple | list):  # outputs of an inlined sub-graph
            self.pass_on(old, value[index])
        elif (operand := operand_itself(old)) is not None:
            self.pass_on(old, operand)
        else:
            new = self.emit(old)
            new = new if self.learns(tuple_, index) else self.detached(new)
            self.bind(old, new, tuple_ if tuple_ in self.source else None)

    def learns(self, call: fx.Node, index: int) -> bool:
        """Return whether autograd may record a result of a call; it does not of functions that give it no gradient."""
        if call.target is not custom_function.OP:
            return True
        made = getattr(self.captured.functions[call.args[1]], "made", None)
        return made is None or bool(made[index].learns)

    def inline(self, old: fx.Node) -> None:
        name = old.target.name()
        enabled = self.grad
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inputs = old.args
        elif name == "wrap_with_autocast" and old.args[2] is False:
            body, inputs = old.args[4], list(old.args[5:])
        else:
            raise Uncapturable(f"higher-order op {name}")
        module = self.value[body][0]
        before, self.grad = self.grad, enabled
        self.value[old] = list(self.run(module.graph, module, inputs))
        self.grad = before

    def batch_norm(self, old: fx.Node) -> None:
        """Replace BatchNorm in training by our own op over all rows, which also returns the running statistics."""
        x, weight, bias, *running, _, momentum, eps = old.args[:8]
        written = [r for r in running if isinstance(r, fx.Node)]
        node = self.call(norms.batch_norm, self.map((x, weight, bias, *running, momentum, eps)), old)
        node.meta["val"] = tuple(v.meta["val"] for v in (old, *written))
        y, *new = (self.call(operator.getitem, (node, i), v) for i, v in enumerate((old, *written)))
        for value in new:
            self.tracked.known[value] = False
        self.bind(old, y)
        for goal, value in zip(written, new, strict=True):
            self.write(goal, value)

    def mutate(self, old: fx.Node) -> None:
        goal, target, args, kwargs = functional_form(old)
        self.refuse_shared(self.base(goal))
        if [str(s) for s in old.meta["val"].shape] != [str(s) for s in goal.meta["val"].shape]:
            raise Uncapturable(f"{old.target} changes the shape of the tensor that it writes to{place(old)}")
        if op_name(old) == "copy_":
            new = self.copied(old, goal)
        else:
            if op_name(old) == "zero_":
                args = args[:1]
            new = self.cast_back(self.call(target, self.map(args), old, self.map(kwargs)), goal)
        if is_random(old):
            self.draw(new)
        self.write(goal, new)
        self.bind(old, self.value[goal], goal)
        self.passed.add(old)

    def refuse_shared(self, base: fx.Node) -> None:
        """Raise :class:`Uncapturable` about a write to what a call has returned of its arguments' memory, by way of the
        result or of the argument."""
        made = base.args[0] if base.target is operator.getitem else None
        results = [made] if isinstance(made, fx.Node) and made.target is custom_function.OP else []
        for call in (*results, *self.lent.get(base, ())):
            function = self.captured.functions[call.args[1]]
            if hasattr(function, "written"):
                function.written = True
            if getattr(function, "shares", False):
                raise Uncapturable(f"forward writes to what {function} returns of its arguments{place(call)}")

    def viewed(self, goal: fx.Node) -> bool:
        """Return whether another tensor shares the memory of ``goal``."""
        base = self.base(goal)
        return any(not self.same(view) and self.base(view) is base for view in self.source)

    def change_view(self, old: fx.Node) -> None:
        """Handle an op that changes a tensor's shape and no values: later ops read its node, a view of the tensor."""
        goal, target, args, kwargs = functional_form(old)
        if not self.grad:
            self.refuse_tracked(goal)
        tensor = goal
        while self.same(tensor) and tensor in self.source:
            tensor = self.source[tensor]
        stays = (
            {**self.captured.parameters, **self.captured.buffers}.get(tensor.name)
            if tensor.op == "placeholder"
            else None
        )
        if stays:
            raise Uncapturable(
                f"forward changes the shape of {stays}, which stays from step to step, in place ({old.target})"
            )
        old.target, old.args, old.kwargs = target, args, kwargs
        self.bind(old, self.emit(old), goal)

    def copied(self, old: fx.Node, goal: fx.Node) -> fx.Node:
        """Return what ``goal.copy_(source)`` leaves in goal: the source in goal's shape and dtype."""
        source = old.args[1]
        assert isinstance(source, fx.Node)
        new: fx.Node = self.map(source)
        value, like = source.meta["val"], goal.meta["val"]
        if value.dtype != like.dtype:
            new = self.call(aten.to.dtype, (new, like.dtype), source)
            new.meta["val"] = value.to(like.dtype)
        if value.dim() != like.dim() or any(str(a) != str(b) for a, b in zip(value.shape, like.shape, strict=True)):
            new = self.call(aten.expand_as.default, (new, self.map(goal)), goal)
        return new

    def cast_back(self, new: fx.Node, goal: fx.Node) -> fx.Node:
        """Return ``new`` in the dtype of ``goal``, which an in-place op keeps where the functional one may promote."""
        dtype = goal.meta["val"].dtype
        if new.target is aten.index_put.default:
            return new
        example: Tensor = new.target(*_examples(new.args), **_examples(new.kwargs))
        if example.dtype == dtype:
            return new
        if not differentiable(example) and self.tracked(self.read(goal)):
            what = f"{new.target} in place, to a tensor that has a gradient, gives no gradient"  # torch passes some on
            raise Uncapturable(f"{what}{place(new)}")
        new.meta["val"] = example
        return self.call(aten.to.dtype, (new, dtype), goal)

    def computed(self, value: fx.Node) -> fx.Node:
        """Return a copy of a placeholder (a buffer, a field or a parameter), because no unit computes it."""
        return self.call(aten.clone.default, (value,), value) if value.op == "placeholder" else value

    def finish(self) -> Normal:
        assert self.loss is not None
        kind = KEPT if self.captured.outputs is None else OUTPUT
        names, outputs = [f"{kind}{i}" for i in range(len(self.kept))], list(map(self.computed, self.kept))
        for old in self.captured.graph.nodes:
            if old.op == "placeholder" and old.name in self.captured.buffers and self.writes.get(old):
                names.append(self.captured.buffers[old.name])
                outputs.append(self.computed(self.value[old]))
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


_WHOLE = {aten.alias.default, aten.detach.default}


def _examples(argument: Any) -> Any:
    return fx.map_arg(argument, lambda n: n.meta["val"])
