"""Replace what ``torch.vmap`` maps by the ops that it runs.

A captured graph has the mapped function as it was called: between a node that opens a level of vmap and the one that
closes it, ops compute with tensors that lack the mapped dim and have no memory of their own.  Traced below vmap, the
same nodes are ordinary ops on whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.aliases import is_random
from shardwise.graph.torch_private import VMAP_CLOSES, VMAP_LOADS, VMAP_OPENS, traced_below
from shardwise.ops import custom_function


def without_vmaps(module: fx.GraphModule) -> None:
    """Replace each vmap in a captured graph, and in the graphs that it wraps.

    Left alone is a vmap that draws random numbers, since nobody can tell for which rows, one that calls an
    ``autograd.Function``, and one that wraps a graph, such as that of ops without gradients."""
    for owner in module.modules():
        if isinstance(owner, fx.GraphModule):
            for region in list(_regions(owner.graph)):
                _replace(owner, region)
            for node in owner.graph.find_nodes(op="call_function", target=VMAP_LOADS):
                owner.graph.erase_node(node)


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the nodes of each outermost vmap."""
    depth, region = 0, list[fx.Node]()
    for node in graph.nodes:
        depth += node.target is VMAP_OPENS
        if not depth:
            continue
        region.append(node)
        if node.target is VMAP_CLOSES:
            depth -= 1
            if not depth:
                yield region
                region = []


def _replace(owner: fx.GraphModule, region: Sequence[fx.Node]) -> None:
    inside = set(region)
    read = dict.fromkeys(i for node in region for i in node.all_input_nodes if i not in inside and i.op != "get_attr")
    calls = [node for node in region if node.op == "call_function"]
    if any(node.target is custom_function.OP or is_random(node) or _wraps(owner, node) for node in calls):
        return
    outputs = [node for node in calls if any(user not in inside for user in node.users)]

    def run(*given: Any) -> list[Any]:
        known = dict(zip(read, given, strict=True))
        for node in calls:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _value(owner, n, known))
            known[node] = node.target(*args, **kwargs)
        return [known[node] for node in outputs]

    traced = traced_below(run, [node.meta["val"] for node in read])
    copies = dict(zip(traced.find_nodes(op="placeholder"), read, strict=True))
    (results,) = next(iter(traced.find_nodes(op="output"))).args
    with owner.graph.inserting_before(region[0]):
        for node in traced.nodes:
            if node.op == "call_function":
                copies[node] = owner.graph.node_copy(node, copies.__getitem__)
                copies[node].meta = _meta(calls[0], node.meta.get("val"))
        for node, result in zip(outputs, results, strict=True):
            # A value has the memory of its views, which an op inside and one after the vmap know by different values.
            alias = owner.graph.call_function(torch.ops.aten.alias.default, (copies[result],))
            alias.meta = _meta(node, node.meta["val"])
            node.replace_all_uses_with(alias, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        if not node.users:
            owner.graph.erase_node(node)


def _wraps(owner: fx.GraphModule, node: fx.Node) -> bool:
    objects = [getattr(owner, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    return any(isinstance(one, fx.GraphModule) for one in objects)


def _meta(like: fx.Node, value: Any) -> dict[str, Any]:
    return {**{k: like.meta[k] for k in ("nn_module_stack", "stack_trace") if k in like.meta}, "val": value}


def _value(owner: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return what a node is worth; objects such as wrapped functions are attributes of the graph's module."""
    return getattr(owner, str(node.target)) if node.op == "get_attr" else known[node]


__all__ = ["without_vmaps"]
