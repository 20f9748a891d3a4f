"""What a model makes of values that are sums over rows: whether it is the same for rows of two shapes.

The ranks of a step add up their parts of the loss. Rows of several lengths can be in one step if what each rank adds is
a sum over its rows, of which each is what it would be alone, divided by what is the same for all ranks: the number of
rows, or sums over the batch that a step makes (of a mask, of targets). Behind the last op that has rows, two graphs for
two lengths are then the same: a mean over all elements would divide by another number in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwise.core.layout import Layout
from shardwise.graph.sizes import expression
from shardwise.ops.env import ROWS
from shardwise.shard.sharded import Sharded

MOST = 64  # elements of a constant that are compared


class Step(NamedTuple):
    """An op, or a value that the graph is given, in a list: other steps are arguments by their numbers."""

    what: Any
    shape: tuple[str, ...]
    arguments: Any


def row_sums(sharded: Sharded) -> tuple[Step, ...]:
    """Return what the local graph computes of values without rows that depend on rows, and all that goes in there from
    elsewhere; equal for graphs that compute the same of the sums over their rows."""
    of_rows = set[fx.Node]()  # what depends on rows
    for node in sharded.graph.nodes:
        if _has_rows(node) or any(one in of_rows for one in node.all_input_nodes):
            of_rows.add(node)
    needed = {node for node in of_rows if not _has_rows(node) and node.op != "output"}
    numbers, found = dict[fx.Node, int](), list[Step]()
    for node in reversed(list(sharded.graph.nodes)):
        if node in needed:
            needed.update(one for one in node.all_input_nodes if not _has_rows(one))
    for node in (one for one in sharded.graph.nodes if one in needed):
        numbers[node] = len(found)
        found.append(_step(sharded, node, numbers))
    return tuple(found)


def _has_rows(node: fx.Node) -> bool:
    return _over_rows(node.meta.get("layout"))


def _over_rows(layout: Any) -> bool:
    if isinstance(layout, Layout):
        return ROWS in layout.sharding_axes
    return isinstance(layout, list | tuple) and any(map(_over_rows, layout))


def _step(sharded: Sharded, node: fx.Node, numbers: Mapping[fx.Node, int]) -> Step:
    value = node.meta.get("val")
    shape = tuple(str(expression(size)) for size in value.shape) if isinstance(value, Tensor) else ()
    if node.op != "placeholder":
        arguments = _plain((node.args, tuple(node.kwargs.items())), numbers)
        return Step(node.target, shape, arguments)
    constant = sharded.normal.captured.constants.get(node.name)
    if constant is None:
        return Step(node.name, shape, ())
    # A larger one is like none, not even like itself in another graph.
    values = tuple(constant.reshape(-1).tolist()) if constant.numel() <= MOST and not constant.is_meta else object()
    return Step("constant", shape, values)


def _plain(value: Any, numbers: Mapping[fx.Node, int]) -> Any:
    """Return arguments with numbers in place of steps, and nothing but its name in place of what has rows."""
    if isinstance(value, fx.Node):
        return ("step", numbers[value]) if value in numbers else "rows"
    if isinstance(value, list | tuple):
        return tuple(_plain(one, numbers) for one in value)
    if isinstance(value, dict):
        return tuple((key, _plain(one, numbers)) for key, one in value.items())
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return str(value)
    return type(value), value
