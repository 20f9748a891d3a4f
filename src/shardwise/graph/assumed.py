"""The checks that a capture took for granted stay in its graph, where each step makes sure of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from shardwise.graph.captured import Uncapturable
from shardwise.ops.expected import expected

aten = torch.ops.aten
NOT = (aten.logical_not.default, aten.bitwise_not.default)
AND = (aten.logical_and.default, aten.bitwise_and.Tensor)
OR = (aten.logical_or.default, aten.bitwise_or.Tensor)


def keep_checks(graph: fx.Graph, checks: Iterable[tuple[fx.Node, bool, str]]) -> None:
    """Let a graph check, in place, that each of these truth values is as it says; the text says where it is asked.

    Raises :class:`Uncapturable` for one that is not made of values that are all true, or all false: other ranks could
    not check a part of them each."""
    for node, answer, place in checks:
        for mask, wanted in _masks(node, answer):
            with graph.inserting_after(mask):
                new = graph.call_function(expected, (mask, wanted, place))
            new.meta = {k: mask.meta[k] for k in ("val", "nn_module_stack", "stack_trace", "path") if k in mask.meta}


def _masks(node: fx.Node, answer: bool) -> list[tuple[fx.Node, bool]]:
    if node.target in NOT:
        return _masks(node.args[0], not answer)
    if node.target in (AND if answer else OR):
        return [*_masks(node.args[0], answer), *_masks(node.args[1], answer)]
    if node.target is (aten.all.default if answer else aten.any.default):
        return [(node.args[0], answer)]
    if node.target in (aten.all.default, aten.any.default) or node.meta["val"].dim():
        raise Uncapturable("it checks values in Python of which some are true and some are false")
    return [(node, answer)]


__all__ = ["keep_checks"]
