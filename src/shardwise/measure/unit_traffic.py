"""The bytes that a unit hands to the communicator: from the moves in its graph and the layouts of what they move.  Nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.graph.sizes import of_data
from shardwise.ops import collectives, cross_entropy, norms, softmax
from shardwise.ops.collectives import Env, ShardedFactor
from shardwise.shard.redistribute import COLLECTIVES
from shardwise.shard.sizes import local_shape
from shardwise.units.split import gradient_paths

COUNT = 8
"""Bytes of a number of targets."""


class Traffic(NamedTuple):
    """One ``kind`` of collective over ``axes`` of the mesh; ``nbytes`` are those of a whole: what an all_reduce sums, what an all_gather
    puts together, what a reduce_scatter takes apart, with the padding of uneven pieces.  A message is a "send" or a "receive"."""

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


_KINDS: Mapping[tuple[Callable[..., Any], str], tuple[str, str]] = {
    (getattr(collectives, name), dual): both for (name, dual), both in COLLECTIVES.items()
}


class Cause(NamedTuple):
    """Op ``op`` of the module at ``path``: that which communicates, or the first that needs what a move makes."""

    op: str
    path: str


def traffic(graph: fx.Graph, env: Env, output_grads: Sequence[bool] = ()) -> UnitTraffic:
    """Of a unit's graph, or of another piece of a local graph, of whose outputs so many have gradients."""
    found = [one for _, one in by_cause(graph, env, output_grads)]
    forward, backward, again = (tuple(t for one in found for t in getattr(one, way)) for way in ("forward", "backward", "again"))
    return UnitTraffic(forward, backward, again, tuple(sorted({op for one in found for op in one.unknown})))


def by_cause(graph: fx.Graph, env: Env, output_grads: Sequence[bool] = ()) -> Iterator[tuple[Cause, UnitTraffic]]:
    """The same, node by node; a node may turn out to communicate nothing."""
    reached = _with_backward(graph, output_grads)
    for node in graph.nodes:
        make = _OWN.get(node.target, _moved if (node.target, _dual(node)) in _KINDS else None)
        if node.op != "call_function" or make is None:
            continue
        name = str(getattr(node.target, "__name__", node.target))
        cause = Cause(node.meta.get("cause", name), node.meta.get("path", ""))
        if _depends_on_data(node):
            yield cause, UnitTraffic(unknown=(name,))
            continue
        both: tuple[list[Traffic], list[Traffic]] = ([], [])
        for backward, kind, axes, size in make(node, env):
            if kind and env.group(axes)[0] > 1 and (not backward or node in reached) and (nbytes := size()):
                both[backward].append(Traffic(kind, env.real(axes), nbytes))
        forward, backward = map(tuple, both)
        yield cause, UnitTraffic(forward, backward, () if node.meta.get("unread") else forward)


def _with_backward(graph: fx.Graph, output_grads: Sequence[bool]) -> set[fx.Node]:
    """The nodes that a gradient passes on its way from the outputs."""
    if not output_grads:  # a graph without a backward; its output may be one tensor
        return set()
    outputs: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    return gradient_paths(node for node, grad in zip(outputs, output_grads, strict=False) if grad)


def communicating_axes(graph: fx.Graph, env: Env) -> tuple[tuple[str, ...], ...]:
    """The axes of the mesh over which the nodes of a graph, and their gradients, may communicate, whatever their sizes."""
    found: dict[tuple[str, ...], None] = {}
    for node in graph.nodes:
        make = _OWN.get(node.target, _moved if (node.target, _dual(node)) in _KINDS else None)
        if node.op == "call_function" and make is not None:
            each = (axes for _, kind, axes, _ in make(node, env) if kind and env.group(axes)[0] > 1)
            found |= dict.fromkeys(env.real(axes) for axes in each)
    return tuple(found)


_Found = Iterator[tuple[bool, str, Sequence[str], Callable[[], int]]]
"""(whether it is the gradient's, kind, axes, what gives its bytes)"""


def _moved(node: fx.Node, env: Env) -> _Found:
    """Of a move and of its gradient's: they are of the same whole."""
    where = node.args[2]
    there, back = _KINDS[node.target, _dual(node)]
    if node.target in (collectives.all_reduce, collectives.replicate):
        axes, size = where, lambda: _numel(node, env) * _itemsize(node)
    else:
        axes, size = ShardedFactor(*where).axes, lambda: _in_pieces(node, where, env)
    yield False, there, axes, size
    yield True, back, axes, size


def _in_pieces(node: fx.Node, where: Sequence[Any], env: Env) -> int:
    """The bytes of a whole whose pieces are padded to the largest."""
    whole = node if node.target is collectives.gather else node.args[1]
    spans, _ = ShardedFactor(*fx.map_arg(tuple(where), lambda n: _number(n, env))).pieces(env)
    most, extent = max(b - a for a, b in spans), spans[-1][1]
    return _numel(whole, env) // max(extent, 1) * most * len(spans) * _itemsize(node)


