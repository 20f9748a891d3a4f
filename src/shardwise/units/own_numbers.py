"""Numbers by which each row of the batch looks up its own elements: ``arange(rows) * n + f`` with f from 0 to n - 1.

So nets on graphs put the graphs of a batch together: the nodes follow each other, and the ends of a row's edges are
raised by the nodes before.  A microbatch can count them from its own first row, if ``f`` keeps to its range in each
batch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.core.errors import ConfigError
from shardwise.core.fields import has_rows
from shardwise.graph.captured import Captured
from shardwise.graph.schema import given, op_name
from shardwise.graph.sizes import expression

MOVES = frozenset({
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "select", "slice", "squeeze", "unsqueeze",
    "expand", "expand_as", "repeat", "index", "index_select", "clone", "contiguous", "alias", "to", "unbind", "split",
    "chunk", "split_with_sizes",
})  # fmt: skip
"""Ops whose elements are those of their first argument."""


class NotOwn(Exception):
    """A number may be that of another row."""


@dataclass(frozen=True)
class OwnNumbers:
    """``module(*fields)`` gives what is added to the first numbers of rows, which lies below each of ``limits``."""

    module: fx.GraphModule
    fields: tuple[str, ...]
    limits: tuple[int, ...]
    place: str

    def check(self, fields: Mapping[str, Tensor]) -> None:
        """Raise :class:`ConfigError` where rows look up elements of others."""
        found: tuple[Tensor, ...] = self.module(*(fields[name] for name in self.fields))
        for value, limit in zip(found, self.limits, strict=True):
            if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < limit:
                wrong = f"a row looks up elements of another in {self.place}, by a number of {', '.join(self.fields)} "
                wrong += f"between {int(value.min())} and {int(value.max())}"
                legal = f"microbatches = 1, or numbers from 0 to {limit - 1}"
                raise ConfigError.on("batch", wrong, legal)


def own_numbers(captured: Captured, graph: fx.Graph, lookups: Mapping[fx.Node, tuple[int, str]]) -> OwnNumbers | None:
    """Return what tells of a batch that rows look up their own elements by the numbers ``lookups``, of dims in which a
    row has so many elements, at a place; None where that does not follow from fields alone."""
    rows = _rows(captured, graph)
    added: dict[fx.Node, int] = {}
    try:
        for node, (each, _) in lookups.items():
            for one in _added(node, rows, each):
                added[one] = min(added.get(one, each), each)
        module, fields = _part(captured, graph, added)
    except NotOwn:
        return None
    place = next(place for _, place in lookups.values())
    return OwnNumbers(module, fields, tuple(added.values()), place)


def elements(captured: Captured, graph: fx.Graph, x: fx.Node, dim: int) -> int | None:
    """Return how many elements of a dim a row has; None where it has none for each row."""
    ratio = expression(x.meta["val"].shape[dim]) / _rows(captured, graph)
    return int(ratio) if ratio == int(ratio) else None


def _rows(captured: Captured, graph: fx.Graph) -> Any:
    field = next(n for n in graph.nodes if n.name in captured.fields and has_rows(captured.fields[n.name]))
    return expression(field.meta["val"].shape[0])


def _added(node: fx.Node, rows: Any, each: int) -> Iterator[fx.Node]:
    """Yield what is added to the first numbers of rows in ``node``; raise :class:`NotOwn` where it is no such sum."""
    name = op_name(node)
    if name in MOVES or node.target is operator.getitem:
        yield from _added(node.args[0], rows, each)
    elif name == "cat":
        for one in node.args[0]:
            yield from _added(one, rows, each)
    elif name == "add" and all(isinstance(one, fx.Node) for one in node.args) and not node.kwargs:
        first = next((i for i, one in enumerate(node.args) if _scaled(one, rows) == each), None)
        if first is None:
            raise NotOwn
        yield node.args[1 - first]
    elif not (name == "arange" and _counts(node) == rows * each):
        raise NotOwn


def _scaled(node: Any, rows: Any) -> int | None:
    """Return k where a tensor has the numbers of the rows times k."""
    name = op_name(node)
    if name == "arange":
        return 1 if _counts(node) == rows else None
    if name in MOVES:
        return _scaled(node.args[0], rows)
    if name == "mul" and isinstance(node.args[1], int) and isinstance(node.args[0], fx.Node):
        found = _scaled(node.args[0], rows)
        return None if found is None else found * node.args[1]
    return None


def _counts(node: fx.Node) -> Any:
    """Return up to where an arange counts from 0 in ones."""
    plain = node.target is torch.ops.aten.arange.default or (given(node, "start") == 0 and given(node, "step", 1) == 1)
    return expression(node.meta["val"].shape[0]) if plain else None


def _part(captured: Captured, graph: fx.Graph, wanted: Mapping[fx.Node, int]) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return a part of a graph, of fields alone, with the names of these."""
    seen, stack = set[fx.Node](), list(wanted)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    places = [n for n in graph.nodes if n in seen and n.op == "placeholder"]
    if any(n.name not in captured.fields for n in places) or any("ordinal" in n.meta for n in seen):
        raise NotOwn
    new, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in places:
        copies[node] = new.placeholder(node.name)
    for node in graph.nodes:
        if node in seen and node.op == "call_function":
            copies[node] = new.node_copy(node, copies.__getitem__)
    new.output(tuple(copies[node] for node in wanted))
    return fx.GraphModule(torch.nn.Module(), new), tuple(captured.fields[n.name] for n in places)


__all__ = ["OwnNumbers", "elements", "own_numbers"]
