"""``F.embedding_bag`` over bags of one size is a lookup and a sum or a mean, of which each op has a sharding rule.

torch flattens the numbers (bags, size) and says where each bag begins, at the multiples of the size.  Of such a node
the lookup has the numbers as they were; rows of ``padding_idx`` count in no bag.  Bags of different sizes, and the
maximum of a bag, stay one op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardwise.graph.schema import given
from shardwise.graph.sizes import expression

aten = torch.ops.aten
SUM, MEAN = 0, 1
RESHAPES = (aten.reshape.default, aten.view.default)


def open_bags(graph: fx.Graph) -> None:
    """Replace such nodes in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.embedding_bag.padding_idx:
            numbers = _numbers(node)
            if numbers is not None:
                _open(graph, node, numbers)


def _numbers(node: fx.Node) -> fx.Node | None:
    """Return the numbers (bags, size) of a node whose bags are all of one size, and of which only the result is read;
    None for others."""
    flat, offsets = node.args[1:3]
    if given(node, "mode", SUM) not in (SUM, MEAN) or given(node, "scale_grad_by_freq", False):
        return None
    if any(user.args[1] != 0 for user in node.users):
        return None
    source = _unflattened(flat)
    if source is None or given(node, "include_last_offset", False):
        return None
    size = source.meta["val"].shape[1]
    steps = isinstance(offsets, fx.Node) and offsets.target is aten.arange.start_step and isinstance(size, int)
    if not steps or offsets.args[0] != 0 or offsets.args[2:3] != (size,):
        return None
    bags = [expression(one.meta["val"].shape[0]) for one in (offsets, source)]
    return source if bags[0] == bags[1] else None


def _unflattened(flat: Any) -> fx.Node | None:
    """Return the matrix of which a node is the elements, one row after the other."""
    if not isinstance(flat, fx.Node) or flat.target not in RESHAPES or list(flat.args[1]) != [-1]:
        return None
    source = flat.args[0]
    return source if isinstance(source, fx.Node) and source.meta["val"].dim() == 2 else None


def _open(graph: fx.Graph, node: fx.Node, numbers: fx.Node) -> None:
    weight, padding = node.args[0], given(node, "padding_idx")
    sparse, scales = bool(given(node, "sparse", False)), given(node, "per_sample_weights")
    example = node.meta["val"][0] if isinstance(node.meta["val"], tuple | list) else node.meta["val"]

    def put(target: Callable[..., Any], *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        values = fx.map_arg(args, lambda one: one.meta["val"])
        with torch.no_grad():
            made.meta = {k: v for k, v in node.meta.items() if k != "val"} | {"val": target(*values)}
        return made

    with graph.inserting_before(node):
        index = -1 if padding is None else padding % weight.meta["val"].shape[0]
        found = put(aten.embedding.default, weight, numbers, index, False, sparse)
        counts = None
        if padding is not None:
            left_out = put(aten.eq.Scalar, numbers, index)
            counts = put(aten.to.dtype, put(aten.logical_not.default, left_out), example.dtype)
            found = put(aten.masked_fill.Scalar, found, put(aten.unsqueeze.default, left_out, -1), 0.0)
        if isinstance(scales, fx.Node):
            found = put(aten.mul.Tensor, found, put(aten.unsqueeze.default, _weights(graph, put, scales, numbers), -1))
        found = put(aten.sum.dim_IntList, found, [1])
        if given(node, "mode", SUM) == MEAN:
            size = numbers.meta["val"].shape[1]
            if counts is None:
                found = put(aten.div.Scalar, found, size)
            else:
                number = put(aten.clamp_min.default, put(aten.sum.dim_IntList, counts, [1], True), 1)
                found = put(aten.div.Tensor, found, number)
    for user in list(node.users):
        user.replace_all_uses_with(found)
        graph.erase_node(user)
    graph.erase_node(node)


def _weights(graph: fx.Graph, put: Callable[..., fx.Node], scales: fx.Node, numbers: fx.Node) -> fx.Node:
    """Return the weight of each number (bags, size)."""
    source = _unflattened(scales)
    if source is not None:
        return source
    return put(aten.reshape.default, scales, [-1, numbers.meta["val"].shape[1]])
