"""This finds where to cut a dim of a weight; what it is made of (heads, parts of a fused projection) follows from the
views and splits after it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.schema import given, op_name
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Shard

FAR = 200
"""The number of values through which a shard is followed at most."""


class SplitPoints:
    """This finds cuts into ``parts`` pieces."""

    def __init__(self, context: ShardingContext, parts: int) -> None:
        self.context, self.forms, self.parts = context, context.forms, parts

    def even(self, size: int, dim: int, pre: int = 1, post: int = 1) -> Shard:
        """Return a place; where pieces come out equal it says just that, whatever they are made of."""
        return Shard(dim, pre, size // (pre * self.parts) if size // (pre * post) % self.parts == 0 else post)

    def split(self, form: OpSharding, weight: int, dim: int, result: int) -> tuple[int, Shard] | None:
        """Return how many elements have to be gathered after the best cut of dim ``dim`` of a weight, dim ``result`` of
        the product, and where that cut is."""
        found = self.best(form.node, result, self.context.shape(form.operands[weight][0])[dim])
        return None if found is None else (found[0], found[1]._replace(dim=dim))

    def best(self, node: fx.Node, dim: int, size: int, grain: int = 1) -> tuple[int, Shard] | None:
        """Return how many elements have to be gathered, because what follows does not take the pieces, after the best
        cut of a dim of ``size`` elements of a value, between groups of ``grain`` of them, and where that cut is."""
        places: list[Shard] = []
        found = []
        for pre, inner in self.made_of(node, dim):
            post = math.lcm(inner, grain)
            if size % (pre * post) == 0 and size // (pre * post) >= self.parts:
                places.append(self.even(size, dim, pre, post))
        joined = self.joined(node, dim) if grain == 1 else None
        for order, place in enumerate([*places, joined] if joined is not None else places):
            uneven = any(n % self.parts for n in place.parts or [size // (place.pre * place.post)])
            found.append((self.gathered(node, place), uneven, order, place))
        if not found:
            return None
        lost, _, _, place = min(found, key=lambda one: one[:3])
        return lost, place

    def joined(self, node: fx.Node, dim: int) -> Shard | None:
        """Return the place of a concatenation of unequal parts, each of which is cut as what follows wants it; None
        where the dim is none, or its parts are too small."""
        for value, d, scale in self.as_a_whole(node, dim):
            pieces = self.parts_of(value, d)
            each = [self.of_part(one, size, d) for one, size in pieces]
            if not pieces or not all(each):
                continue
            unit = math.gcd(*(place.post for place in each if place))
            counts = [size // unit for _, size in pieces]
            if all(n % self.parts == 0 or place.post == unit for n, place in zip(counts, each, strict=True) if place):
                return Shard(dim, 1, unit * scale, tuple(counts))
        return None

    def as_a_whole(self, node: fx.Node, dim: int) -> Iterator[tuple[fx.Node, int, int]]:
        """Yield (value, dim, n) where all of a dim of ``node`` is one dim, or the major one of those that it is viewed
        as, with n elements of ``node``'s dim in each of its elements."""
        stack = [(node, dim, 1)]
        seen: set[tuple[fx.Node, int, int]] = set()
        while stack and len(seen) < FAR:
            value, d, scale = one = stack.pop()
            sizes = self.context.expressions(value)
            if one in seen or not isinstance(sizes[d], int):
                continue
            seen.add(one)
            yield one
            for user, position, form in self.uses(value):
                for i, result in enumerate(self.results(user)):
                    if result is None:
                        continue
                    for pre, post in ((1, 1), *_factors(sizes, d, self.context.expressions(result))):
                        after = form.shards(position, Shard(d, 1, post)) if pre == 1 else None
                        at = None if after is None else after.results[i]
                        if (
                            not isinstance(at, Shard)
                            or at.pre != 1
                            or self.context.shape(result)[at.dim] * post != sizes[d] * at.post
                        ):
                            continue
                        # Else it is repeated, and a part may end within one of this dim's elements.
                        if scale * post % at.post == 0:
                            stack.append((result, at.dim, scale * post // at.post))

    def parts_of(self, value: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
        """Return the (node, size) of the parts, not all equal, into which a value is split or sliced along ``dim``;
        none where it is not."""
        found: dict[int, tuple[fx.Node, int]] = {}
        for user in value.users:
            results = self.results(user) if user in self.forms else []
            if has(user, Fact.SPLIT) and given(user, "dim", 0) % len(self.context.shape(value)) == dim:
                whole = user.meta["val"]
                ends = itertools.accumulate(part.shape[dim] for part in whole)
                found |= {
                    end - part.shape[dim]: (r, part.shape[dim])
                    for end, part, r in zip(ends, whole, results, strict=True)
                    if r is not None and part.shape[dim]  # an empty part needs no cut
                }
            elif (
                op_name(user) == "slice"
                and given(user, "dim", 0) % len(self.context.shape(value)) == dim
                and given(user, "step", 1) == 1
            ):
                start = given(user, "start", 0)
                if isinstance(start, int):
                    found.setdefault(start, (user, self.context.shape(user)[dim]))
        parts = [found[start] for start in sorted(found)]
        sizes = [size for _, size in parts]
        tiled = (
            list(itertools.accumulate(sizes, initial=0))[:-1] == sorted(found)
            and sum(sizes) == self.context.shape(value)[dim]
        )
        return parts if tiled and all(sizes) and len(set(sizes)) > 1 else []

    def of_part(self, node: fx.Node, size: int, dim: int) -> Shard | None:
        """Return where to cut dim ``dim`` of a part of ``size`` elements."""
        places = [self.even(size, dim, 1, post) for _, post in self.made_of(node, dim) if size % post == 0]
        places = [place for place in places if place.pre == 1 and size // place.post >= self.parts]
        return min(
            places, key=lambda place: (self.gathered(node, place), size // place.post % self.parts != 0), default=None
        )

    def multiplied(self, node: fx.Node) -> bool:
        """Return whether what follows from ``node`` is multiplied with other activations, as keys and values are."""
        seen, stack = {node}, [node]
        while stack and len(seen) < FAR:
            value = stack.pop()
            for user, position, form in self.uses(value):
                others = [o for o, _ in form.operands if o not in seen and self.context.carrying[o]]
                activations = any(not self.context.learned(o) for o in others)
                if activations and (form.contracts(position) or has(user, Fact.ATTENTION)):
                    return True
                if not activations and not form.contracts(position):
                    after = {r for r in self.results(user) if r is not None} - seen
                    seen |= after
                    stack += after
        return False

    def made_of(self, node: fx.Node, dim: int) -> list[tuple[int, int]]:
        """Return (pre, post) of the factors of a dim that views and splits after it show, the dim itself first."""
        found: dict[tuple[int, int], None] = {(1, 1): None}
        seen: set[tuple[fx.Node, int, int]] = set()
        stack = [(node, dim, 1)]  # (value, its dim, of how many equal parts this is one)
        while stack and len(seen) < FAR:
            value, d, parts = one = stack.pop()
            sizes = self.context.expressions(value)
            if one in seen or not isinstance(sizes[d], int):
                continue
            seen.add(one)
            for user, position, form in self.uses(value):
                grain = form.grain.get(position)
                if grain is not None and grain.dim == d and sizes[d] % grain.post == 0:
                    found[parts, grain.post] = None
                for i, result in enumerate(self.results(user)):
                    if result is None:
                        continue
                    goal = self.context.expressions(result)
                    found |= {(parts * pre, post): None for pre, post in _factors(sizes, d, goal)}
                    for number in (
                        1,
                        *(sizes[d] // g for g in goal if isinstance(g, int) and 0 < g < sizes[d] and sizes[d] % g == 0),
                    ):
                        found[parts * number, 1] = None
                        after = form.shards(position, Shard(d, number))
                        at = None if after is None else after.results[i]
                        if isinstance(at, Shard) and (at.pre, at.post) == (1, 1):
                            stack.append((result, at.dim, parts * number))
        return list(found)

    def uses(self, value: fx.Node) -> Iterator[tuple[fx.Node, int, OpSharding]]:
        """Yield (op, position among its operands, its form) for each op that reads a value."""
        for user in value.users:
            form = self.forms.get(user)
            for position, (operand, _) in enumerate(form.operands if form is not None else ()):
                if operand is value and form is not None:
                    yield user, position, form

    def results(self, user: fx.Node) -> list[fx.Node | None]:
        """Return the nodes of an op's results; None for those that nothing reads."""
        if isinstance(user.meta["val"], Tensor):
            return [user]
        picked = {u.args[1]: u for u in user.users if u not in self.forms}
        return [picked.get(i) for i in range(len(user.meta["val"]))]

    def gathered(self, node: fx.Node, place: Shard) -> int:
        """Return how many elements have to be gathered before ops that do not take them sharded, if ``node`` is sharded
        at ``place``."""
        total = 0
        seen: set[tuple[fx.Node, Shard]] = set()
        stack = [(node, place)]
        while stack and len(seen) < FAR:
            value, at = one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            strategies = [(user, form.shards(position, at)) for user, position, form in self.uses(value)]
            total += math.prod(self.context.shape(value)) * any(strategy is None for _, strategy in strategies)
            for user, strategy in strategies:
                after = strategy.results if strategy is not None else ()
                stack += [
                    (r, s)
                    for r, s in zip(self.results(user), after, strict=False)
                    if r is not None and isinstance(s, Shard)
                ]
        return total


def _factors(source: list[Any], dim: int, goal: list[Any]) -> list[tuple[int, int]]:
    """Return (pre, post) of the dims into which a row-major view of ``source`` as ``goal`` sizes splits dim ``dim``,
    where these are several; the first may be one with the rows of the batch."""
    if not all(isinstance(s, int) for s in source[dim + 1 :]):
        return []
    size, behind = source[dim], math.prod(source[dim + 1 :])
    found, inner = [], 1
    for extent in reversed(goal):
        if inner >= behind * size:
            break
        if not isinstance(extent, int):
            post, rest = divmod(inner, behind)
            if 1 < post < size and not rest and size % post == 0:
                found.append((1, post))
            break
        post, rest = divmod(inner, behind)
        if post and not rest and 1 < extent < size and size % (post * extent) == 0:
            found.append((size // (post * extent), post))
        inner *= extent
    return found
