"""This module turns the graph of the whole batch into the local graph of one rank.

Rules (package ``rules``) describe how each op treats shards, :func:`choose` takes a strategy for each op on each group
of mesh axes, and the emitter makes the local graph by them.

The axes of the batch are one group, ``ROWS``.  Fields start sharded on dim 0.  Parameters, and what is made of them
alone, start as R, because what accumulates in the gradient buffers is reduced at the end of the step.  Every axis of
tensor parallelism is a group of its own, on which parameters are what ``tensor`` makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from shardwise.core.errors import ConfigError
from shardwise.core.layout import Layout
from shardwise.core.pins import PLANS
from shardwise.graph.functional import Normal
from shardwise.ops.env import ROWS
from shardwise.shard.assignment import Assignment, Decisions, TensorParallelSpec
from shardwise.shard.batch_walk import BatchWalk, postpone
from shardwise.shard.context import Rule, ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Placement
from shardwise.shard.recipe.axis_walks import WALKS, recipe
from shardwise.shard.recipe.pins import read_pins
from shardwise.shard.recipe.propagation import PinnedWalk
from shardwise.shard.sizes import Unfit
from shardwise.shard.solver.cost_model import MicrobatchCost
from shardwise.shard.solver.decisions import decisions_of
from shardwise.shard.solver.op_cost import Repeats, repeats
from shardwise.shard.solver.solve import predicted, solve


@dataclass
class Sharded:
    """This is a local graph.  Its placeholders are ``env`` and those of the normal graph; its output is ``(loss as
    partial sum, *updates, *outputs)``.

    ``replicated`` are the ops without a rule that every rank computes whole, by (op, module path), and
    ``repeats(rows)`` gives the number and work of those that cost something.  ``layouts`` are those of parameters that
    tensor parallelism shards, by name, and ``summed`` are the axes over which their gradients are partial sums;
    ``decided`` says, by name and axis, which pin or op made them so, and ``notes`` what was not done as asked or may
    not be the best.  ``tensor`` are the axes, or sub-axes, with their sizes.  ``predicted()`` returns the seconds of a
    microbatch, by which a solver chooses, and ``decisions`` are what one has chosen.  ``over_batch`` says that
    microbatches are to exchange, like ranks, where rows meet, and ``undivided`` are the ops whose backward needs the
    gradient of the whole batch at once.  ``kept`` says
    how what is kept for the user's loop lies on the axes of the batch, by name.
    """

    graph: fx.Graph
    normal: Normal
    replicated: dict[tuple[str, str], list[fx.Node]]
    layouts: dict[str, Layout]
    summed: dict[str, tuple[str, ...]]
    decided: dict[str, dict[str, str]]
    notes: dict[str, None]
    tensor: Mapping[str, int]
    predicted: Callable[[], MicrobatchCost]
    repeats: Repeats
    decisions: Decisions | None
    over_batch: bool = False
    undivided: tuple[str, ...] = ()
    kept: Mapping[str, Placement] = field(default_factory=dict)


def shard(
    normal: Normal, rules: Callable[[fx.Node], Rule | None], *, summands: Collection[fx.Node] = (),
    dropout: str = "exact", device: torch.device | None = None, tensor: TensorParallelSpec | None = None,
    over_batch: bool = False, sampled: dict[tuple[int, str, int], int | None] | None = None,
) -> Sharded:  # fmt: skip
    """Shard ``normal`` over the batch axes, and over those of ``tensor`` as it says.

    ``summands``, ``dropout``, ``device``, ``over_batch`` and ``sampled`` are as in :class:`ShardingContext`.
    """
    context = ShardingContext(
        normal, rules, tensor or TensorParallelSpec(), summands=summands, dropout=dropout, device=device,
        over_batch=over_batch, sampled=sampled,
    )  # fmt: skip
    try:
        context, assignments, decisions = choose(context)
        emitter = Emitter(context, assignments)
        emitter.run()
    except Unfit as error:
        if not context.tensor.pins:
            raise
        texts = ", ".join(f'"{pattern}" = "{text}"' for pattern, text in context.tensor.pins)
        raise ConfigError.on("pins", f"{texts}: {error}", "other dims or axes in one of them.") from error
    return Sharded(
        emitter.graph, normal, emitter.replicated, emitter.layouts, emitter.summed, context.decided, context.notes,
        context.tensor.axes, functools.cache(lambda: predicted(context, assignments)),
        lambda rows: repeats(context, emitter.replicated, rows), decisions, over_batch, tuple(context.undivided),
        emitter.kept,
    )  # fmt: skip


class Assignments(NamedTuple):
    """This is the assignment of each group of axes, the context, in which a recipe may have divided an axis into two,
    and what a solver decided."""

    context: ShardingContext
    assignments: Mapping[str, Assignment]
    decisions: Decisions | None = None


def choose(context: ShardingContext) -> Assignments:
    """Choose a strategy for each op on each group of axes."""
    batch, decisions = BatchWalk(context).run(), None
    tensor = context.tensor
    found: Mapping[str, Assignment]
    apart = [axis for axis in tensor.axes if axis in WALKS]
    if apart and tensor.plan != "recipe":
        inner = context.over({axis: n for axis, n in tensor.axes.items() if axis not in WALKS})
        of_parameters, decisions = choose(inner)[1:]
        found = {axis: one for axis, one in of_parameters.items() if axis != ROWS}
        for axis in apart:
            found[axis] = WALKS[axis](context, axis, batch, found).run()
        context.notes.update(inner.notes)
        context.decided.update(inner.decided)
    elif tensor.axes and tensor.plan == "auto":
        found = solve(context, batch).assignments
        decisions = decisions_of(context, found)
    elif tensor.axes and tensor.plan in PLANS:
        found = _pinned(context, batch)
    else:
        found, divided = recipe(context, batch)
        if divided is not None:
            context = context.over(divided)
            found, _ = recipe(context, batch)
    for axis in context.tensor.axes:
        postpone(context, axis, batch, found[axis])
    return Assignments(context, {ROWS: batch} | {axis: found[axis] for axis in context.tensor.axes}, decisions)


def _pinned(context: ShardingContext, batch: Assignment) -> dict[str, Assignment]:
    pins, found = read_pins(context), dict[str, Assignment]()
    for axis in context.tensor.axes:
        found[axis] = PinnedWalk(context, axis, batch, found, pins).run()
    return found


__all__ = ["Assignments", "Sharded", "choose", "shard"]
