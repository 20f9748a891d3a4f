"""Cast dtypes, and name them in the graph, so that it computes the same on every device and under any default dtype.

Under ``fp64`` everything becomes a double: casts to narrower floats, constants, factories, and integers that meet a
Python float.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.torch_private import schema

aten = torch.ops.aten

WIDE = {
    torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
LOW = (torch.bfloat16, torch.float16)
NARROW = (torch.float32, *LOW)
GRADIENT_DTYPE = dict.fromkeys(LOW, torch.float32)
"""This is the dtype of gradients, masters and optimizer state, where it is not the parameter's own."""


def narrow(value: Any) -> bool:
    """Return whether a value is a tensor of floats or complex numbers narrower than doubles."""
    return isinstance(value, Tensor) and value.dtype in WIDE


def cast_floats(
    args: Sequence[Any], kwargs: Mapping[str, Any], these: Container[torch.dtype], to: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with tensors of ``these`` dtypes, also in lists, cast to another."""

    def cast(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(one, Tensor) for one in value):
            return [cast(one) for one in value]
        return value.to(to) if isinstance(value, Tensor) and value.dtype in these else value

    return [cast(a) for a in args], {k: cast(v) for k, v in kwargs.items()}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of ``dtype`` from Python numbers (``torch.tensor(0.1)``) in this context.

    The setting is the process's, not the thread's: set it in the main thread, around the threads that need it.
    """
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def name_dtypes(graph: fx.Graph, wide: bool) -> None:
    """Name the dtype of every op that would take torch's default; with ``wide``, replace narrow floats by doubles."""
    last = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for node in list(graph.nodes):
        if wide and node.op == "placeholder" and narrow(node.meta.get("val")) and node.users:
            assert last is not None
            with graph.inserting_before(last):
                cast = graph.call_function(aten.to.dtype, (node, WIDE[node.meta["val"].dtype]))
            cast.meta = {**node.meta, "val": node.meta["val"].to(WIDE[node.meta["val"].dtype])}
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        elif node.op == "call_function":
            if wide:
                _widen(node)
            _pin(graph, node)


def _widen(node: fx.Node) -> None:
    """Make doubles of the narrow dtypes that a node names, and of its example values."""
    value = node.meta.get("val")
    if node.target is not aten.view.dtype:
        node.args = tuple(WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in node.args)
        node.kwargs = {k: WIDE.get(a, a) if isinstance(a, torch.dtype) else a for k, a in node.kwargs.items()}
    if narrow(value):
        node.meta["val"] = value.to(WIDE[value.dtype])
    elif isinstance(value, tuple | list):
        node.meta["val"] = type(value)(v.to(WIDE[v.dtype]) if narrow(v) else v for v in value)


def _pin(graph: fx.Graph, node: fx.Node) -> None:
    """Pin the dtype of an op that makes floats of no floats: give it a dtype argument, or cast its integer operands."""
    described, value = schema(node.target), node.meta.get("val")
    if described is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return
    operands = [i for i in node.all_input_nodes if isinstance(i.meta.get("val"), Tensor)]
    if any(i.meta["val"].is_floating_point() or i.meta["val"].is_complex() for i in operands):
        return
    if any(a.name == "dtype" for a in described.arguments):
        if not operands and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": value.dtype}
    elif node.target is aten.where.Scalar:
        with graph.inserting_before(node):
            options = [
                graph.call_function(aten.scalar_tensor.default, (a,), {"dtype": value.dtype}) for a in node.args[1:]
            ]
        for option in options:
            option.meta = {**node.meta, "val": value.new_empty(())}
        node.target, node.args = aten.where.self, (node.args[0], *options)
    elif torch.Tag.pointwise in node.target.tags or described.name in (
        "aten::where",
        "aten::true_divide",
        "aten::divide",
    ):
        for operand in operands:
            if described.name == "aten::where" and operand is node.args[0]:
                continue
            with graph.inserting_before(node):
                cast = graph.call_function(aten.to.dtype, (operand, value.dtype))
            cast.meta = {**operand.meta, "val": operand.meta["val"].to(value.dtype)}
            node.replace_input_with(operand, cast)
