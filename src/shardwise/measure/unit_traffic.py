"""The bytes that a unit hands to the communicator: from the moves in its graph and the layouts of what they move.
Nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.graph.sizes import of_data
from shardwise.ops import collectives
from shardwise.ops.collectives import Env, ShardedFactor
from shardwise.shard.op_spec import Exchange
from shardwise.shard.redistribute import communicated
from shardwise.shard.sizes import local_shape
from shardwise.units.split import gradient_paths


class Traffic(NamedTuple):
    """One ``kind`` of collective over ``axes`` of the mesh; ``nbytes`` are those of a whole: what an all_reduce sums,
    what an all_gather puts together, what a reduce_scatter takes apart, with the padding of uneven pieces.  A message
    is a "send" or a "receive"."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int

    def ring(self, parts: int) -> float:
        """The bytes that each of ``parts`` ranks sends in a ring; of a message, its sender all."""
        if self.kind in ("send", "receive"):
            return self.nbytes if self.kind == "send" else 0
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * self.nbytes * (parts - 1) / parts


@dataclass(frozen=True)
class UnitTraffic:
    """What a unit communicates on one rank for one microbatch; ``again``: of forward what its recomputation repeats.

    ``unknown`` are ops on sizes that depend on data, which are left out.
    """

    forward: tuple[Traffic, ...] = ()
    backward: tuple[Traffic, ...] = ()
    again: tuple[Traffic, ...] = ()
    unknown: tuple[str, ...] = ()


class Cause(NamedTuple):
    """Op ``op`` of the module at ``path``: that which communicates, or the first that needs what a move makes."""

    op: str
    path: str


def traffic(graph: fx.Graph, env: Env, output_grads: Sequence[bool] = ()) -> UnitTraffic:
    """The traffic of a unit's graph, or of another piece of a local graph; ``output_grads`` says which outputs have
    gradients."""
    found = [one for _, one in by_cause(graph, env, output_grads)]
    forward, backward, again = (
        tuple(t for one in found for t in getattr(one, way)) for way in ("forward", "backward", "again")
    )
    return UnitTraffic(forward, backward, again, tuple(sorted({op for one in found for op in one.unknown})))


def by_cause(graph: fx.Graph, env: Env, output_grads: Sequence[bool] = ()) -> Iterator[tuple[Cause, UnitTraffic]]:
    """The same, node by node; a node may turn out to communicate nothing."""
    reached = _with_backward(graph, output_grads)
    for node in graph.nodes:
        if not (any(communicated(node)) or "exchanges" in node.meta):
            continue
        name = str(getattr(node.target, "__name__", node.target))
        cause = Cause(node.meta.get("cause", name), node.meta.get("path", ""))
        if _depends_on_data(node):
            yield cause, UnitTraffic(unknown=(name,))
            continue
        both: tuple[list[Traffic], list[Traffic]] = ([], [])
        for one in _moved(node, env) if any(communicated(node)) else node.meta["exchanges"].on(env):
            if env.group(one.axes)[0] > 1 and one.nbytes and (not one.backward or node in reached):
                both[one.backward].append(Traffic(one.kind, env.real(one.axes), one.nbytes))
        forward, backward = map(tuple, both)
        yield cause, UnitTraffic(forward, backward, () if node.meta.get("unread") else forward)


def _with_backward(graph: fx.Graph, output_grads: Sequence[bool]) -> set[fx.Node]:
    """The nodes that a gradient passes on its way from the outputs."""
    if not output_grads:  # a graph without a backward; its output may be one tensor
        return set()
    outputs: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    return gradient_paths(node for node, grad in zip(outputs, output_grads, strict=False) if grad)


def communicating_axes(graph: fx.Graph, env: Env) -> tuple[tuple[str, ...], ...]:
    """The axes of the mesh over which the nodes of a graph, and their gradients, may communicate, at any size."""
    each = (
        [_axes(node)] if any(communicated(node)) else node.meta["exchanges"].axes()
        for node in graph.nodes
        if any(communicated(node)) or "exchanges" in node.meta
    )  # fmt: skip
    return tuple(dict.fromkeys(env.real(axes) for some in each for axes in some if env.group(axes)[0] > 1))


def _axes(node: fx.Node) -> tuple[str, ...]:
    """Those of a move."""
    where: Any = node.args[2]
    return tuple(where if node.target in _WHOLE else ShardedFactor(*where).axes)


_WHOLE = (collectives.all_reduce, collectives.replicate)
"""The moves of whole values; others are of pieces."""


def _moved(node: fx.Node, env: Env) -> Iterator[Exchange]:
    """What a move and its gradient's communicate: they are of the same whole."""
    nbytes = _numel(node, env) * _itemsize(node) if node.target in _WHOLE else _in_pieces(node, node.args[2], env)
    for backward, kind in enumerate(communicated(node)):
        if kind:
            yield Exchange(kind, _axes(node), nbytes, bool(backward))


def _in_pieces(node: fx.Node, where: Sequence[Any], env: Env) -> int:
    """The bytes of a whole whose pieces are padded to the largest."""
    whole = node if node.target is collectives.gather else node.args[1]
    spans, _ = ShardedFactor(*fx.map_arg(tuple(where), lambda n: _number(n, env))).pieces(env)
    most, extent = max(b - a for a, b in spans), spans[-1][1]
    return _numel(whole, env) // max(extent, 1) * most * len(spans) * _itemsize(node)


def _number(node: fx.Node, env: Env) -> Any:
    """A size, from the Env."""
    if node.op == "placeholder":
        return env
    target: Any = node.target
    return target(
        *fx.map_arg(node.args, lambda n: _number(n, env)), **fx.map_arg(node.kwargs, lambda n: _number(n, env))
    )


def _numel(node: fx.Node, env: Env) -> int:
    return math.prod(local_shape(node.meta["val"], node.meta["layout"], env))


def _itemsize(node: fx.Node) -> int:
    return int(node.meta["val"].dtype.itemsize)


def _depends_on_data(node: fx.Node) -> bool:
    """Whether the size of an operand does."""
    values = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return any(of_data(s) for v in values for s in v.shape)
