"""A local graph is the graph that one rank computes: it is built of nodes with their layouts and of local sizes, each a
number or a node."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardwise.core.layout import Factor, Layout
from shardwise.graph.naming import module_path
from shardwise.graph.sizes import expression
from shardwise.ops import collectives
from shardwise.ops.env import ROWS
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import Placement, Shard
from shardwise.shard.sizes import LocalSizes, of_rows


class LocalGraph:
    """This is the local graph of what ``context`` describes.  Its placeholders are ``env`` and those of the captured
    graph.

    The metadata of a node are ``layout`` and ``states`` (by group of axes) of its value, ``grad`` (whether it has a
    gradient), ``val`` of the whole batch's graph, and ``path`` of its module.  ``value`` maps captured nodes to local
    ones; ``current`` is the captured node being emitted.
    """

    def __init__(self, context: ShardingContext) -> None:
        self.context, self.graph = context, fx.Graph()
        self.env = self.graph.placeholder("env")
        self.places = [n for n in context.normal.graph.nodes if n.op == "placeholder"]
        self.copies = [self.graph.placeholder(n.name) for n in self.places]
        self.sizes = LocalSizes(self.graph, self.env, context.symbol)
        self.value: dict[fx.Node, Any] = {}
        self.current: fx.Node | None = None

    def arguments(self, argument: Any) -> Any:
        """Return arguments of a captured op with local nodes in place of captured ones."""
        return fx.map_arg(argument, lambda n: self.value[n])

    # ---- what is known of a node ---------------------------------------------------------------------------------

    def annotate(self, new: fx.Node, layout: Any, states: Any, grad: bool, old: fx.Node | None = None) -> fx.Node:
        new.meta["layout"], new.meta["states"], new.meta["grad"] = layout, states, grad
        if old is not None:
            new.meta["val"] = old.meta.get("val")
            new.meta["path"] = module_path(old)
            new.meta["origin"] = old
        return new

    def annotate_move(self, new: fx.Node, source: fx.Node, states: Mapping[str, Placement]) -> fx.Node:
        layout = self.context.layout_of(source.meta["layout"].shape, states)
        self.annotate(new, layout, states, source.meta["grad"])
        new.meta["val"], new.meta["path"] = source.meta.get("val"), module_path(self.current)
        new.meta["cause"] = str(getattr(self.current, "target", ""))
        return new

    # ---- local sizes ---------------------------------------------------------------------------------------------

    def factor_size(self, whole: Any, factor: Factor, factors: Sequence[Factor]) -> Any:
        """Return the size of one of the ``factors`` of a dim of ``whole`` size; if that depends on the number of rows,
        one factor is that number."""
        symbolic = ROWS in factor.axes or (factor is of_rows(factors) and not isinstance(expression(whole), int))
        return self.sizes.rows if symbolic else factor.size

    def extent(self, whole: Any, factor: Factor, factors: Sequence[Factor]) -> Any:
        """Return the local size of one of the ``factors`` of a dim of ``whole`` size, as a number or as a node."""
        if factor.axes == (ROWS,):
            symbols = getattr(expression(whole), "free_symbols", ())
            return next((self.sizes.own[s] for s in symbols if s in self.sizes.own), self.sizes.local_rows)
        size = self.factor_size(whole, factor, factors)
        parts = math.prod(self.context.tensor.axes[a] for a in factor.axes if a != ROWS)
        if isinstance(size, int) and all(part % parts == 0 for part in factor.parts or (size,)):
            return size // parts
        return self.graph.call_function(collectives.local_size, (self.env, factor.parts or size, factor.axes))

    def local_dim(self, layout: Layout, size: Any, dim: int) -> Any:
        """Return the local size of dim ``dim``, of whole ``size``, as a number or as a node."""
        factors = layout.dims[dim]
        if not any(f.axes for f in factors):
            return self.sizes.node(size)
        return self.sizes.fold(operator.mul, [self.extent(size, f, factors) for f in factors])

    def local_sizes(self, node: fx.Node, layout: Layout, given: Sequence[Any] | None = None) -> list[Any]:
        """Return the local sizes of a node's result in ``layout``; ``given`` are the op's own size arguments."""
        out = []
        for d, size in enumerate(node.meta["val"].shape):
            sharded = any(f.axes for f in layout.dims[d])
            if sharded or given is None or (isinstance(given[d], int) and given[d] == -1):
                out.append(self.local_dim(layout, size, d))
            else:
                out.append(self.arguments(given[d]) if isinstance(given[d], fx.Node) else given[d])
        return out

    def cut(self, value: fx.Node, states: Mapping[str, Placement], groups: Sequence[str]) -> tuple[Any, ...]:
        """Return what a move needs to know of a sharded factor: (axes, outer axes, dim, pre, size, post, parts); pre
        and post are local sizes."""
        place = states[groups[0]]
        assert isinstance(place, Shard)
        layout = self.context.layout_of(value.meta["layout"].shape, states)
        factors = layout.dims[place.dim]
        at = next(i for i, f in enumerate(factors) if groups[0] in f.axes)
        whole = value.meta["val"].shape[place.dim]
        pre, post = (
            self.sizes.fold(operator.mul, [1, *(self.extent(whole, f, factors) for f in side)])
            for side in (factors[:at], factors[at + 1 :])
        )
        outer = tuple(a for a in factors[at].axes if a not in groups)
        return (
            tuple(groups),
            outer,
            place.dim,
            pre,
            self.factor_size(whole, factors[at], factors),
            post,
            factors[at].parts,
        )
