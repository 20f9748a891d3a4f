"""Changing the layout of a value in a local graph: which collective, and what it is for the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from shardwise.core.layout import Factor, Layout
from shardwise.trace import ops

Place = tuple[int, int, int]
"""(dim, pre, post): dim ``dim`` of a tensor is pre × rows × post, and the rows are sharded."""


def place_of(layout: Layout) -> Place | None:
    """Where the rows are sharded, if they are."""
    for dim, factors in enumerate(layout.dims):
        pre = 1
        for i, factor in enumerate(factors):
            if factor.axes:
                post = 1
                for later in factors[i + 1 :]:
                    post *= later.size
                return dim, pre, post
            pre *= factor.size
    return None


def layout_at(shape: Sequence[int], place: Place | None, axes: tuple[str, ...]) -> Layout:
    """The layout of a tensor of whole ``shape`` whose rows are sharded over ``axes`` at ``place``."""
    dims: list[tuple[Factor, ...]] = [(Factor(s),) for s in shape]
    if place is not None:
        dim, pre, post = place
        before, after = ([Factor(f)] if f != 1 else [] for f in (pre, post))
        dims[dim] = (*before, Factor(shape[dim] // (pre * post), axes), *after)
    return Layout(tuple(dims))


class Moves:
    """Conversions of one local graph; a value is converted once for each layout that it is needed in.

    ``leaves`` are parameters and what is made of parameters alone: R by birth, where other replicated values are I.  ``count`` is called
    with the kind of each collective that is put in, ``annotate`` with (new node, source, layout).
    """

    def __init__(
        self, graph: fx.Graph, env: fx.Node, axes: tuple[str, ...], leaves: set[fx.Node],
        count: Callable[[str], None], annotate: Callable[[fx.Node, fx.Node, Layout], None],
    ) -> None:  # fmt: skip
        self.graph, self.env, self.axes, self.leaves, self.count, self.annotate = graph, env, axes, leaves, count, annotate
        self.done: dict[tuple[fx.Node, Layout, str], fx.Node] = {}

    def convert(self, value: fx.Node, goal: Layout, need: str = "I") -> fx.Node:
        """``value`` in layout ``goal``; ``need`` says whether a replicated goal is I or R."""
        source: Layout = value.meta["layout"]
        start, end = place_of(source), place_of(goal)
        if start == end and source.partial == goal.partial and (start or source.partial):
            return value
        key = (value, goal, need)
        if key not in self.done:
            self.done[key] = self._convert(value, source, goal, start, end, need)
        return self.done[key]

    def _convert(
        self, value: fx.Node, source: Layout, goal: Layout, start: Place | None, end: Place | None, need: str
    ) -> fx.Node:
        plain, leaf = Layout.replicated(source.shape), value in self.leaves
        if start is not None:
            if end is not None or goal.partial:
                return self.convert(self.convert(value, plain), goal)
            return self._move(ops.gather, value, (*start, need), plain, "all_gather")
        if source.partial:
            if end is not None:
                return self._move(ops.scatter, value, end, goal, "reduce_scatter")
            return self._move(ops.all_reduce, value, (need,), plain, "all_reduce")
        if end is not None:
            return self._move(ops.shard_leaf if leaf else ops.shard, value, end, goal, "" if leaf else "slice")
        if goal.partial:
            return self._move(ops.partial, self.convert(value, plain), (), goal, "")
        if leaf == (need == "R") or not value.meta["grad"]:
            return value
        return self._move(ops.own if leaf else ops.replicate, value, (), plain, "" if leaf else "all_reduce in backward")

    def _move(self, function: Any, value: fx.Node, args: tuple[Any, ...], layout: Layout, kind: str) -> fx.Node:
        new = self.graph.call_function(function, (self.env, value, *args))
        self.annotate(new, value, layout)
        if kind:
            self.count(kind)
        return new


__all__ = ["Moves", "Place", "layout_at", "place_of"]
