"""This module expresses symbolic sizes of the captured graph in the number of rows, and makes the nodes that compute
them."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.core.layout import Factor, Layout
from shardwise.graph.captured import Uncapturable
from shardwise.graph.sizes import expression, size_for_rows
from shardwise.ops import collectives
from shardwise.ops.env import ROWS, Env
from shardwise.shard.op_spec import Shard


class Unfit(Uncapturable):
    """Groups shard a dim in ways that do not go together."""


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul, "Pow": operator.pow, "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Max": max, "Min": min,
}  # fmt: skip


def local_shape(value: torch.Tensor, layout: Layout, env: Env, most: int | None = None) -> tuple[int, ...]:
    """Return the shape on one rank of a value of the captured graph; ``most`` is as in :func:`size_for_rows`."""

    def local(size: Any, factors: Sequence[Factor]) -> int:
        if not any(f.axes for f in factors):
            return size_for_rows(size, env.rows, most)
        rows = not isinstance(expression(size), int)
        whole = (env.rows if rows and f is of_rows(factors) else f.parts or f.size for f in factors)
        return math.prod(collectives.local_size(env, n, f.axes) for n, f in zip(whole, factors, strict=True))

    return tuple(local(size, factors) for size, factors in zip(value.shape, layout.dims, strict=True))


def of_rows(factors: Sequence[Factor]) -> Factor | None:
    """Return which factor of a dim with a symbolic size, some of which are sharded, is the number of rows."""
    return next((f for f in factors if ROWS in f.axes), next((f for f in factors if f.axes), None))


class LocalSizes:
    """This makes nodes that compute the sizes of one local graph from ``env``, each when it is first needed.

    ``symbol`` is the number of rows; None where the batch dim is static.
    """

    def __init__(self, graph: fx.Graph, env: fx.Node, symbol: Any) -> None:
        self.graph, self.env, self.symbol = graph, env, symbol
        self.rows = graph.call_function(collectives.rows, (env,))
        self.local_rows = graph.call_function(collectives.local_rows, (env,))
        self.data: dict[Any, fx.Node] = {}  # nodes of sizes that depend on data, by symbol
        self.own: dict[Any, fx.Node] = {}  # of those of this rank's elements, where each rank has some

    def node(self, size: Any) -> Any:
        """Return a size of the whole batch, or an expression of one, as a number or as a node."""
        expr = expression(size)
        if isinstance(expr, int):
            return expr
        if expr == self.symbol:
            return self.rows
        if expr in self.data:
            return self.data[expr]
        function = _ARITHMETIC.get(type(expr).__name__)
        if function is None:
            raise Uncapturable(f"a size of {expr} cannot be told from the number of rows")
        return self.fold(function, [self.node(a) for a in expr.args])

    def fold(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Return ``function`` folded over numbers and nodes, from the left."""

        def apply(a: Any, b: Any) -> Any:
            if isinstance(a, int) and isinstance(b, int):
                return function(a, b)
            if function is operator.mul and 1 in (a, b):
                return b if a == 1 else a
            return self.graph.call_function(function, (a, b))

        return functools.reduce(apply, values)

    def product(self, sizes: Sequence[Any]) -> Any:
        """Return the product of sizes of the whole batch, as a number or as a node."""
        numbers, nodes = 1, []
        for size in map(self.node, sizes):
            if isinstance(size, int):
                numbers *= size
            else:
                nodes.append(size)
        return self.fold(operator.mul, [numbers, *nodes])


def factored(size: int, places: Sequence[tuple[str, Shard]], parts: Mapping[str, int]) -> list[Factor]:
    """Return the factors of a dim in which each of ``places``, (group, place), shards one; :class:`Unfit` if they
    clash.

    Groups that shard the same factor do so one within the other, in the order of ``parts``, the number of ranks of each
    except ``ROWS``, which comes first.  A factor with as many elements as ranks stands for equal pieces: within each
    the next group has its own.
    """
    found: list[Factor] = []
    done = 1  # the product of the factors so far
    for pre in sorted({place.pre for _, place in places}):
        own = {g: place.post for g, place in places if place.pre == pre}
        concatenated = {place.parts for _, place in places if place.pre == pre}
        axes = tuple(g for g in (ROWS, *parts) if g in own)
        extent, rest = divmod(size, pre * own[axes[0]])
        if rest:
            raise Unfit(f"a dim of {size} is no {pre} times so many times {own[axes[0]]}")
        if len(concatenated) > 1:
            raise Uncapturable(
                f"a dim of {size} is sharded over {', '.join(axes)} as a concatenation of different parts"
            )
        if len(axes) > 1 and any(parts.get(axes[0]) in concatenation for concatenation in concatenated):
            raise Unfit(
                f"a dim of {size} is sharded over {', '.join(axes)} as a concatenation of parts, of which one by "
                "itself stands for equal pieces"
            )
        if len(set(own.values())) > 1 or (len(axes) > 1 and ROWS not in axes and extent == parts[axes[0]]):
            extent = math.prod(parts[g] for g in axes if g != ROWS)
            if ROWS in axes or any(size // (pre * own[g]) != parts[g] for g in axes) or size % (pre * extent):
                raise Unfit(f"a dim of {size} is sharded over {', '.join(axes)} in ways that do not fit together")
        if pre % done:
            raise Unfit(f"a dim of {size} is sharded over {', '.join(axes)} across another sharding")
        found += [Factor(pre // done)] if pre > done else []
        found.append(Factor(extent, axes, concatenated.pop()))
        done = pre * extent
    return [*found, Factor(size // done)] if done < size or not size else found


def regrouped(source: Sequence[Any], place: Shard, goal: Sequence[Any], size: Any) -> Shard | None:
    """Return where the factor at ``place`` of row-major ``source`` sizes, which has ``size`` elements, is after a view
    as ``goal`` sizes; None if it does not stay in one dim.  Sizes are :func:`expression`.
    """
    outer: Any = place.pre
    for extent in source[: place.dim]:
        outer = outer * extent
    done: Any = 1
    for d, extent in enumerate(goal):
        before = _multiple(outer, done)
        after = _quotient(extent, before * size) if before is not None else None
        if before is not None and after:
            return Shard(d, before, after, place.parts)
        done = done * extent
    return None


def ratio(a: Any, b: Any) -> int | None:
    """Return a / b, of expressions, if it is an integer for every number of rows, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    found = a / b
    return int(found) if found.is_Integer else None


def _multiple(a: Any, b: Any) -> Any:
    """Return a / b, of expressions, if for every number of rows it is a positive integer or a multiple of the number of
    rows, else None."""
    found = _quotient(a, b)
    if found is None and not (isinstance(a, int) and isinstance(b, int)) and (whole := a / b).is_polynomial():
        return (
            whole
            if whole.is_Symbol or (whole.is_Mul and whole.args[0].is_Integer and whole.args[1].is_Symbol)
            else None
        )
    return found


def _quotient(a: Any, b: Any) -> int | None:
    found = ratio(a, b)
    return found if found is not None and found > 0 else None
