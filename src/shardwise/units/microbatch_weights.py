"""The weight w_m of a microbatch is its share of the batch's targets, or of their classes' weights, if the loss is a
mean cross-entropy, else its share of rows.

With these weights the sum of w_m L_m over microbatches is the loss of the whole batch, however its masks are spread.
The function that counts targets is a slice of the captured graph, from the loss's targets back: a few ops on
``labels``.
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
    """``count(env, *values)`` gives the number of valid targets in this rank's part of a microbatch, an int64 scalar,
    or the sum of the weights of their classes.

    ``values`` are those of ``leaves`` (parameters), ``buffers``, ``constants`` and ``fields``, in this order. All ranks
    call it together, for it may communicate.
    """

    count: Callable[..., Tensor]
    graph: fx.Graph  # the graph that `count` runs
    leaves: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Tensor, ...]
    fields: tuple[str, ...]


def mean_cross_entropy(normal: Normal) -> fx.Node | None:
    """Return the cross-entropy whose mean over integer targets is the loss that the model returns, if there is one."""
    node: Any = next(n for n in normal.graph.nodes if n.op == "output").args[0][0]
    while isinstance(node, fx.Node) and _passes(node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    mean = has(node, Fact.CLASS_LOSS) and given(node, "reduction", 1) == 1
    integer = mean and not node.args[1].meta["val"].is_floating_point()
    return node if integer else None


def _passes(node: fx.Node) -> bool:
    """Whether a node of a scalar only passes its value on."""
    return regroups(node) or has(node, Fact.CASTS) or op_name(node) in ("clone", "contiguous", "alias")


def summands(normal: Normal) -> set[fx.Node]:
    """Return the nodes whose plain sum is the loss, partial sums included: each has the same gradient as the loss."""
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


def targets_of(sharded: Sharded, loss: fx.Node) -> Targets:
    """Return the function that counts the valid targets of ``loss``, by the weights of their classes if these have
    weights: the part of the local graph that makes both.

    Where every rank has all targets of each microbatch, all of them count all, which leaves the shares as they are.
    Raises :class:`Uncapturable` if the count would depend on
    a buffer that an earlier microbatch writes.
    """
    node = next(n for n in sharded.graph.nodes if n.meta.get("origin") is loss and n.op == "call_function")
    if node.target is cross_entropy.cross_entropy:
        target, weight, ignore = *node.args[2:4], node.kwargs["ignore_index"]
    else:
        target, weight, ignore = node.args[1], given(node, "weight"), given(node, "ignore_index", -100)
    seen = _ancestors(target) | (set() if weight is None else _ancestors(weight))
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
    env = next(iter(graph.nodes))
    axes = tuple(sorted(sharding - {collectives.ROWS}))
    count = graph.call_function(
        cross_entropy.valid_targets, (env, copies[target], ignore, axes, None if weight is None else copies[weight])
    )
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
    """Return the node and all nodes that it depends on."""
    stack, seen = [node], {node}
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in seen]
        seen.update(new)
        stack.extend(new)
    return seen
