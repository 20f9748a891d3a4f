"""``as_strided`` of a tensor is a lookup of its elements, which does not depend on how it lies in memory.

So windows that overlap, as in sliding attention, stay apart by the first dim: each row's elements are looked up by the
same numbers, which follow from the sizes and strides of the tensor alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.graph.schema import given
from shardwise.graph.sizes import expression

aten = torch.ops.aten


class _Dim(NamedTuple):
    """A dim of the source, or several that lie as one; ``parts`` are the dims of the result that go through it, each
    with its size and how many elements of this dim lie between two of its own."""

    size: int
    stride: Any
    parts: dict[int, tuple[int, int]]

    @property
    def whole(self) -> bool:
        """Whether the result has this dim as it is."""
        return list(self.parts.values()) == [(self.size, 1)]


def index_strides(graph: fx.Graph) -> None:
    """Replace, in place, such nodes that keep the first dim, and whose other sizes are known."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.as_strided.default and (dims := _dims(node)) is not None:
            _index(graph, node, dims)


def _dims(node: fx.Node) -> list[_Dim] | None:
    """Return the dims of the source but the first; None for what is no lookup in these."""
    x, made = node.args[0].meta["val"], node.meta["val"]
    if given(node, "storage_offset") or x.storage_offset() != 0 or not x.dim() or not made.dim():
        return None
    sizes, strides = [list(map(expression, each)) for each in (x.shape, x.stride())]
    wanted, steps = [list(map(expression, each)) for each in (made.shape, made.stride())]
    if not all(isinstance(one, int) for one in (*sizes[1:], *wanted[1:])):
        return None
    if wanted[0] != sizes[0] or steps[0] != strides[0]:
        return None
    own = [_Dim(size, stride, {}) for size, stride in zip(sizes[1:], strides[1:], strict=True)]
    joined: list[_Dim] = []
    for one in own:
        if joined and joined[-1].stride == one.size * one.stride:
            joined[-1] = _Dim(joined[-1].size * one.size, one.stride, {})
        else:
            joined.append(one._replace(parts={}))
    parts = list(zip(wanted[1:], steps[1:], strict=True))
    return _through(own, parts) or _through(joined, parts)


def _through(dims: list[_Dim], parts: list[tuple[int, Any]]) -> list[_Dim] | None:
    """Return dims with the parts of the result, by size and stride, that go through them; None where some do not."""
    for at, (size, step) in enumerate(parts):
        found = [(ratio, d) for d, one in enumerate(dims) if (ratio := _times(step, one.stride)) is not None]
        fitting = [(ratio, d) for ratio, d in found if ratio * (size - 1) < dims[d].size]
        if not fitting:
            return None
        ratio, d = min(fitting)
        dims[d].parts[at] = size, ratio
    inside = all(sum(step * (size - 1) for size, step in one.parts.values()) < one.size for one in dims)
    return dims if inside and all(one.parts for one in dims) else None


def _times(step: Any, stride: Any) -> int | None:
    """Return how often ``stride`` goes into ``step``, a whole number; None for others."""
    ratio = step / stride if stride != 0 else 0
    return int(ratio) if ratio == int_of(ratio) and ratio >= 1 else None


def int_of(ratio: Any) -> int | None:
    """Return a number as an int; None for one with symbols."""
    return int(ratio) if isinstance(ratio, int | float) or ratio.is_number else None


def _index(graph: fx.Graph, node: fx.Node, dims: list[_Dim]) -> None:
    x, looked = node.args[0], list(dims)
    while looked and looked[-1].whole:  # the last dims stay as they are
        looked.pop()
    number = sum(len(one.parts) for one in looked)

    def put(target: Callable[..., Any], *args: Any, **named: Any) -> fx.Node:
        made = graph.call_function(target, args, named)
        values = fx.map_arg(args, lambda one: one.meta["val"])
        with torch.no_grad():
            made.meta = {k: v for k, v in node.meta.items() if k != "val"} | {"val": target(*values, **named)}
        return made

    def places(one: _Dim) -> fx.Node:
        found = None
        for at, (size, step) in one.parts.items():
            own = put(aten.mul.Scalar, put(aten.arange.default, size, device=x.meta["val"].device), step)
            own = put(aten.view.default, own, [size if d == at else 1 for d in range(number)])
            found = own if found is None else put(aten.add.Tensor, found, own)
        assert found is not None
        return found

    with graph.inserting_before(node):
        source = put(aten.flatten.using_ints, x, 1)
        source = put(aten.unflatten.int, source, 1, [one.size for one in dims]) if len(dims) > 1 else source
        found = put(aten.index.Tensor, source, [None, *map(places, looked)]) if looked else source
    node.replace_all_uses_with(found)
    graph.erase_node(node)


__all__ = ["index_strides"]
