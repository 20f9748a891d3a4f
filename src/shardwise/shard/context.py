"""A sharding context holds what is known of a captured graph that is to be sharded: its ops as the rules describe them,
its sizes, and the layouts that values have in given states.

Walks and solvers choose from this, and the emitter makes the local graph by it.  Sizes are expressions in the number of
rows where the batch dim is symbolic.  Nothing changes after a context is made, except ``notes``,
``decided`` and ``undivided``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.core.fields import has_rows
from shardwise.core.layout import Factor, Layout
from shardwise.core.mesh import Mesh
from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.captured import Uncapturable
from shardwise.graph.experts import Experts
from shardwise.graph.functional import Normal
from shardwise.graph.schema import differentiable, is_tensor, selects_result, values_of
from shardwise.graph.sizes import concrete, expression
from shardwise.ops.env import ROWS
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.shard.op_spec import DimLabels, OpSharding, Placement, Shard, Strategy
from shardwise.shard.sizes import factored

PRODUCTS = Fact.MATRIX_PRODUCT | Fact.GROUPED_PRODUCT | Fact.CONVOLUTION

Rule = Callable[["ShardingContext", fx.Node], OpSharding | None]
"""A rule describes a captured op; it returns None where it does not cover the op as it is used."""


class ShardingContext:
    """This describes the captured graph ``normal``, sharded over the axes of the batch and over those of ``tensor``.

    ``rules`` finds the rule of an op.  ``summands`` are what ``units/batch_sums.py`` finds.
    ``over_batch`` says that where rows meet those of all microbatches do.  ``notes`` are what a
    user should know of the choices made, and ``decided`` tells, by name and axis, which pin or op made each parameter's
    layout.  ``undivided`` are the ops whose backward needs the gradient of the whole batch at once.  ``sampled`` says
    of random ops, by ordinal, place in the model and number of dims, which dim, if any, has the samples: so captures
    for other numbers of rows tell each other.
    """

    def __init__(
        self, normal: Normal, rules: Callable[[fx.Node], Rule | None], tensor: TensorParallelSpec, *,
        summands: Collection[fx.Node] = (), dropout: str = "exact", device: torch.device | None = None,
        over_batch: bool = False, sampled: dict[tuple[int, str, int], int | None] | None = None,
    ) -> None:  # fmt: skip
        self.normal, self.captured, self.rules, self.tensor = normal, normal.captured, rules, tensor
        self.summands, self.dropout, self.device = summands, dropout, device or torch.device("cpu")
        self.over_batch = over_batch
        self.sampled = {} if sampled is None else sampled
        self.carrying = with_gradient(normal)
        self.symbol: Any = None  # the number of rows; None where the batch dim is static
        self.example = 0  # the number of rows in the shapes of the captured graph
        for node in normal.graph.find_nodes(op="placeholder"):
            field = self.captured.fields.get(node.name)
            size = node.meta["val"].shape[0] if field is not None and has_rows(field) else None
            if isinstance(size, torch.SymInt):
                self.symbol, self.example = size.node.expr, concrete(size)
        self.notes: dict[str, None] = {}
        self.decided: dict[str, dict[str, str]] = {}
        self.undivided: dict[str, None] = {}
        self._sizes: dict[fx.Node, tuple[tuple[int, ...], list[Any]]] = {}  # rules and walks ask again and again

    def over(self, axes: Mapping[str, int]) -> ShardingContext:
        """Return a context of the same graph with other axes of tensor parallelism."""
        return ShardingContext(
            self.normal, self.rules, replace(self.tensor, axes=axes), summands=self.summands, dropout=self.dropout,
            device=self.device, over_batch=self.over_batch, sampled=self.sampled,
        )  # fmt: skip

    @cached_property
    def forms(self) -> Mapping[fx.Node, OpSharding | None]:
        """Return how each op treats shards; None where no rule covers it."""
        return self._forms(self.normal.graph)

    @cached_property
    def inner_forms(self) -> Mapping[fx.Node, OpSharding | None]:
        """Return the same for the ops inside of layers of experts."""
        bodies = [n.target.body for n in self.normal.graph.nodes if isinstance(n.target, Experts)]
        return {node: form for body in bodies for node, form in self._forms(body).items()}

    def _forms(self, graph: fx.Graph) -> dict[fx.Node, OpSharding | None]:
        ops = [n for n in graph.nodes if n.op == "call_function" and is_tensor(n) and not selects_result(n)]
        return {node: rule(self, node) if (rule := self.rules(node)) is not None else None for node in ops}

    @cached_property
    def parameters(self) -> Mapping[fx.Node, str]:
        """Return the name of the parameter that each placeholder of one stands for."""
        places = self.normal.graph.find_nodes(op="placeholder")
        return {n: self.captured.parameters[n.name] for n in places if n.name in self.captured.parameters}

    def labelled(
        self, node: fx.Node, operands: Sequence[tuple[fx.Node, DimLabels]], labels: DimLabels | Sequence[DimLabels],
        linear: str | Sequence[int] = (), several: bool = False, **more: Any,
    ) -> OpSharding:  # fmt: skip
        """Return the form of an op; ``labels`` are those of its result, or of each of ``several`` results."""
        how: frozenset[int] | str = linear if isinstance(linear, str) else frozenset(linear)
        return OpSharding(node, list(operands), list(labels) if several else [labels], how, **more)

    # ---- whole tensors -------------------------------------------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a node's whole tensor; symbolic sizes are those of the example."""
        return self._read(node)[0]

    def shapes(self, node: fx.Node) -> list[tuple[int, ...]]:
        return [tuple(concrete(s) for s in v.shape) for v in values_of(node)]

    def expressions(self, node: fx.Node) -> list[Any]:
        """Return the sizes of a tensor as expressions, which are comparable for every number of rows."""
        return self._read(node)[1]

    def _read(self, node: fx.Node) -> tuple[tuple[int, ...], list[Any]]:
        """Return the shape of a node's whole tensor as numbers and as expressions."""
        found = self._sizes.get(node)
        if found is None:
            sizes = node.meta["val"].shape
            found = self._sizes[node] = tuple(map(concrete, sizes)), list(map(expression, sizes))
        return found

    def learned(self, node: fx.Node) -> bool:
        """Return whether a captured node is a parameter or is made of parameters alone, without a product of them."""
        return node in self._learned

    @cached_property
    def _learned(self) -> set[fx.Node]:
        found = set(self.parameters)
        for node in self.normal.graph.nodes:
            inputs = node.all_input_nodes if node.op == "call_function" else ()
            if inputs and found.issuperset(inputs) and not has(node, PRODUCTS):
                found.add(node)
        return found

    @property
    def rows(self) -> Any:
        """Return the number of rows as an expression: a symbol, or a number where the batch dim is static."""
        return self.captured.rows if self.symbol is None else self.symbol

    def size(self, node: fx.Node, place: Shard) -> Any:
        """Return the size, as an expression, of the factor at ``place`` of a captured node's value."""
        found = self.expressions(node)[place.dim]
        return found // (place.pre * place.post) if isinstance(found, int) else found / (place.pre * place.post)

    def shared_out(self, node: fx.Node, place: Shard) -> bool:
        """Return whether the cut at ``place`` is not along rows of the batch and leaves every rank some elements."""
        size = self.size(node, place)
        if size == self.rows or not isinstance(size, int):
            return False
        return size >= math.prod(self.tensor.axes.values()) or self.stands_for_pieces(size)

    def stands_for_pieces(self, size: Any) -> bool:
        """Return whether a factor of this size stands for equal pieces: it has as many elements as every axis has
        ranks, and other axes shard within each piece."""
        return all(n in (1, size) for n in self.tensor.axes.values())

    def layout_of(self, shape: Sequence[int], states: Mapping[str, Placement]) -> Layout:
        """Return the layout of a tensor of whole ``shape`` in these states; groups that shard the same factor nest.
        :class:`Uncapturable` is raised where the states do not fit together."""
        dims: list[list[Factor]] = [[Factor(s)] for s in shape]
        for d, size in enumerate(shape):
            found = [(g, s) for g, s in states.items() if isinstance(s, Shard) and s.dim == d]
            if found:
                dims[d] = factored(size, [(g, self.behind_rows(states, s)) for g, s in found], self.tensor.axes)
        return Layout(tuple(tuple(dim) for dim in dims))

    def behind_rows(self, states: Mapping[str, Placement], place: Shard) -> Shard:
        """Return ``place`` with its ``pre`` as a number; :class:`Uncapturable` where rows before it are whole."""
        if isinstance(place.pre, int):
            return place
        rows = states.get(ROWS)
        if not isinstance(rows, Shard) or rows.dim != place.dim or rows.pre != 1:
            raise Uncapturable("a dim is sharded behind rows of the batch that are whole")
        return place._replace(pre=int(place.pre.subs(self.symbol, self.example)))

    def agree(self, form: OpSharding, operands: Sequence[Mapping[str, Placement]]) -> bool:
        """Return whether the pieces of an op's ``operands``, whose states are by group of axes and fit, go together on
        every rank."""
        if form.agree is None:
            return True
        shapes = [self.shape(operand) for operand, _ in form.operands]
        return form.agree(list(map(self.layout_of, shapes, operands)), self.tensor.axes)

    def together(
        self,
        form: OpSharding,
        strategies: Mapping[str, Strategy],
        fits: Callable[[Sequence[int], Mapping[str, Placement]], bool] | None = None,
    ) -> bool:
        """Return whether an op's strategies, by group of axes, go together; ``fits`` may be a faster :meth:`fits`."""
        operands, results = form.states(strategies)
        shapes = (*(self.shape(o) for o, _ in form.operands), *self.shapes(form.node))
        return all(map(fits or self.fits, shapes, (*operands, *results))) and self.agree(form, operands)

    def fits(self, shape: Sequence[int], states: Mapping[str, Placement]) -> bool:
        """Return whether a tensor can be in these states together."""
        try:
            self.layout_of(shape, states)
        except Uncapturable:
            return False
        return True

    def same_cut(
        self, shape: Sequence[int], states: Mapping[str, Placement], after: Mapping[str, Placement], dim: int
    ) -> bool:
        """Return whether each rank has the same elements of a dim in both states; its size must not depend on rows."""
        if not self.fits(shape, after):
            return False
        mesh, here, there = Mesh.spanned(self.tensor.axes), self.layout_of(shape, states), self.layout_of(shape, after)
        if any(ROWS in f.axes for f in (*here.dims[dim], *there.dims[dim])):
            return False
        return all(here.intervals(mesh, rank)[dim] == there.intervals(mesh, rank)[dim] for rank in range(mesh.size))

    # ---- sizes in rows -------------------------------------------------------------------------------------------

    def multiple(self, size: Any) -> int | None:
        """Return m where ``size`` is m times the symbolic number of rows, else None."""
        if not isinstance(size, torch.SymInt) or self.symbol is None:
            return None
        ratio = size.node.expr / self.symbol
        return int(ratio) if ratio.is_Integer else None

    def is_rows(self, size: Any) -> bool:
        """Return whether ``size`` is the symbolic number of rows."""
        return self.multiple(size) == 1


def with_gradient(normal: Normal) -> dict[fx.Node, bool]:
    """Return for each node whether its value depends on trainable parameters in a differentiable way."""
    found: dict[fx.Node, bool] = {}
    for node in normal.graph.nodes:
        if node.op == "placeholder":
            name = normal.captured.parameters.get(node.name)
            found[node] = name is not None and bool(normal.captured.trainable.get(name, True))
        elif node.op == "call_function":
            value: Any = node.meta.get("val")
            reached = any(found.get(n, False) for n in node.all_input_nodes)
            good = isinstance(value, Tensor | tuple | list) and differentiable(value)
            found[node] = reached and good and node.target is not torch.ops.aten.detach.default
    return found
