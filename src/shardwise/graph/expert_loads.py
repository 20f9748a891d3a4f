"""How many tokens each expert gets, kept beside the loss: of every layer of experts that was found."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardwise.core.fields import LOAD
from shardwise.graph.experts import Experts
from shardwise.graph.functional import Normal
from shardwise.graph.naming import module_path

aten = torch.ops.aten


def keep_loads(normal: Normal) -> None:
    """Let the graph give, for each layer of experts, the numbers of the choices that fell on each expert, and last of
    those that fell on none (experts + 1): sums over rows, which ranks and microbatches have in parts."""
    graph = normal.graph
    (output,) = graph.find_nodes(op="output")
    found = list(output.args[0])
    names: dict[str, int] = {}
    for node in list(graph.nodes):
        if isinstance(node.target, Experts):
            path = module_path(node) or "experts"
            names[path] = names.get(path, 0) + 1
            normal.updates.append(LOAD + path + (f" ({names[path]})" if names[path] > 1 else ""))
            found.append(_load(graph, node, node.target.experts + 1))
    output.args = (tuple(found),)


def _load(graph: fx.Graph, layer: fx.Node, kinds: int) -> fx.Node:
    ids: Any = layer.args[0]
    like = ids.meta["val"]

    def put(target: Any, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
        new = graph.call_function(target, args)
        new.meta = {**{k: v for k, v in layer.meta.items() if k in ("nn_module_stack", "path")}, "val": value}
        return new

    with graph.inserting_after(layer):
        column = put(aten.unsqueeze.default, (ids, 1), like.unsqueeze(1))
    with graph.inserting_after(column):
        every = put(aten.arange.default, (kinds,), like.new_empty(kinds))
        every.kwargs = {"dtype": like.dtype, "device": like.device}
    with graph.inserting_after(every):
        chosen = put(aten.eq.Tensor, (column, every), operator.eq(column.meta["val"], every.meta["val"]))
    with graph.inserting_after(chosen):
        return put(aten.sum.dim_IntList, (chosen, [0]), chosen.meta["val"].sum(0))


__all__ = ["keep_loads"]