def _batch_norm(node: fx.Node, env: Env) -> _Found:
    """Means and variances of all ranks, and two sums in backward."""
    x, mean, axes = node.args[1], node.args[4], node.args[8]
    dtype = torch.promote_types(x.meta["val"].dtype, torch.float32) if mean is None else mean.meta["val"].dtype

    def channels() -> int:
        return int(local_shape(x.meta["val"], x.meta["layout"], env)[1])

    yield False, "all_gather", axes, lambda: env.group(axes)[0] * norms.statistics(channels()) * dtype.itemsize
    yield True, "all_reduce", axes, lambda: 2 * channels() * dtype.itemsize


def _cross_entropy(node: fx.Node, env: Env) -> _Found:
    """The count of targets of a mean, if the step does not know it, and some numbers a row where ranks have scores of some of the classes each."""
    (logits, target, weight), how = node.args[1:4], node.kwargs
    probabilities = target.meta["val"].is_floating_point()
    if how["reduction"] == cross_entropy.MEAN and not how["counted"]:
        yield False, "all_reduce", how["spread"], lambda: COUNT if weight is None or probabilities else _itemsize(weight)
    if how["share"] is not None and not how["log_probabilities"]:
        _, axes = how["share"]
        yield False, "all_gather", axes, lambda: env.group(axes)[0] * cross_entropy.numbers(probabilities) * _rows(logits, 1, env)


def _rows(node: fx.Node, dim: int, env: Env) -> int:
    """The bytes of one wide number for each row along ``dim`` of a value."""
    value = node.meta["val"]
    shape = local_shape(value, node.meta["layout"], env)
    return math.prod(n for d, n in enumerate(shape) if d != dim) * torch.promote_types(value.dtype, torch.float32).itemsize


def _softmax(node: fx.Node, env: Env) -> _Found:
    """Two numbers a row, and in backward a sum of one."""
    x, dim, axes, dtype = node.args[1:5]

    def each() -> int:
        return _rows(x if dtype is None else node, dim, env)

    yield False, "all_gather", axes, lambda: env.group(axes)[0] * softmax.NUMBERS * each()
    yield True, "all_reduce", axes, each


def _logsumexp(node: fx.Node, env: Env) -> _Found:
    """Two numbers a row."""
    x, dim, axes = node.args[1:4]
    yield False, "all_gather", axes, lambda: env.group(axes)[0] * softmax.NUMBERS * _rows(x, dim, env)


def _norm_of_width(node: fx.Node, env: Env) -> _Found:
    """A sum of squares of each row, before it a sum where a mean is taken off, and in backward one or two more at once."""
    x, axes, centred = node.args[1], node.args[6], node.args[7]

    def each() -> int:
        last = len(x.meta["val"].shape) - 1
        return _rows(x, last, env)

    for _ in range(1 + centred):
        yield False, "all_reduce", axes, each
    yield True, "all_reduce", axes, lambda: (2 if centred else 1) * each()


def _valid_targets(node: fx.Node, env: Env) -> _Found:
    """Their count, where ranks with the same rows have some each."""
    yield False, "all_reduce", node.args[3] if len(node.args) > 3 else (), lambda: COUNT


_OWN: Mapping[Any, Callable[[fx.Node, Env], _Found]] = {
    norms.sync_batch_norm: _batch_norm,
    norms.norm_of_width: _norm_of_width,
    cross_entropy.cross_entropy: _cross_entropy,
    softmax.softmax: _softmax,
    softmax.logsumexp: _logsumexp,
    cross_entropy.valid_targets: _valid_targets,
    cross_entropy.valid_targets_once: _valid_targets,
}
"""The ops that communicate by themselves."""


def _dual(node: fx.Node) -> str:
    return str(node.args[3]) if node.target in (collectives.all_reduce, collectives.gather) and len(node.args) > 3 else "I"


def _number(node: fx.Node, env: Env) -> Any:
    """A size, from the Env."""
    if node.op == "placeholder":
        return env
    target: Any = node.target
    return target(*fx.map_arg(node.args, lambda n: _number(n, env)), **fx.map_arg(node.kwargs, lambda n: _number(n, env)))


def _numel(node: fx.Node, env: Env) -> int:
    return math.prod(local_shape(node.meta["val"], node.meta["layout"], env))


def _itemsize(node: fx.Node) -> int:
    return int(node.meta["val"].dtype.itemsize)


def _depends_on_data(node: fx.Node) -> bool:
    """Whether the size of an operand does."""
    values = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    return any(of_data(s) for v in values for s in v.shape)
