"""Cut blocks at what they exchange inside, into segments: what tensor, context and expert parallelism exchange is then
an instruction of the program like all else, so that one microbatch can compute while another one's values travel.

A block without inner exchange is one segment. Else its nodes, in their order, are segments of computing and of *moves*
in turns: moves that follow each other over the same axes, and do not read each other's results, are posted together.
Each segment is a unit. Moves of parameters stay where they are, as do those over the axes of the batch, for a trace
serves plans without them too, and what functions of our own exchange by the way (a loss over sharded classes, ring
attention, which overlaps its messages itself).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from torch import fx

from shardwise.graph.schema import outputs_of
from shardwise.ops import collectives
from shardwise.ops.env import ROWS, Groups
from shardwise.ops.own_op import argument_at, facts_of

Key = tuple[int, int]
"""A block's number, and the number of a segment in it."""


class Moves(NamedTuple):
    """What a unit moves: one of its ``inputs`` for each of its outputs, over ``axes`` of tensor parallelism.

    ``there`` and ``back`` say whether the values, and whether their gradients, are communicated.
    """

    inputs: tuple[str, ...]
    axes: Groups
    there: bool
    back: bool


class _Way(NamedTuple):
    axes: Groups
    there: bool
    back: bool


def way_of(node: fx.Node) -> _Way | None:
    """Return how a node of a local graph moves a live tensor between ranks; None if it does anything else."""
    facts = facts_of(node.target)
    operand: Any = node.args[1] if facts.moves else None
    if not isinstance(operand, fx.Node) or operand.op == "placeholder":
        return None
    there, back = collectives.kinds(node.target, _argument(node, "dual", "I")) if facts.ways else ("always", "always")
    axes = tuple(_argument(node, "axes", None) or _argument(node, "cut", ((),))[0])
    way = _Way(axes, bool(there), bool(back and node.meta.get("grad")))
    return None if ROWS in axes or not (way.there or way.back) else way


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    at = argument_at(node.target, name)
    return default if at is None or at >= len(node.args) else node.args[at]


def cut(
    graph: fx.Graph, blocks: Mapping[fx.Node, int], whole: Container[int], sources: Callable[[fx.Node], list[fx.Node]]
) -> tuple[dict[fx.Node, Key], dict[Key, Moves]]:
    """Return the segment of each node, given the number of its block, and what the segments of moves move; the
    ``whole`` blocks are not cut.

    ``sources`` gives the nodes that a node reads, through sizes.
    """
    ends = set(outputs_of(graph))  # these are computed: a loss, or the new value of a buffer
    found: dict[fx.Node, Key] = {}
    moves: dict[Key, Moves] = {}
    last: dict[int, tuple[int, _Way | None]] = {}  # of each block, its last segment, and what that moves
    for node in graph.nodes:
        if node not in blocks:
            continue
        block = blocks[node]
        if node.target is operator.getitem and node.args[0] in found:
            found[node] = found[node.args[0]]
            continue
        way = way_of(node) if node.op == "call_function" and block not in whole and node not in ends else None
        number, previous = last.get(block, (0, way))
        reads = way is not None and any(found.get(n) == (block, number) for n in sources(node))
        number += way != previous or reads
        last[block] = number, way
        found[node] = key = block, number
        if way is not None:
            before = moves[key].inputs if key in moves else ()
            moves[key] = Moves((*before, str(node.args[1])), *way)
    _to_readers(graph, found, blocks)
    return found, moves


def _to_readers(graph: fx.Graph, found: dict[fx.Node, Key], blocks: Mapping[fx.Node, int]) -> None:
    """Put what is computed of parameters alone, such as a transposed weight, into the first segment that reads it: it
    must not become a live tensor, which cannot be a view of a parameter that is whole only while it is used."""
    own: set[fx.Node] = set()
    for node in graph.nodes:
        if node in blocks and node.op == "call_function" and node.all_input_nodes:
            operands = [n for n in node.all_input_nodes if n.name != "env"]
            if operands and all(n in own or (n.op == "placeholder" and n.meta.get("grad")) for n in operands):
                own.add(node)
    for node in reversed(graph.nodes):
        if node in own:
            readers = [found[n] for n in node.users if n in found]
            if readers and {block for block, _ in readers} == {blocks[node]}:
                found[node] = min(readers)
