"""Where rows meet whose values depend on parameters, microbatches can exchange as ranks do (``rows = "batch"``).

Units end where rows meet. All microbatches run up to there; a unit of its own, which runs once a batch, puts together
what they have, exchanges it over ranks, and hands the same to all of them. Its backward is that of what it does: the
gradients of all microbatches are added up, and each gets its part. This is what GradCache (Gao et al., arXiv
2101.06983) does for the one loss at the end, at any place and without running forward twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwise.core.errors import ConfigError
from shardwise.ops import collectives, norms
from shardwise.ops.collectives import ShardedFactor
from shardwise.units.batch_sums import bounded, described


class Merge(NamedTuple):
    """How the values of all microbatches become one: their sum, or (``dim`` ≥ 0) their pieces one after the other, in a
    dim that is ``pre`` × pieces × rest."""

    dim: int = -1
    pre: int = 1

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        """Return one value, through which gradients lead to all ``values``."""
        first, *rest = values
        if not rest:
            return first
        if self.dim >= 0:
            shape = first.shape
            each = [v.reshape(*shape[: self.dim], self.pre, -1, *shape[self.dim + 1 :]) for v in values]
            return torch.cat(each, self.dim + 1).flatten(self.dim, self.dim + 1)
        total = first + rest[0]
        for value in rest[1:]:
            total = total + value
        return total


def merge_of(node: fx.Node) -> Merge:
    """Return how an exchange takes the values of several microbatches."""
    if node.target is norms.combined_statistics:
        return Merge(0)
    if node.target is collectives.gather:
        cut = ShardedFactor(*node.args[2])
        return Merge(cut.dim, cut.pre)
    return Merge()


def inseparable(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes at which microbatches cannot exchange: inside an op, or values of unknown sizes."""
    return [n for n in nodes if not _separable(n)]


def check_exchanges(nodes: Iterable[fx.Node], buffers: Mapping[fx.Node, str], legal: str) -> None:
    """Raise :class:`ConfigError`, which says what is ``legal``, where microbatches cannot exchange; ``buffers`` says
    which buffers what is exchanged is for."""
    wrong = inseparable(nodes)
    if wrong:
        where = ", ".join(described(wrong, buffers)[:3])
        what = f'"batch" is not possible: rows meet inside an op, or in a number that depends on data, in {where}'
        raise ConfigError.on("rows", what, legal)


def _separable(node: fx.Node) -> bool:
    operand: Any = node.args[1]
    if operand.op != "call_function":
        return False
    if node.target is collectives.gather:
        return bounded(node) and isinstance(ShardedFactor(*node.args[2]).pre, int)
    return node.target is norms.combined_statistics or (node.target is collectives.all_reduce and bounded(node))


def phases(graph: fx.Graph, exchanges: Iterable[fx.Node]) -> Mapping[fx.Node, int]:
    """Return for each node how many exchanges, one after the other, its value depends on; an exchange counts itself."""
    own, found = set(exchanges), dict[fx.Node, int]()
    for node in graph.nodes:
        found[node] = max((found[n] for n in node.all_input_nodes), default=0) + (node in own)
    return found
