"""Ops of the cases of ``op_cases.py`` one by one: in a graph with an open number of rows, whole, and as a rule emits
them for one rank.

The graph is traced with fake tensors, which takes a tenth of the time of ``torch.export``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from op_cases import ROWS as COUNT
from op_cases import Op, Probe, batch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from shardwise.graph.captured import Captured
from shardwise.graph.functional import Normal, functionalise
from shardwise.graph.normalise import normalise
from shardwise.graph.schema import differentiable, is_tensor
from shardwise.graph.sizes import depends_on_data, expression
from shardwise.shard.assignment import Assignment
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Placement, Strategy

# ---- tracing ---------------------------------------------------------------------------------------------------------


@functools.cache
def inputs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of the cases, and the fields of a batch: in fp64."""
    probe, fields = Probe(lambda m, h, b: h).double(), batch()
    named = {**dict(probe.named_parameters()), **dict(probe.named_buffers())}
    return (
        {name.replace(".", "_"): value.detach() for name, value in named.items()},
        {name: value.double() if value.is_floating_point() else value for name, value in fields.items()},
    )


@functools.cache
def fakes() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same without values; the number of rows is a symbol."""
    shapes = ShapeEnv()
    mode, source = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True), ConstantSource("rows")
    symbol = shapes.create_symbol(COUNT, source, dynamic_dim=DimDynamic.DYNAMIC)
    rows = shapes.create_symintnode(symbol, hint=COUNT, source=source)
    named, fields = inputs()
    with mode:
        return (
            {name: torch.empty(value.shape, dtype=value.dtype) for name, value in named.items()},
            {name: torch.empty((rows, *value.shape[1:]), dtype=value.dtype) for name, value in fields.items()},
        )


def traced(op: Op) -> Normal:
    """The graph of a case: as :func:`capture` and what follows it would make it, of the op with what is before it."""

    def function(named: dict[str, Tensor], fields: dict[str, Tensor]) -> list[Tensor]:
        before = SimpleNamespace(weight=named["before_weight"], bias=named["before_bias"])
        m = SimpleNamespace(**{k: v for k, v in named.items() if not k.startswith("before")}, before=before)
        h = F.linear(fields["x"], before.weight, before.bias).view(fields["x"].shape[0], 3, 4)
        out = op(m, h, fields)
        results = out if isinstance(out, tuple | list) else (out,)
        return [functools.reduce(operator.add, [y.sum() for y in results])]

    named, fields = fakes()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = make_fx(function, tracing_mode="fake", pre_dispatch=True)(named, fields)
    finally:
        torch.set_default_dtype(dtype)
    rows = expression(fields["x"].shape[0])
    if isinstance(rows, int):  # the op takes just so many rows, and other cases get a new symbol
        fakes.cache_clear()
    places = module.graph.find_nodes(op="placeholder")
    names = dict(zip((node.name for node in places), (*named, *fields), strict=True))
    constants = lifted(module)
    probe = dict(Probe(op).named_buffers()).keys()
    parameters = {node: name for node, name in names.items() if name in named and name not in probe}
    normal = functionalise(
        Captured(
            graph=module.graph, owner=module, parameters=parameters, constants=constants,
            rows=rows if isinstance(rows, int) else None,
            buffers={node: name for node, name in names.items() if name in probe},
            fields={node: name for node, name in names.items() if name in fields},
            trainable=dict.fromkeys(parameters.values(), True),
            values={node: inputs()[0][name] for node, name in names.items() if name in probe}, precision="fp64",
        )
    )  # fmt: skip
    normalise(normal)
    for node in normal.graph.find_nodes(op="placeholder"):
        if not node.users:
            normal.graph.erase_node(node)
    return normal


def lifted(module: fx.GraphModule) -> dict[str, Tensor]:
    """The constants of a traced function, as placeholders from now on, by name."""
    found = {}
    graph = module.graph
    last = graph.find_nodes(op="placeholder")[-1]
    for node in graph.find_nodes(op="get_attr"):
        with graph.inserting_after(last):
            place = graph.placeholder(node.name)
        place.meta = dict(node.meta)
        found[place.name] = getattr(module, str(node.target))
        place.meta["val"] = node.meta.get("val", found[place.name])
        node.replace_all_uses_with(place)
        graph.erase_node(node)
    return found


# ---- the op whole ----------------------------------------------------------------------------------------------------


def evaluated(normal: Normal, rows: int) -> dict[fx.Node, Any]:
    """The value of each node of a graph for so many rows; a node that does not take that number has none."""
    named, fields = inputs()
    captured = normal.captured
    values: dict[fx.Node, Any] = {}
    torch.default_generator.manual_seed(0)
    for node in normal.graph.nodes:
        if node.op == "placeholder":
            own = {**captured.parameters, **captured.buffers, **captured.fields}.get(node.name)
            values[node] = (
                captured.constants[node.name] if own is None else named[own] if own in named else fields[own][:rows]
            )
        elif node.op == "call_function" and all(i in values for i in node.all_input_nodes):
            try:
                values[node] = node.target(*filled(node.args, values), **filled(node.kwargs, values))
            except (RuntimeError, IndexError):
                continue
    return values


def filled(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    return fx.map_arg(argument, lambda node: values[node])


def sizes_of_data(normal: Normal) -> dict[Any, tuple[fx.Node, int]]:
    """Where each size that depends on data can be seen: (node, dim)."""
    found: dict[Any, tuple[fx.Node, int]] = {}
    for node in normal.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            for dim, size in enumerate(node.meta["val"].shape):
                if depends_on_data(size):
                    found.setdefault(expression(size), (node, dim))
    return found


# ---- the op on one rank ----------------------------------------------------------------------------------------------


class OneOp(Emitter):
    """Emits one op, whose operands come in all states that are asked for; ``operands`` are these: by the node of the
    local graph, the captured one and its states by group of axes."""

    def __init__(
        self, context: ShardingContext, node: fx.Node, strategies: Mapping[str, Strategy], data: Mapping[Any, Any]
    ) -> None:
        super().__init__(context, {group: Assignment(strategies={node: one}) for group, one in strategies.items()})
        self.operands_of: dict[fx.Node, tuple[fx.Node, dict[str, Placement]]] = {}
        self.asked: dict[tuple[fx.Node, tuple[Placement, ...]], fx.Node] = {}
        self.measured: dict[fx.Node, tuple[fx.Node, int]] = {}
        self.numbers: dict[fx.Node, fx.Node] = {}
        self.current = node
        for symbol, at in data.items():
            self.sizes.data[symbol] = new = self.graph.placeholder("size")
            self.measured[new] = at
        for given in node.all_input_nodes:
            self.value[given] = self.operand(given, {}) if is_tensor(given) else self.scalar(given)

    def operand(self, captured: fx.Node, goals: Mapping[str, Placement]) -> fx.Node:
        states = {group: goals.get(group, "I") for group in self.groups}
        key = (captured, tuple(states.values()))
        if key not in self.asked:
            self.asked[key] = new = self.graph.placeholder(f"{captured.name}_{len(self.asked)}")
            layout = self.context.layout_of(self.context.shape(captured), states)
            self.annotate(new, layout, states, differentiable(captured.meta["val"]), captured)
            self.operands_of[new] = captured, states
        return self.asked[key]

    def scalar(self, captured: fx.Node) -> Any:
        value = captured.meta.get("val")
        if isinstance(value, torch.SymInt) and not depends_on_data(value):
            return self.sizes.node(value)
        new = self.numbers[captured] = self.graph.placeholder(captured.name)
        return new

    def convert(self, value: fx.Node, goals: Mapping[str, Placement]) -> fx.Node:
        known = self.operands_of.get(value)
        return super().convert(value, goals) if known is None else self.operand(known[0], goals)
