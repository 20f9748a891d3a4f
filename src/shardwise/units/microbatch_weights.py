"""The weight of a microbatch: w_m is its share of the batch's targets if the loss is a mean cross-entropy, else its
share of rows.

With these weights the sum of w_m L_m over microbatches is the loss of the whole batch, however its masks are spread.
The count of targets comes from slicing the captured graph back from the loss's targets: a handful of ops on ``labels``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.aten_ops import Fact, has, regroups
from shardwise.graph.captured import Uncapturable
from shardwise.graph.functional import Normal
from shardwise.graph.schema import given, op_name
from shardwise.ops import collectives, cross_entropy
from shardwise.shard.sharded import Sharded

aten = torch.ops.aten


@dataclass
class Targets:
    """``count(env, *values) -> valid targets`` of this rank's part of a microbatch, an int64 scalar.

    ``values`` are of parameters and buffers, constants and fields, in this order.  All ranks call it together: it may
    gather.
    """

    count: Callable[..., Tensor]
    graph: fx.Graph  # of `count`
    leaves: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Tensor, ...]
    fields: tuple[str, ...]


def mean_cross_entropy(normal: Normal) -> fx.Node | None:
    """The cross-entropy that *is* the loss, if its mean over integer targets is what the model returns."""
    node: Any = next(n for n in normal.graph.nodes if n.op == "output").args[0][0]
    while isinstance(node, fx.Node) and _passes(node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    mean = has(node, Fact.CLASS_LOSS) and given(node, "reduction", 1) == 1
    integer = mean and not node.args[1].meta["val"].is_floating_point()
    return node if integer else None


def _passes(node: fx.Node) -> bool:
    """Whether a node passes on the one number that it is given."""
    return regroups(node) or has(node, Fact.CASTS) or op_name(node) in ("clone", "contiguous", "alias")


def summands(normal: Normal) -> set[fx.Node]:
    """The nodes whose plain sum is the loss: the gradient of each is the loss's own."""
    stack: list[Any] = [next(n for n in normal.graph.nodes if n.op == "output").args[0][0]]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, fx.Node):
            found.add(node)
            if _passes(node):
                stack.append(node.args[0])
            elif op_name(node) == "add" and given(node, "alpha", 1) == 1:
                stack.extend(node.args[:2])
    return found


def unweighted(node: fx.Node | None) -> bool:
    """Whether the mean is over the count of targets, not over class weights."""
    return node is not None and given(node, "weight") is None


def targets_of(sharded: Sharded, loss: fx.Node) -> Targets:
    """The function that counts the valid targets of ``loss``: what of the local graph its targets need.

    Targets that every rank has in full are counted by the first.  Raises :class:`Uncapturable` where the count would
    depend on what a microbatch before it wrote to a buffer.
    """
    node = next(n for n in sharded.graph.nodes if n.meta.get("origin") is loss and n.op == "call_function")
    own = node.target is cross_entropy.cross_entropy
    target, ignore = (
        (node.args[2], node.kwargs["ignore_index"]) if own else (node.args[1], given(node, "ignore_index", -100))
    )
    seen = _ancestors(target)
    captured = sharded.normal.captured
    places = [n for n in sharded.graph.nodes if n in seen and n.op == "placeholder" and n.name != "env"]
    kinds = [captured.parameters, captured.buffers, captured.constants, captured.fields]
    groups = [[n for n in places if n.name in names] for names in kinds]
    leaves, buffers, constants, fields = groups
    if written := {captured.buffers[n.name] for n in buffers} & set(sharded.normal.updates):
        raise Uncapturable(f"which targets count depends on {sorted(written)[0]}, a buffer that forward writes")
    graph = fx.Graph()
    copies = {next(n for n in sharded.graph.nodes if n.name == "env"): graph.placeholder("env")}
    for n in (n for group in groups for n in group):
        copies[n] = graph.placeholder(n.name)
        copies[n].meta = dict(n.meta)
    for n in sharded.graph.nodes:
        if n in seen and n not in copies:
            copies[n] = graph.node_copy(n, lambda a: copies[a])
    sharding = target.meta["layout"].sharding_axes
    counter = cross_entropy.valid_targets if collectives.ROWS in sharding else cross_entropy.valid_targets_once
    env = next(iter(graph.nodes))
    axes = tuple(sorted(sharding - {collectives.ROWS}))
    count = graph.call_function(counter, (env, copies[target], ignore, axes))
    graph.output(count)
    return Targets(
        fx.GraphModule(torch.nn.Module(), graph).forward,
        graph,
        tuple(captured.parameters[n.name] for n in leaves),
        tuple(captured.buffers[n.name] for n in buffers),
        tuple(captured.constants[n.name] for n in constants),
        tuple(captured.fields[n.name] for n in fields),
    )


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and all that it needs."""
    stack, seen = [node], {node}
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in seen]
        seen.update(new)
        stack.extend(new)
    return seen
