"""Count the bytes that a unit communicates: nodes that may communicate run on meta tensors of their local shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.graph.sizes import depends_on_data
from shardwise.ops.env import Env
from shardwise.ops.exchanges import Exchange, exchanges, stand_in
from shardwise.ops.own_op import facts_of
from shardwise.shard.sizes import local_shape
from shardwise.units.split import with_backward


class Traffic(NamedTuple):
    """This is one ``kind`` of collective over ``axes`` of the mesh.  ``nbytes`` is the size of the whole: of what an
    all_reduce sums, an all_gather puts together, or a reduce_scatter takes apart, with the padding of uneven shards.
    The kind of a message is "send" or "receive"."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int

    def ring(self, parts: int) -> float:
        """Return the bytes that each of ``parts`` ranks sends in a ring; a message's sender sends all of it."""
        if self.kind in ("send", "receive"):
            return self.nbytes if self.kind == "send" else 0
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * self.nbytes * (parts - 1) / parts


@dataclass(frozen=True)
class UnitTraffic:
    """This is what a unit communicates on one rank for one microbatch.

    ``again`` is the part of ``forward`` that its recomputation repeats; ``unknown`` names ops on sizes that depend on
    data, which are left out.
    """

    forward: tuple[Traffic, ...] = ()
    backward: tuple[Traffic, ...] = ()
    again: tuple[Traffic, ...] = ()
    unknown: tuple[str, ...] = ()


class Cause(NamedTuple):
    """This names the op, and its module, that communicates, or that is the first to need a redistributed operand."""

    op: str
    path: str


def traffic(graph: fx.Graph, env: Env, output_grads: Sequence[bool] = ()) -> UnitTraffic:
    """Return the traffic of a unit's graph, or of another piece of a local graph; ``output_grads`` says which outputs
    have gradients."""
    found = [one for _, one in by_cause(graph, env, output_grads)]
    forward, backward, again = (
        tuple(t for one in found for t in getattr(one, way)) for way in ("forward", "backward", "again")
    )
    return UnitTraffic(forward, backward, again, tuple(sorted({op for one in found for op in one.unknown})))


def by_cause(graph: fx.Graph, env: Env, output_grads: Sequence[bool] = ()) -> Iterator[tuple[Cause, UnitTraffic]]:
    """Yield the traffic of each node, with its cause; a node may turn out to communicate nothing."""
    reached = with_backward(graph, output_grads)
    for node in (n for n in graph.nodes if facts_of(n.target).communicates):
        name = str(node.target.__name__)
        cause = Cause(node.meta.get("cause", name), node.meta.get("path", ""))
        if _depends_on_data(node):
            yield cause, UnitTraffic(unknown=(name,))
            continue
        both: tuple[list[Traffic], list[Traffic]] = ([], [])
        for one in exchanged(node, env):
            if one.nbytes and (not one.backward or node in reached):
                both[one.backward].append(Traffic(one.kind, env.real(one.axes), one.nbytes))
        forward, backward = map(tuple, both)
        yield cause, UnitTraffic(forward, backward, () if node.meta.get("unread") else forward)


def communicating_axes(graph: fx.Graph, env: Env) -> tuple[tuple[str, ...], ...]:
    """Return the axes of the mesh over which the nodes of a graph, and their gradients, may communicate, at any size.

    ``env.rows`` is the number of rows of a graph whose batch dim is static, otherwise 0.
    """
    env = replace(env, rows=env.rows or 2 * env.parts)  # two rows per rank, because norms want more than one
    nodes = (n for n in graph.nodes if facts_of(n.target).communicates)
    return tuple(dict.fromkeys(env.real(one.axes) for node in nodes for one in exchanged(node, env)))


def exchanged(node: fx.Node, env: Env) -> tuple[Exchange, ...]:
    """Return what one of our own functions and its gradient communicate on the rank and for the rows of ``env``.

    A size that depends on data is taken to be 1."""

    def value(one: fx.Node) -> Any:
        if one.op == "placeholder" and one.name == "env":
            return env
        if "layout" in one.meta:
            shape = local_shape(one.meta["val"], one.meta["layout"], env, 1)
            return stand_in(shape, one.meta["val"].dtype, bool(one.meta["grad"]))
        if any("layout" in n.meta for n in one.all_input_nodes):
            return 1
        target: Any = one.target
        return target(*fx.map_arg(one.args, value), **fx.map_arg(one.kwargs, value))

    _, *args = fx.map_arg(node.args, value)
    target: Any = node.target
    return exchanges(env, target, args, fx.map_arg(node.kwargs, value))


def _depends_on_data(node: fx.Node) -> bool:
    """Return whether the size of an operand depends on data."""
    values = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return any(depends_on_data(s) for v in values for s in v.shape)
