"""Read the arguments of ATen calls by their names in the op's schema, wherever an overload has them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from shardwise.graph import torch_private


def is_tensor(node: fx.Node) -> bool:
    """Return whether a captured node's value is a tensor or holds some."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value))


def values_of(node: fx.Node) -> Sequence[Any]:
    """Return the values of a captured node's results, also where it has only one."""
    value = node.meta["val"]
    return value if isinstance(value, tuple | list) else (value,)


def as_result(node: fx.Node, each: Sequence[Any]) -> Any:
    """Return what there is of ``each`` result of a captured node as the node has them: several, or one by itself."""
    return each if isinstance(node.meta["val"], tuple | list) else each[0]


def outputs_of(graph: fx.Graph) -> Any:
    """Return what a graph returns, in nodes."""
    return next(iter(graph.find_nodes(op="output"))).args[0]


def selects_result(node: fx.Node) -> bool:
    """Return whether a node takes one of several results."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def differentiable(value: Any) -> bool:
    """Return whether a value, or one of several, can have a gradient."""
    if isinstance(value, tuple | list):
        return any(differentiable(v) for v in value)
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def op_name(op: Any) -> str:
    """Return the name of an op, or of the op that a node calls, without its overload and the namespace ``aten``.

    It is "" for anything that is no op, such as our own functions, which have facts of their own."""
    schema = torch_private.schema(op.target if isinstance(op, fx.Node) else op)
    return "" if schema is None else str(schema.name.removeprefix("aten::"))


def has_argument(node: fx.Node, name: str) -> bool:
    """Return whether this overload of an op has an argument of this name."""
    schema = torch_private.schema(node.target)
    return schema is not None and any(a.name == name for a in schema.arguments)


def given(node: fx.Node, name: str, default: Any = None) -> Any:
    """Return an argument of an ATen call, or ``default`` where the call leaves it out or gives None."""
    schema = torch_private.schema(node.target)
    names = [a.name for a in schema.arguments] if schema is not None else []
    value = node.kwargs.get(name)
    if name in names and names.index(name) < len(node.args):
        value = node.args[names.index(name)]
    return default if value is None else value


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    found: list[Tensor] = []
    fx.node.map_aggregate(tree, lambda a: found.append(a) if isinstance(a, Tensor) else None)
    return found
