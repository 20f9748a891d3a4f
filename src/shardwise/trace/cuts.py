"""Where to cut a dim of a weight: what it is made of (heads, parts of a fused projection) follows from the views and splits after it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from shardwise.trace.forms import Form, Place

if TYPE_CHECKING:
    from shardwise.trace.sharding import Propagation

FAR = 200
"""Ops after which it is no longer followed where a shard leads to."""


class Cuts:
    """For ``parts`` pieces."""

    def __init__(self, p: Propagation, forms: Mapping[fx.Node, Form | None], parts: int) -> None:
        self.p, self.forms, self.parts = p, forms, parts
        self.users = {n: list(n.users) for n in p.normal.graph.nodes}

    def even(self, size: int, dim: int, pre: int = 1, post: int = 1) -> Place:
        """A place; where pieces come out equal it says so, whatever they are made of."""
        return Place(dim, pre, size // (pre * self.parts) if size // (pre * post) % self.parts == 0 else post)

    def split(self, form: Form, weight: int, dim: int, result: int) -> Place | None:
        """Where to cut dim ``dim`` of a weight, dim ``result`` of the product: so that what follows can go on with the pieces."""
        place = self.best(form.node, result, self.p.shape(form.operands[weight][0])[dim])
        return None if place is None else place._replace(dim=dim)

    def best(self, node: fx.Node, dim: int, size: int) -> Place | None:
        """Where to cut a dim of so many elements of a value, that what follows can go on with the pieces."""
        found = []
        for order, (pre, post) in enumerate(self.made_of(node, dim)):
            if size % (pre * post) == 0 and size // (pre * post) >= self.parts:
                place = self.even(size, dim, pre, post)
                uneven = size // (place.pre * place.post) % self.parts != 0
                found.append((self.gathered(node, place), uneven, order, place))
        return min(found, key=lambda one: one[:3])[3] if found else None

    def made_of(self, node: fx.Node, dim: int) -> list[tuple[int, int]]:
        """The (pre, post) of the factors of a dim that views and splits after it show, the dim itself first."""
        found: dict[tuple[int, int], None] = {(1, 1): None}
        seen: set[tuple[fx.Node, int, int]] = set()
        stack = [(node, dim, 1)]  # the dim, or a part of so many equal ones, as it goes on
        while stack and len(seen) < FAR:
            value, d, parts = one = stack.pop()
            sizes = self.p.expressions(value)
            if one in seen or not isinstance(sizes[d], int):
                continue
            seen.add(one)
            for user, position, form in self.uses(value):
                for i, result in enumerate(self.results(user)):
                    if result is None:
                        continue
                    goal = self.p.expressions(result)
                    found |= {(parts * pre, post): None for pre, post in _factors(sizes, d, goal)}
                    for number in (
                        1,
                        *(sizes[d] // g for g in goal if isinstance(g, int) and 0 < g < sizes[d] and sizes[d] % g == 0),
                    ):
                        found[parts * number, 1] = None
                        after = form.shards(position, Place(d, number))
                        at = None if after is None else after.results[i]
                        if isinstance(at, Place) and (at.pre, at.post) == (1, 1):
                            stack.append((result, at.dim, parts * number))
        return list(found)

    def uses(self, value: fx.Node) -> Iterator[tuple[fx.Node, int, Form]]:
        """(op, position among its operands, its form) of those that read a value."""
        for user in self.users[value]:
            form = self.forms.get(user)
            for position, (operand, _) in enumerate(form.operands if form is not None else ()):
                if operand is value and form is not None:
                    yield user, position, form

    def results(self, user: fx.Node) -> list[fx.Node | None]:
        """The nodes of an op's results, of those that are read."""
        if not isinstance(user.meta["val"], tuple | list):
            return [user]
        picked = {u.args[1]: u for u in self.users[user] if u not in self.forms}
        return [picked.get(i) for i in range(len(user.meta["val"]))]

    def gathered(self, node: fx.Node, place: Place) -> int:
        """The elements that have to be gathered, after ``node`` is made sharded at ``place``, before ops that do not take them so."""
        total = 0
        seen: set[tuple[fx.Node, Place]] = set()
        stack = [(node, place)]
        while stack and len(seen) < FAR:
            value, at = one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            strategies = [(user, form.shards(position, at)) for user, position, form in self.uses(value)]
            total += math.prod(self.p.shape(value)) * any(strategy is None for _, strategy in strategies)
            for user, strategy in strategies:
                after = strategy.results if strategy is not None else ()
                stack += [
                    (r, s) for r, s in zip(self.results(user), after, strict=False) if r is not None and isinstance(s, Place)
                ]
        return total


def _factors(source: list[Any], dim: int, goal: list[Any]) -> list[tuple[int, int]]:
    """The (pre, post) of the dims that a row-major view of ``source`` as ``goal`` sizes makes of dim ``dim``, where it makes several."""
    if not all(isinstance(s, int) for s in source[dim + 1 :]):
        return []
    size, behind = source[dim], math.prod(source[dim + 1 :])
    found, inner = [], 1
    for extent in reversed(goal):
        if not isinstance(extent, int) or inner >= behind * size:
            break
        post, rest = divmod(inner, behind)
        if post and not rest and 1 < extent < size and size % (post * extent) == 0:
            found.append((size // (post * extent), post))
        inner *= extent
    return found
