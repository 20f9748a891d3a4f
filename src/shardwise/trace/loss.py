"""The weight of a microbatch: w_m is its share of the batch's targets if the loss is a mean cross-entropy, else its share of rows.

With these weights the sum of w_m L_m over microbatches is the loss of the whole batch, however its masks are spread.  The count of
targets comes from slicing the captured graph back from the loss's targets: a handful of ops on ``labels``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.trace import ops
from shardwise.trace.functional import Normal
from shardwise.trace.schema import given, op_name
from shardwise.trace.sharding import Sharded

aten = torch.ops.aten

_IDENTITIES = {aten.reshape.default, aten.view.default, aten.to.dtype, aten.clone.default, aten.alias.default, aten.squeeze.default}


@dataclass
class Targets:
    """``count(env, *fields, *constants) -> valid targets`` of this rank's rows of a microbatch, an int64 scalar."""

    count: Callable[..., Tensor]
    fields: tuple[str, ...]
    constants: tuple[Tensor, ...]


def mean_cross_entropy(normal: Normal) -> fx.Node | None:
    """The cross-entropy that *is* the loss, if its mean over integer targets is what the model returns."""
    node: Any = next(n for n in normal.graph.nodes if n.op == "output").args[0][0]
    while isinstance(node, fx.Node) and node.target in _IDENTITIES:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    mean = op_name(node) in ("cross_entropy_loss", "nll_loss_nd") and given(node, "reduction", 1) == 1
    integer = mean and not node.args[1].meta["val"].is_floating_point()
    return node if integer else None


def unweighted(node: fx.Node | None) -> bool:
    """Whether the mean is over the count of targets, not over class weights."""
    return node is not None and given(node, "weight") is None


def targets_of(sharded: Sharded, loss: fx.Node) -> Targets | None:
    """The function that counts the valid targets of ``loss``, or None where they depend on more than batch fields."""
    local = [n for n in sharded.graph.nodes if n.meta.get("origin") is loss and n.op == "call_function"]
    if not local:
        return None
    node = local[0]
    target, ignore = (node.args[2], node.args[4]) if node.target is ops.cross_entropy else (node.args[1], given(node, "ignore_index", -100))
    captured = sharded.normal.captured
    needed: list[fx.Node] = []
    stack, seen = [target], set()
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack.extend(n.all_input_nodes)
            if n.op == "placeholder" and n.name != "env":
                needed.append(n)
            if n.meta.get("origin") is None and "layout" in n.meta and n.op == "call_function":
                return None  # a collective: these targets are not this rank's own
    needed.sort(key=lambda n: n.name)
    fields = [n for n in needed if n.name in captured.fields]
    constants = [n for n in needed if n.name in captured.constants]
    if len(fields) + len(constants) != len(needed):
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    env = graph.placeholder("env")
    for n in (*fields, *constants):
        copies[n] = graph.placeholder(n.name)
    for n in sharded.graph.nodes:
        if n.name == "env":
            copies[n] = env
        elif n in seen and n not in copies:
            copies[n] = graph.node_copy(n, lambda a: copies[a])
    graph.output(graph.call_function(ops.valid_targets, (copies[target], ignore)))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Targets(
        module.forward, tuple(captured.fields[n.name] for n in fields), tuple(captured.constants[n.name] for n in constants)
    )
