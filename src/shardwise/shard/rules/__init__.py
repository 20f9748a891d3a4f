"""Rules say how each op of a captured graph treats a sharded batch: tables of small functions, one file per family.

Most ops take one line: labels for the dims of operands and result, as in an einsum.  A rule returns None where it does
not cover an op as it is used; that is then computed whole on every rank, and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx

from shardwise.graph.experts import Experts
from shardwise.ops import norms
from shardwise.ops.beside import beside
from shardwise.ops.custom_function import CustomFunction, WholeCall
from shardwise.ops.expected import expected
from shardwise.ops.experts import stacked
from shardwise.shard.context import Rule
from shardwise.shard.rules import (
    attention,
    draws,
    elementwise,
    experts,
    functions,
    lookups,
    losses,
    parts,
    products,
    reductions,
    shapes,
)
from shardwise.shard.rules.table import op_name, pointwise

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **elementwise.RULES, **shapes.RULES, **parts.RULES, **lookups.RULES, **products.RULES, **attention.RULES,
        **reductions.RULES, **losses.RULES, **draws.RULES, **experts.RULES,
        "batch_norm of rows": reductions.batch_norm,
    }
)  # fmt: skip
"""The rules by the name of the op, whatever its overload."""


def find(node: fx.Node) -> Rule | None:
    """Return the rule of an op, or None."""
    if node.target is norms.batch_norm:
        return RULES["batch_norm of rows"]
    if node.target is expected:
        return elementwise.expected
    if node.target is beside:
        return elementwise.beside
    if node.target is stacked:
        return experts.stacked
    if isinstance(node.target, Experts):
        return experts.layer
    if isinstance(node.target, WholeCall):
        return functions.whole_call
    if isinstance(node.target, CustomFunction):
        return functions.custom_function
    rule = RULES.get(op_name(node))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()) and "ordinal" not in node.meta:
        return pointwise
    return rule


__all__ = ["RULES", "find"]
