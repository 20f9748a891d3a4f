"""Make the graph for batches of one shape of a graph that was captured with symbolic dims beside that of the rows.

Nothing runs: sizes are put in place of symbols, in the shapes of values and where ops take sizes as arguments.  What
the capture assumed of its symbols (ranges, and guards such as "no longer than the table of positions") is checked
before.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.core.fields import has_rows
from shardwise.graph.captured import Captured
from shardwise.graph.torch_private import HigherOrderOperator, Symbols, known_number, storage_key

Shapes = Mapping[str, Sequence[int]]
"""The shape of each field of a batch; the number of rows in it does not matter."""


def symbolic_dims(captured: Captured) -> set[tuple[str, int]]:
    """Return the dims of fields whose size is a symbol, besides the rows."""
    return {
        (field, dim) for field, value in _fields(captured).items()
        for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt) and (dim or not has_rows(field))
    }  # fmt: skip


def specialised(captured: Captured, shapes: Shapes) -> Captured | None:
    """Return ``captured`` for batches of these ``shapes``, with a symbol for the rows alone, where it has one.

    None: the capture does not hold for them."""
    symbols = _solved(captured, shapes)
    if symbols is None:
        return None
    try:
        owner = _Copy(symbols).module(captured.owner)
    except _Unusual:
        return None
    return replace(captured, graph=owner.graph, owner=owner, notes=list(captured.notes))


def holds_for(captured: Captured, shapes: Shapes) -> bool:
    """Whether what ``captured`` assumed of its sizes holds for these ``shapes``."""
    return _solved(captured, shapes) is not None


def put_known_numbers(owner: fx.GraphModule) -> None:
    """Put sizes that a capture has found to be one number where ops take them, in place of the nodes that read them:
    ``torch.split(x, [2, 3])`` has found that of an ``x`` as long as values say.

    So a graph on disk, where a number is nothing else, and the one that it was written from are the same."""
    for node in list(owner.graph.nodes):
        if node.op == "get_attr" and isinstance(inner := getattr(owner, str(node.target)), fx.GraphModule):
            put_known_numbers(inner)
        number = known_number(node.meta.get("val"))
        if number is None:
            continue
        for user in list(node.users):
            if isinstance(user.target, HigherOrderOperator):  # the sub-graph has no placeholder for it any more
                user.args = tuple(one for one in user.args if one is not node)
            user.args, user.kwargs = fx.map_arg(
                (user.args, user.kwargs), lambda one, node=node, number=number: number if one is node else one
            )
        owner.graph.erase_node(node)


def _fields(captured: Captured) -> dict[str, Tensor]:
    places = captured.graph.find_nodes(op="placeholder")
    return {captured.fields[n.name]: n.meta["val"] for n in places if n.name in captured.fields}


def _solved(captured: Captured, shapes: Shapes) -> Symbols | None:
    """Return the numbers of the symbols for fields of these shapes; None where they do not fit."""
    fields = _fields(captured)
    if {name: len(shape) for name, shape in shapes.items()} != {name: one.dim() for name, one in fields.items()}:
        return None
    pairs = [
        (size, shapes[name][dim]) for name, value in fields.items()
        for dim, size in enumerate(value.shape) if dim or not has_rows(name)
    ]  # fmt: skip
    rows = next((one.shape[0] for name, one in fields.items() if has_rows(name)), None)
    return Symbols.solved(pairs, rows, next(iter(fields.values())), captured.assumed)


class _Unusual(Exception):
    """A value of the graph cannot be made without its op: it shows the memory of another in another dtype, say."""


class _Copy:
    """Copies modules with graphs, and puts numbers in place of symbols."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        # By old storage, so that what shares memory goes on to: on the meta device, or an old value that stays.
        self.memory: dict[int, Tensor] = {}

    def module(self, old: fx.GraphModule) -> fx.GraphModule:
        """Return a copy of a module and of those of its sub-graphs."""
        root = nn.Module()
        for node in old.graph.find_nodes(op="get_attr"):
            value = getattr(old, str(node.target))
            setattr(root, str(node.target), self.module(value) if isinstance(value, fx.GraphModule) else value)
        return fx.GraphModule(root, self.graph(old.graph))

    def graph(self, old: fx.Graph) -> fx.Graph:
        new, known = fx.Graph(), dict[fx.Node, Any]()
        for node in old.nodes:
            value = self.value(node.meta["val"]) if "val" in node.meta else None
            if isinstance(value, int | float | bool) and not isinstance(node.meta["val"], int | float | bool):
                known[node] = value
                continue
            args = node.args
            if isinstance(node.target, HigherOrderOperator):  # the sub-graph has no placeholders for numbers
                args = tuple(a for a in args if not (isinstance(a, fx.Node) and self.is_number(a, known)))
            args, kwargs = (fx.map_arg(one, known.__getitem__) for one in (args, node.kwargs))
            made = new.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            made.meta = copy.copy(node.meta)
            if "val" in node.meta:
                made.meta["val"] = value
            known[node] = made
        return new

    @staticmethod
    def is_number(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
        return not isinstance(known[node], fx.Node)

    def value(self, old: Any) -> Any:
        """Return what stands for the value of a node."""
        if isinstance(old, Tensor):
            return self.tensor(old)
        if isinstance(old, tuple | list):
            return type(old)(map(self.value, old))
        return self.symbols.of(old)

    def tensor(self, old: Tensor) -> Tensor:
        sizes, strides, offset = old.shape, old.stride(), old.storage_offset()
        numbers = [*sizes, *strides, offset]
        found = list(map(self.symbols.of, numbers))
        key = storage_key(old)
        if key not in self.memory and all(a is b for a, b in zip(numbers, found, strict=True)):
            self.memory[key] = old
            return old
        sizes, strides, offset = tuple(found[: old.dim()]), tuple(found[old.dim() : -1]), found[-1]
        base = self.memory.get(key)
        if base is None:
            if offset != 0 or old.is_conj():
                raise _Unusual
            base = self.memory[key] = torch.empty_strided(sizes, strides, dtype=old.dtype, device="meta")
            new = self.symbols.shown(base, old.device)
        elif base.dtype != old.dtype or old.is_conj() != base.is_conj():
            raise _Unusual
        elif type(base) is Tensor:
            new = self.symbols.shown(base.as_strided(sizes, strides, offset), old.device)
        else:
            with self.symbols.mode:
                new = base.detach().as_strided(sizes, strides, offset)
        return new.requires_grad_(old.requires_grad) if old.requires_grad else new
