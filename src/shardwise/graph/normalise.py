"""Clean up a functional graph: casts and slices that change nothing, kernels that read on the host, and causal masks.

transformers passes a full (rows, 1, S, S) mask to every attention, which costs 40–70 % of its speed on CPU and the
flash kernel on CUDA; a mask that depends on shapes alone is computed here once and, if lower-triangular, replaced by
``is_causal``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.bags import open_bags
from shardwise.graph.dtypes import name_dtypes
from shardwise.graph.expert_loops import group_loops
from shardwise.graph.experts import group_experts
from shardwise.graph.functional import Normal
from shardwise.graph.schema import given
from shardwise.graph.sizes import concrete, expression
from shardwise.graph.strides import index_strides
from shardwise.ops.expected import expected

aten = torch.ops.aten


def normalise(normal: Normal) -> None:
    """Simplify ``normal.graph`` in place; the values that it computes stay the same."""
    name_dtypes(normal.graph, wide=normal.captured.precision == "fp64")
    for node in list(normal.graph.nodes):
        if has(node, Fact.CASTS):
            _simplify_cast(normal.graph, node)
        elif node.op == "call_function" and node.target is aten.masked_fill.Tensor:
            _choose(normal.graph, node)
        elif node.op == "call_function" and node.target is aten.index_put.default:
            _put_where_true(normal.graph, node)
        elif node.op == "call_function" and node.target in (aten.slice.Tensor, aten.view.default, aten.reshape.default):
            _skip_unchanged(node)
    _fold_masks(normal)
    if normal.captured.outputs is not None or normal.captured.looped:
        merge_equal(normal.graph)
    if normal.captured.looped:
        eliminate_dead(normal.graph)
        group_loops(normal.graph, normal.captured.looped, normal.captured.parameters)
    group_experts(normal.graph)
    open_bags(normal.graph)
    index_strides(normal.graph)
    eliminate_dead(normal.graph)


def merge_equal(graph: fx.Graph) -> None:
    """Compute once what several nodes compute from the same operands; every op but the random ones is a function.

    A model that returns its loss alone is called a second time for its outputs, and the two calls share the most."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or "ordinal" in node.meta:
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))  # a node is written as its name, which is its own
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def eliminate_dead(graph: fx.Graph) -> None:
    """Remove nodes that no output needs; every op of a functional graph is pure, random ones included, but checks."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target is not expected:
            graph.erase_node(node)


def _simplify_cast(graph: fx.Graph, node: fx.Node) -> None:
    source, value = node.args[0], node.meta["val"]
    if isinstance(source, fx.Node) and source.meta["val"].dtype == value.dtype:
        if given(node, "memory_format") is None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    else:
        with graph.inserting_before(node):
            cast = graph.call_function(aten.to.dtype, (source, value.dtype))
        cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast)
        graph.erase_node(node)


def _choose(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``masked_fill`` with a tensor by ``where``: its kernel reads the tensor on the host and waits for a
    GPU."""
    x, mask, value = node.args
    with graph.inserting_before(node):
        if value.meta["val"].dtype != node.meta["val"].dtype:
            cast = graph.call_function(aten.to.dtype, (value, node.meta["val"].dtype))
            cast.meta = {**value.meta, "val": value.meta["val"].to(node.meta["val"].dtype)}
            value = cast
        chosen = graph.call_function(aten.where.self, (mask, value, x))
    chosen.meta = dict(node.meta)
    node.replace_all_uses_with(chosen)
    graph.erase_node(node)


def _put_where_true(graph: fx.Graph, node: fx.Node) -> None:
    """Replace ``x[mask] = value``, of one value for all that a mask picks, by ``where``: no row then needs another."""
    x, indices, value = node.args[:3]
    mask = indices[0]
    if len(indices) != 1 or mask.meta["val"].dtype is not torch.bool or given(node, "accumulate", False):
        return
    rest = x.meta["val"].dim() - mask.meta["val"].dim()
    if value.meta["val"].dim() > rest:
        return
    with graph.inserting_before(node):
        for _ in range(rest):
            wider = graph.call_function(aten.unsqueeze.default, (mask, -1))
            wider.meta = {**node.meta, "val": mask.meta["val"].unsqueeze(-1)}
            mask = wider
        chosen = graph.call_function(aten.where.self, (mask, value, x))
    chosen.meta = dict(node.meta)
    node.replace_all_uses_with(chosen)
    graph.erase_node(node)


def _skip_unchanged(node: fx.Node) -> None:
    """Replace a slice or a view that is all of its operand: a capture keeps slices where the size of the dim is
    symbolic."""
    source = node.args[0]
    sizes, own = ([expression(s) for s in one.meta["val"].shape] for one in (node, source))
    steps = given(node, "step", 1) if node.target is aten.slice.Tensor else 1
    if sizes == own and steps == 1 and not any(user.op == "output" for user in node.users):
        node.replace_all_uses_with(source)


def _fold_masks(normal: Normal) -> None:
    static = static_nodes(normal)
    verdicts: dict[fx.Node, str] = {}
    for node in normal.graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        mask = given(node, "attn_mask")
        if not isinstance(mask, fx.Node) or mask not in static or given(node, "is_causal", False):
            continue
        if mask not in verdicts:
            verdicts[mask] = _verdict(evaluate(normal, mask))
        if verdicts[mask] == "keep":
            continue
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal", "dropout_p")}
        dropout = given(node, "dropout_p", 0.0)
        args = [*node.args[:3], None, dropout, verdicts[mask] == "causal"]
        node.args, node.kwargs = tuple(args), kwargs


def _verdict(mask: Tensor) -> str:
    """Return "causal" for a lower-triangular mask, "all" for one that masks nothing, else "keep"."""
    if mask.dtype is torch.bool:
        allowed, known = mask, True
    else:
        allowed = mask == 0
        lowest = torch.finfo(mask.dtype).min / 2
        known = bool((allowed | (mask <= lowest)).all())
    if not known:
        return "keep"
    if bool(allowed.all()):
        return "all"
    rows, columns = mask.shape[-2:]
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and bool((allowed == triangle).all()) else "keep"


def static_nodes(normal: Normal) -> set[fx.Node]:
    """Return the nodes whose values follow from shapes, constants and buffers that forward does not write."""
    captured = normal.captured
    static: set[fx.Node] = set()
    for node in normal.graph.nodes:
        if node.op == "placeholder":
            fixed = node.name in captured.constants or captured.buffers.get(node.name, "") not in normal.updates
            if fixed and (node.name in captured.constants or node.name in captured.buffers):
                static.add(node)
        elif node.op == "call_function" and "ordinal" not in node.meta:
            known = _of_shape(node) or all(i in static for i in node.all_input_nodes)
            static |= {node} if known else set()
    return static


def _of_shape(node: fx.Node) -> bool:
    """Return whether a node reads no value of its operand."""
    return has(node, Fact.LIKE) or node.target is aten.sym_size.int


def evaluate(normal: Normal, goal: fx.Node) -> Tensor:
    """Return the value of a static node for as many rows as the capture's example had."""
    values: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        if node not in values:
            if node.op == "placeholder":
                values[node] = normal.captured.value(node.name)
            elif _of_shape(node):  # it reads no value of its argument, which may be an activation
                like = node.args[0].meta["val"]
                shape = [concrete(s) for s in like.shape]
                empty = torch.empty(shape, dtype=like.dtype)
                values[node] = node.target(empty, *fx.map_arg(node.args[1:], value), **fx.map_arg(node.kwargs, value))
            else:
                values[node] = node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))
        return values[node]

    with torch.no_grad():
        result: Tensor = value(goal)
    return result
