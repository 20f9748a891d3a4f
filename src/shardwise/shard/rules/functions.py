"""The rule for Functions with a backward of their own: trials show along which dims their elements are independent."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwise.graph.naming import module_path
from shardwise.graph.schema import values_of
from shardwise.graph.sizes import expression
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding
from shardwise.shard.rules.function_trial import Trial
from shardwise.shard.rules.table import tensors


def custom_function(context: ShardingContext, node: fx.Node) -> OpSharding | None:
    """Return the form of a Function whose rows, those of dim 0, are independent in forward and in backward; None where
    a trial on random numbers shows anything else, or nothing: it is then computed whole.

    Other dims are independent too where all operands and results have one shape and a trial shows it (an activation).
    Each microbatch calls the backward of a whole Function with its part of the gradient, also where values of all
    microbatches meet. The context is told of it, unless a trial shows that the sum over parts is as good.
    """
    operands, results = tensors(node), values_of(node)
    sizes = [context.expressions(o) for o in operands]
    rows = next((own[0] for own in sizes if own and _follows(context, own[0])), None)
    cut = [rows is not None and bool(own) and own[0] == rows for own in sizes]
    each = 1 if rows is None or rows == context.rows else int(rows / context.rows)
    if getattr(node.target.function, "independent_rows", False):
        pairs = [(o, [0 if c and d == 0 else None for d in range(len(own))])
                 for o, own, c in zip(operands, sizes, cut, strict=True)]  # fmt: skip
        return context.labelled(node, pairs, [[0, *[None] * (v.dim() - 1)] for v in results], several=True)
    given = [(o.meta["val"].dtype, context.shape(o)) for o in operands]
    trial = Trial(node.target, given, cut, each, _computing(context.device))
    trial.check()
    of_rows = rows is not None and all(v.dim() and expression(v.shape[0]) == rows for v in results)
    if not of_rows or not trial.passes(0):
        in_parts = rows is None or context.over_batch
        if in_parts and any(context.carrying[o] for o in operands) and not trial.adds():
            context.undivided[f"{node.target} in {module_path(node) or 'the model'}"] = None
        return None
    alike = all(own == sizes[0] for own in sizes) and all([expression(s) for s in v.shape] == sizes[0] for v in results)
    dims = [0, *(d for d in range(1, len(sizes[0])) if alike and trial.passes(d))]
    pairs = [(o, [d if c and d in dims else None for d in range(len(own))])
             for o, own, c in zip(operands, sizes, cut, strict=True)]  # fmt: skip
    labels = [[d if d in dims else None for d in range(v.dim())] for v in results]
    return context.labelled(node, pairs, labels, several=True)


def whole_call(context: ShardingContext, node: fx.Node) -> OpSharding | None:
    """Return the form of a call that reads no more than a truth value which it is given, if its rows are independent
    whether that is true or not, as trials show; None elsewhere, for then it is computed whole.  A note says which."""
    found = _of_rows(context, node) if node.target.by_test else None
    rows = "on every rank and for the rows of all" if found is None else "on each rank's rows, which are independent"
    context.notes[
        f"{node.target.title}: it reads values of tensors, and runs as it is written, {rows}; the rest of forward is "
        "captured"
    ] = None
    return found


def _of_rows(context: ShardingContext, node: fx.Node) -> OpSharding | None:
    operands, results = tensors(node), values_of(node)
    sizes = [context.expressions(o) for o in operands]
    rows = next((own[0] for own in sizes if own and _follows(context, own[0])), None)
    if rows is None or isinstance(context.rows, int):
        return None
    cut = [bool(own) and own[0] == rows for own in sizes]
    given = [(o.meta["val"].dtype, context.shape(o)) for o in operands]
    each, device = int(rows / context.rows), _computing(context.device)
    if not all(v.dim() and expression(v.shape[0]) == rows for v in results):
        return None
    trials = [Trial(node.target, given, cut, each, device, test) for test in (True, False)]
    if not all(trial.finite() and trial.passes(0) for trial in trials):
        return None
    pairs = [(o, [0 if c and d == 0 else None for d in range(len(own))])
             for o, own, c in zip(operands, sizes, cut, strict=True)]  # fmt: skip
    return context.labelled(node, pairs, [[0, *[None] * (v.dim() - 1)] for v in results], several=True)


def _follows(context: ShardingContext, size: Any) -> bool:
    """Whether a size is a multiple of the number of rows."""
    if isinstance(context.rows, int):
        return bool(size == context.rows)
    return not isinstance(size, int) and bool((size / context.rows).is_Integer)


def _computing(device: torch.device) -> torch.device:
    """Return ``device``, or the CPU where this torch has no kernels for it: its programs are then only looked at."""
    try:
        return torch.zeros(1).to(device).add(1).device
    except NotImplementedError:
        return torch.device("cpu")


__all__ = ["custom_function", "whole_call"]
