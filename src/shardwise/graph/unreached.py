"""Parameters that one way of a forward does not reach, and another may.

Where forward decides in Python, a first capture may leave parameters out (the experts that no token of a batch has, the
embedding of masked frames where nothing is masked).  They stand beside a value of the module that they belong to: so
they have a place in buckets, in memory and on a stage of a pipeline, and a batch that reaches them finds them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx

from shardwise.graph.functional import Normal
from shardwise.graph.schema import outputs_of
from shardwise.ops.beside import beside


def keep_unreached(normal: Normal) -> None:
    """Let the trainable parameters on which the loss does not depend stand beside values on which it does, in place:
    each beside the first value of the parameter that the module has before it, or else after it."""
    loss = outputs_of(normal.graph)[0]
    matters = _closure([loss], lambda node: node.all_input_nodes)
    learning = [n for n in normal.graph.nodes if _learns(normal, n)]
    names = normal.captured.parameters
    reached = {names[n.name] for n in learning if n in matters}  # one that is tied has several placeholders
    values = [n for n in normal.graph.nodes if n in matters and n.op == "call_function" and _floating(n)]
    places: dict[fx.Node, list[fx.Node]] = {}
    for at, node in enumerate(learning):
        if names[node.name] not in reached:
            near = (_first(values, one) for one in (*reversed(learning[:at]), *learning[at:]) if one in matters)
            if (place := next(near, None)) is not None:
                places.setdefault(place, []).append(node)
                reached.add(names[node.name])
    for place, parameters in places.items():
        with normal.graph.inserting_after(place):
            new = normal.graph.call_function(beside, (place, *parameters))
        new.meta = {k: place.meta[k] for k in ("val", "nn_module_stack", "stack_trace", "path") if k in place.meta}
        place.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)


def _learns(normal: Normal, node: fx.Node) -> bool:
    captured = normal.captured
    name = captured.parameters.get(node.name) if node.op == "placeholder" else None
    return name is not None and captured.trainable[name]


def _first(values: list[fx.Node], parameter: fx.Node) -> fx.Node | None:
    depends = _closure([parameter], lambda node: node.users)
    return next((value for value in values if value in depends), None)


def _floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and torch.is_floating_point(value)


def _closure(ends: Iterable[fx.Node], edges: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found, stack = set[fx.Node](), list(ends)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(edges(node))
    return found


__all__ = ["keep_unreached"]
