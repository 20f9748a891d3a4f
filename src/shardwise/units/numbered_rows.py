"""Find where a model looks up rows of the batch by numbers that a field gives: they count the rows of the whole batch.

Where microbatches are batches of their own, such a number can be that of a row that another microbatch has.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.captured import Captured
from shardwise.graph.functional import Normal
from shardwise.graph.naming import place
from shardwise.graph.schema import given, has_argument, op_name
from shardwise.graph.sizes import depends_on_data, expression
from shardwise.units.own_numbers import MOVES, OwnNumbers, elements, own_numbers


def numbered_rows(normal: Normal) -> tuple[tuple[str, ...], OwnNumbers | None]:
    """Return the ops, with their modules and lines, that look up rows of the batch by numbers from its fields; and what
    tells of a batch that each row looks up its own elements, if that may be."""
    captured = normal.captured
    numbers, of_batch = set[fx.Node](), set[fx.Node]()  # what such numbers are made into, and all made of fields
    found: dict[str, None] = {}
    lookups: dict[fx.Node, tuple[int, str]] | None = {}
    for node in normal.graph.nodes:
        if node.name in captured.fields:
            of_batch.add(node)
            numbers |= {node} if _is_integer(node) else set()
        elif node.op == "call_function":
            of_batch |= {node} if of_batch.intersection(node.all_input_nodes) else set()
            made = not has(node, Fact.NUMBERS) and not has(node, Fact.LIKE)  # those of others, not new ones
            if _is_integer(node) and numbers.intersection(node.all_input_nodes) and made:
                numbers.add(node)
            for x, d, i in _looked_up(node):
                if i in numbers and x in of_batch and _rows(captured, x, d):
                    found[f"{op_name(node)}{place(node)}"] = None
                    each = elements(captured, normal.graph, x, d)
                    if each is None:
                        lookups = None
                    elif lookups is not None:
                        lookups[i] = each, f"{op_name(node)}{place(node)}"
    return tuple(found), own_numbers(captured, normal.graph, lookups) if lookups else None


def found_again(found: tuple[str, ...], normal: Normal, others: Iterable[Normal]) -> tuple[str, ...]:
    """Return the ops that look up rows also where the same kinds of ops are captured for other numbers of rows: else a
    size was that of the rows by chance."""
    rows = normal.captured.rows
    for other in others:
        if rows is not None and other.captured.rows != rows and _ops(other) == _ops(normal):
            again = numbered_rows(other)[0]
            found = tuple(one for one in found if one in again)
    return found


def _ops(normal: Normal) -> set[str]:
    """Return the ops of a graph; how many there are of each may follow from the number of rows."""
    return {str(node.target) for node in normal.graph.nodes if node.op == "call_function"}


def _is_integer(node: fx.Node) -> bool:
    values = node.meta.get("val")
    return any(
        isinstance(one, torch.Tensor)
        and one.dtype is not torch.bool
        and not (one.is_floating_point() or one.is_complex())
        for one in (values if isinstance(values, list | tuple) else [values])  # those of unbind
    )


def _rows(captured: Captured, x: fx.Node, dim: int) -> bool:
    """Whether a dim of a tensor has the rows of the batch."""
    size = x.meta["val"].shape[dim]
    if captured.rows is not None:  # what a row has of the first dim lies together
        rows = bool(size == captured.rows or (dim == 0 and size % captured.rows == 0))
        return rows and not _of_one_row(captured, x)
    return not isinstance(expression(size), int) and not depends_on_data(size)


def _of_one_row(captured: Captured, x: fx.Node) -> bool:
    """Whether a tensor is what a field has for one row, as far as that is seen: boxes of one picture of a batch."""
    while x.op == "call_function" and (x.target is operator.getitem or op_name(x) in MOVES):
        source = x.args[0]
        if not isinstance(source, fx.Node):
            return False
        if source.name in captured.fields and op_name(x) in ("unbind", "select") and given(x, "dim", 0) == 0:
            return True
        x = source
    return False


def _looked_up(node: fx.Node) -> Iterator[tuple[fx.Node, int, Any]]:
    """Give each tensor, its dim and the index by which an op reads elements of that dim, or writes to them."""
    name = next((n for n in ("index", "indices") if has_argument(node, n)), None)
    x, index = node.args[0] if node.args else None, given(node, name) if name is not None else None
    if isinstance(x, fx.Node) and index is not None and x.meta["val"].dim():
        each = enumerate(index) if isinstance(index, list | tuple) else [(given(node, "dim", 0), index)]
        yield from ((x, dim, one) for dim, one in each)
