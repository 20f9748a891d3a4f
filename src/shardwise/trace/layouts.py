"""Layouts of the values of a captured graph on one rank: from the states of groups of axes to the factors of dims, and to local sizes.

Sizes are expressions in the number of rows where the batch dim is symbolic; a local size is a number, or a node of the local graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from shardwise.core.layout import Factor, Layout
from shardwise.core.mesh import Mesh
from shardwise.trace import ops
from shardwise.trace.assign import Tensors
from shardwise.trace.capture import Captured, Uncapturable
from shardwise.trace.forms import Place, State
from shardwise.trace.ops import ROWS
from shardwise.trace.sizes import Sizes, concrete, expression, factored, of_rows


class Layouts:
    """Of the values of ``captured`` over the rows and the axes of ``tensor``; local sizes that are not known become nodes of ``graph``."""

    captured: Captured
    tensor: Tensors
    sizes: Sizes
    graph: fx.Graph
    env: fx.Node
    value: dict[fx.Node, Any]

    # ---- whole tensors -------------------------------------------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(concrete(s) for s in node.meta["val"].shape)

    def shapes(self, node: fx.Node) -> list[tuple[int, ...]]:
        value = node.meta["val"]
        return [tuple(concrete(s) for s in v.shape) for v in (value if isinstance(value, tuple | list) else [value])]

    def expressions(self, node: fx.Node) -> list[Any]:
        """The sizes of a tensor, comparable for every number of rows."""
        return [expression(s) for s in node.meta["val"].shape]

    def learned(self, node: fx.Node) -> bool:
        """Whether a captured node's value follows from parameters alone."""
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        return node.op == "placeholder" and node.name in self.captured.parameters

    @property
    def rows(self) -> Any:
        """The number of rows as an expression: a symbol, or a number where the batch dim is static."""
        return self.captured.rows if self.sizes.symbol is None else self.sizes.symbol

    def size(self, node: fx.Node, place: Place) -> Any:
        """The size, as an expression, of the factor at ``place`` of a captured node's value."""
        found = self.expressions(node)[place.dim]
        return found // (place.pre * place.post) if isinstance(found, int) else found / (place.pre * place.post)

    def shared_out(self, node: fx.Node, place: Place) -> bool:
        """Whether what is cut at ``place`` are no rows of the batch, and every rank has some of it."""
        size = self.size(node, place)
        if size == self.rows or not isinstance(size, int):
            return False
        return size >= math.prod(self.tensor.axes.values()) or self.stands_for_pieces(size)

    def stands_for_pieces(self, size: Any) -> bool:
        """Whether a factor of this size stands for equal pieces, within which other axes have theirs: it has as many elements as ranks."""
        return all(n in (1, size) for n in self.tensor.axes.values())

    def layout_of(self, shape: Sequence[int], states: Mapping[str, State]) -> Layout:
        """The layout of a tensor of whole ``shape`` in these states: groups that shard the same factor do so one within the other."""
        dims: list[list[Factor]] = [[Factor(s)] for s in shape]
        for d, size in enumerate(shape):
            found = [(g, s) for g, s in states.items() if isinstance(s, Place) and s.dim == d]
            if found:
                dims[d] = factored(size, [(g, self.behind_rows(states, s)) for g, s in found], self.tensor.axes)
        return Layout(tuple(tuple(dim) for dim in dims), frozenset(g for g, s in states.items() if s == "P"))

    def behind_rows(self, states: Mapping[str, State], place: Place) -> Place:
        """A place with its ``pre`` as a number; what is behind rows goes only together with shards of these."""
        if isinstance(place.pre, int):
            return place
        rows = states.get(ROWS)
        if not isinstance(rows, Place) or rows.dim != place.dim or rows.pre != 1:
            raise Uncapturable("a dim is sharded behind rows of the batch that are whole")
        return place._replace(pre=int(place.pre.subs(self.sizes.symbol, self.sizes.example)))

    def fits(self, shape: Sequence[int], states: Mapping[str, State]) -> bool:
        """Whether a tensor can be in these states together."""
        try:
            self.layout_of(shape, states)
        except Uncapturable:
            return False
        return True

    # ---- local sizes ---------------------------------------------------------------------------------------------

    def factor_size(self, whole: Any, factor: Factor, factors: Sequence[Factor]) -> Any:
        """The size of one of the ``factors`` of a dim of ``whole`` size: in one that depends on the number of rows one of them is that."""
        symbolic = ROWS in factor.axes or (factor is of_rows(factors) and not isinstance(expression(whole), int))
        return self.sizes.rows if symbolic else factor.size

    def extent(self, whole: Any, factor: Factor, factors: Sequence[Factor]) -> Any:
        """The local size of one of the ``factors`` of a dim of ``whole`` size, as a number or as a node."""
        if factor.axes == (ROWS,):
            return self.sizes.local_rows
        size = self.factor_size(whole, factor, factors)
        parts = math.prod(self.tensor.axes[a] for a in factor.axes if a != ROWS)
        if isinstance(size, int) and all(part % parts == 0 for part in factor.parts or (size,)):
            return size // parts
        return self.graph.call_function(ops.local_size, (self.env, factor.parts or size, factor.axes))

    def local_dim(self, layout: Layout, size: Any, dim: int) -> Any:
        """The local size of dim ``dim``, of whole ``size``, as a number or as a node."""
        factors = layout.dims[dim]
        if not any(f.axes for f in factors):
            return self.sizes.node(size)
        return self.sizes.fold(operator.mul, [self.extent(size, f, factors) for f in factors])

    def local_sizes(self, node: fx.Node, layout: Layout, given: Sequence[Any] | None = None) -> list[Any]:
        """The sizes of a node's result in ``layout``; ``given`` are the op's own size arguments."""
        out = []
        for d, size in enumerate(node.meta["val"].shape):
            sharded = any(f.axes for f in layout.dims[d])
            if sharded or given is None or (isinstance(given[d], int) and given[d] == -1):
                out.append(self.local_dim(layout, size, d))
            else:
                out.append(self.arguments(given[d]) if isinstance(given[d], fx.Node) else given[d])
        return out

    def same_cut(self, value: fx.Node, states: Mapping[str, State], dim: int) -> bool:
        """Whether ranks have of a dim of a value what they would in other states."""
        if not isinstance(expression(value.meta["val"].shape[dim]), int):
            return False
        mesh, here = Mesh.spanned(self.tensor.axes), value.meta["layout"]
        if not self.fits(here.shape, states):
            return False
        there = self.layout_of(here.shape, states)
        if any(ROWS in f.axes for f in (*here.dims[dim], *there.dims[dim])):
            return False
        return all(here.intervals(mesh, rank)[dim] == there.intervals(mesh, rank)[dim] for rank in range(mesh.size))

    def cut(self, value: fx.Node, states: Mapping[str, State], groups: Sequence[str]) -> tuple[Any, ...]:
        """What moves say of a sharded factor: (axes, outer axes, dim, pre, size, post, parts), with the local sizes of what is around it."""
        place = states[groups[0]]
        assert isinstance(place, Place)
        layout = self.layout_of(value.meta["layout"].shape, states)
        factors = layout.dims[place.dim]
        at = next(i for i, f in enumerate(factors) if groups[0] in f.axes)
        whole = value.meta["val"].shape[place.dim]
        pre, post = (
            self.sizes.fold(operator.mul, [1, *(self.extent(whole, f, factors) for f in side)])
            for side in (factors[:at], factors[at + 1 :])
        )
        outer = tuple(a for a in factors[at].axes if a not in groups)
        return tuple(groups), outer, place.dim, pre, self.factor_size(whole, factors[at], factors), post, factors[at].parts

    def minors(self, value: fx.Node, states: Mapping[str, State], groups: Sequence[str]) -> list[str]:
        """Other groups that shard the same factor as ``groups`` within their shards."""
        place = states[groups[0]]
        assert isinstance(place, Place)
        layout = self.layout_of(value.meta["layout"].shape, states)
        axes = next(f.axes for f in layout.dims[place.dim] if groups[0] in f.axes)
        return [a for a in axes[axes.index(groups[0]) :] if a not in groups]
