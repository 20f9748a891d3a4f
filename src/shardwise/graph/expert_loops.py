"""Loops over experts, of which a capture holds each turn over the rows of all choices, become grouped products.

``capture/expert_loops.py`` makes such turns: expert ``e`` computes all rows in their order by expert, and adds those
that are its own.  Experts that compute the same, each with its own part of the same parameters, are computed at once
here, each on its own rows, and the layer becomes one node (:mod:`shardwise.graph.experts`).  Experts without
parameters, such as those that return what they get, are computed beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.captured import Uncapturable
from shardwise.graph.experts import Region, follows_rows
from shardwise.graph.naming import module_path
from shardwise.graph.schema import op_name
from shardwise.graph.sizes import expression
from shardwise.nn.grouped import ALIGNED
from shardwise.ops.experts import stacked

aten = torch.ops.aten
TURNED = ("t", "numpy_T", "matrix_H", "mT", "transpose")  # of a matrix: each exchanges its two dims


def group_loops(graph: fx.Graph, experts: int, parameters: Collection[str]) -> None:
    """Replace the loops of a capture, over so many experts at most, in place; raise :class:`Uncapturable` where one is
    not understood. ``parameters`` are the placeholders of these."""
    for node in list(graph.nodes):
        _skip_one(graph, node)
    for node in list(graph.nodes):
        if node.target is aten.sort.stable and node.args[0].meta["val"].dim() == 1:
            try:
                _Loop(graph, node, experts, parameters).replace()
            except _Unlike as why:
                raise Uncapturable(f"the loop over experts in {module_path(node)} {why}") from why


class _Unlike(Exception):
    """A loop is not one over experts, or its experts are unlike; the message goes on after the loop's name."""


class _Loop:
    """The loop whose choices ``sort`` has sorted: ``turns`` has for each expert the node that adds its rows, and these
    rows."""

    def __init__(self, graph: fx.Graph, sort: fx.Node, experts: int, parameters: Collection[str]) -> None:
        self.graph, self.sort, self.experts, self.parameters = graph, sort, experts, parameters
        self.found, self.order = (_part(sort, i) for i in (0, 1))
        self.turns: dict[int, tuple[fx.Node, fx.Node]] = {}
        self._forms: dict[tuple[fx.Node, int], Any] = {}
        tokens = [one for one in self.order.users if op_name(one) == "floor_divide"]
        adds = [node for node in graph.nodes if node.target is aten.index_add.default and node.args[2] in tokens]
        for add, before in zip(adds, [None, *adds], strict=False):
            expert, rows = _turn(add, self.found, before)
            if expert in self.turns:
                raise _Unlike("adds rows of an expert twice")
            self.turns[expert] = add, rows
        if not adds:
            raise _Unlike("does not add what experts give to the rows of tokens")
        self.base, self.last, self.slots = adds[0].args[0], adds[-1], tokens[0].args[1]
        leading = _leading_to(self.last)
        if self.sort in _leading_to(self.base):
            raise _Unlike("begins with what depends on the order of rows")
        self.inside = _reached(sort, self.last) & {self.last, *leading}

    def replace(self) -> None:
        """Replace the loop."""
        self._check_closed()
        groups: dict[Any, list[int]] = {}
        for expert, (_, rows) in self.turns.items():
            groups.setdefault(self._form(rows, expert), []).append(expert)
        made = []
        with self.graph.inserting_before(self.last):
            for experts in groups.values():
                rows = self.turns[experts[0]][1]
                weighted = any(self.own(one, experts[0]) is not None for one in _operands(self.body(rows)))
                made.append((_Weighted if weighted else _Plain)(self, experts).rows())
            found = self._sum(made)
        self.last.replace_all_uses_with(found)
        for node in reversed(list(self.graph.nodes)):
            if (node in self.inside or node is self.sort) and not node.users:
                self.graph.erase_node(node)

    def _check_closed(self) -> None:
        """Raise :class:`_Unlike` where something else reads what is inside."""
        adds = {add for add, _ in self.turns.values()}
        inner = adds - {self.last}
        for node in self.inside - adds | inner:
            if any(user not in self.inside for user in node.users):
                raise _Unlike(f"gives more than what experts compute: {node.name}")
        for one in inner:
            if len(one.users) > 1:
                raise _Unlike("reads what experts have added so far")

    def _form(self, node: Any, expert: int) -> Any:
        """Return what is computed, so that it is equal for experts that compute the same with their own parameters."""
        if isinstance(node, tuple | list):
            return tuple(self._form(one, expert) for one in node)
        if isinstance(node, dict):
            return tuple((name, self._form(one, expert)) for name, one in sorted(node.items()))
        if not isinstance(node, fx.Node):
            return repr(node)
        known = self._forms.get((node, expert))
        if known is None:
            own = self.own(node, expert)
            if own is not None:
                form = own[0] or (tuple(node.meta["val"].shape), node.meta["val"].dtype)
                known = "own", form, tuple((one.target, repr(one.args[1:])) for one in own[1])
            elif node in self.inside and node not in (self.found, self.order):
                known = node.target, self._form(node.args, expert), self._form(node.kwargs, expert)
            else:
                known = "same", node
            self._forms[node, expert] = known
        return known

    def own(self, node: fx.Node, expert: int) -> tuple[fx.Node | None, tuple[fx.Node, ...]] | None:
        """Return the tensor of whose parts by expert a node has its own (None if it is a parameter by itself), and what
        turns that part, outermost last."""
        turns: list[fx.Node] = []
        while op_name(node) in TURNED and node not in self.inside:
            turns.insert(0, node)
            node = node.args[0]
        if node.op == "placeholder" and node.name in self.parameters:
            return None, tuple(turns)
        if node.target is not aten.select.int or node.args[1] != 0 or node.args[2] != expert:
            return None
        source: fx.Node = node.args[0]
        return None if source in self.inside else (source, tuple(turns))

    def same(self, experts: Sequence[int]) -> dict[fx.Node, list[fx.Node]]:
        """Return for each node of the first of experts that compute the same, and for what it reads, those of all."""
        found: dict[fx.Node, list[fx.Node]] = {}
        open_ = [[self.turns[expert][1] for expert in experts]]
        while open_:
            nodes = open_.pop()
            if nodes[0] in found:
                if found[nodes[0]] != nodes:
                    raise _Unlike("has experts of which one uses a parameter twice, and another two")
                continue
            found[nodes[0]] = nodes
            if nodes[0] in self.inside or op_name(nodes[0]) in TURNED:
                open_ += [list(each) for each in zip(*(one.all_input_nodes for one in nodes), strict=True)]
        return found

    def body(self, rows: fx.Node) -> list[fx.Node]:
        """Return what computes these rows inside, in order."""
        needed = {rows, *_leading_to(rows)} & self.inside
        return [node for node in self.graph.nodes if node in needed]

    def _sum(self, rows: Sequence[fx.Node]) -> fx.Node:
        """Return what a loop has added, to what it began with, of rows of all choices."""
        total = rows[0]
        for one in rows[1:]:
            total = self.put(aten.add.Tensor, total, one)
        sizes = total.meta["val"].shape[1:]
        total = self.put(aten.sum.dim_IntList, self.put(aten.reshape.default, total, [-1, self.slots, *sizes]), [1])
        zero = self.base.target in (aten.zeros_like.default, aten.zeros.default)
        return total if zero else self.put(aten.add.Tensor, self.base, total)

    def put(self, target: Callable[..., Any], *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """Add a node."""
        made = self.graph.call_function(target, args, kwargs)
        with torch.no_grad():
            value = target(*fx.map_arg(args, _value), **fx.map_arg(kwargs, _value))
        made.meta = {k: v for k, v in (like or self.last).meta.items() if k != "val"} | {"val": value}
        return made


class _Group:
    """Experts that compute the same."""

    def __init__(self, loop: _Loop, experts: Sequence[int]) -> None:
        self.loop, self.experts, self.put = loop, experts, loop.put
        self.ids = loop.sort.args[0]
        self.stacks: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}

    def rows(self) -> fx.Node:
        """Return for each choice, in their order, what its expert gives; 0 for those of other experts."""
        raise NotImplementedError

    def taken(self, node: fx.Node, source: fx.Node, by_token: bool) -> fx.Node:
        """Return the rows of a tensor by token, or by choice."""
        raise NotImplementedError

    def beside(self, mask: fx.Node, rows: fx.Node) -> fx.Node:
        """Return a mask of rows with as many dims as these have."""
        for _ in range(rows.meta["val"].dim() - 1):
            mask = self.put(aten.unsqueeze.default, mask, -1)
        return mask

    def computed(self) -> fx.Node:
        """Copy what computes the rows of the first expert, and return them."""
        loop, rows = self.loop, self.loop.turns[self.experts[0]][1]
        for node in loop.body(rows):
            if node in (loop.found, loop.order) or (op_name(node) == "floor_divide" and node.args[0] is loop.order):
                continue
            index = node.args[1] if op_name(node) == "index" else None
            if index is not None and len(index) == 1 and index[0] in loop.inside:
                by_token = index[0] is not loop.order
                if node.args[0] in loop.inside or not (by_token is False or index[0].args[0] is loop.order):
                    raise _Unlike(f"takes rows in another way: {node.name}")
                self.copies[node] = self.taken(node, node.args[0], by_token)
            else:
                self.copies[node] = self.copied(node)
        return self.copies[rows]

    def copied(self, node: fx.Node) -> fx.Node:
        """Return a copy of a node."""
        args = fx.map_arg(node.args, self.read)
        kwargs = fx.map_arg(node.kwargs, self.read)
        return self.put(node.target, *args, like=node, **kwargs)

    def read(self, node: fx.Node) -> fx.Node:
        """Return what stands for a node."""
        if node in self.loop.inside and node not in self.copies:
            raise _Unlike(f"reads the order of its rows: {node.name}")
        return self.copies.get(node, node)


class _Plain(_Group):
    """Experts without parameters of their own: their rows stay where they are."""

    def rows(self) -> fx.Node:
        """Return for each choice, in their order, what its expert gives; 0 for those of other experts."""
        found = self.computed()
        entries = {new for old, new in self.copies.items() if op_name(old) == "index"}
        seen = set(entries)
        for new in self.copies.values():
            if new not in entries and not follows_rows(new, seen):
                raise _Unlike(f"computes with rows of other tokens: {new.name}")
            seen.add(new)
        own = None
        for first, stop in _runs(sorted(self.experts)):
            ends = self.put(aten.ge.Scalar, self.ids, first), self.put(aten.lt.Scalar, self.ids, stop)
            one = self.put(aten.logical_and.default, *ends)
            own = one if own is None else self.put(aten.logical_or.default, own, one)
        assert own is not None
        return self.put(aten.where.self, self.beside(own, found), found, self.put(aten.zeros_like.default, found))

    def taken(self, node: fx.Node, source: fx.Node, by_token: bool) -> fx.Node:
        """Return the rows of a tensor by token, or by choice."""
        slots, sizes = self.loop.slots, source.meta["val"].shape[1:]
        if not by_token or slots == 1:
            return source
        wide = self.put(aten.unsqueeze.default, source, 1)
        every = self.put(aten.expand.default, wide, [-1, slots, *[-1] * len(sizes)])
        return self.put(aten.reshape.default, every, [-1, *sizes])


class _Weighted(_Group):
    """Experts with parameters: rows are sorted by expert, and products grouped."""

    def rows(self) -> fx.Node:
        """Return for each choice, in their order, what its expert gives; 0 for those of other experts."""
        number, put = len(self.experts), self.put
        if list(self.experts) != list(range(number)):
            raise _Unlike("has experts of several kinds with parameters, or some before those with parameters")
        sort = put(aten.sort.stable, self.ids, stable=True)
        self.found, self.order = (put(operator.getitem, sort, i) for i in (0, 1))
        self.tokens = put(aten.floor_divide.default, self.order, self.loop.slots)
        value = self.ids.meta["val"]
        experts = put(aten.arange.default, number, dtype=value.dtype, device=value.device)
        self.ends = put(aten.searchsorted.Tensor, self.found, experts, out_int32=True, right=True)
        self.others = None  # rows of other experts, which come last, and have no product
        if self.loop.experts > number:
            self.others = put(aten.ge.Scalar, self.found, number)
        self.same = self.loop.same(self.experts)
        rows = self._filled(self.computed())
        result = put(aten.alias.default, put(aten.index.Tensor, rows, [put(aten.argsort.default, self.order)]))
        if not Region(self.loop.graph, sort).replace():
            raise _Unlike("computes rows of experts from others, or draws random numbers for them")
        return result

    def taken(self, node: fx.Node, source: fx.Node, by_token: bool) -> fx.Node:
        """Return the rows of a tensor by token, or by choice."""
        index = self.tokens if by_token else self.order
        return self.put(aten.index.Tensor, source, [index], like=node)

    def _filled(self, rows: fx.Node) -> fx.Node:
        """Return rows with 0 for those that have no expert here: what a grouped product gives for these is open, and
        what its backward gives, too."""
        if self.others is None:
            return rows
        return self.put(aten.masked_fill.Scalar, rows, self.beside(self.others, rows), 0.0)

    def copied(self, node: fx.Node) -> fx.Node:
        """Return a copy of a node, or the grouped product in its place."""
        name, expert = op_name(node), self.experts[0]
        own = [isinstance(one, fx.Node) and self.loop.own(one, expert) is not None for one in node.args]
        if not any(own):
            return super().copied(node)
        at = {"linear": (0, 1, 2), "mm": (0, 1), "matmul": (0, 1), "addmm": (1, 2, 0)}.get(name)
        if at is not None and not own[at[0]] and own[at[1]] and not node.kwargs:
            product = self._product(node, node.args[at[0]], self._matrices(node.args[at[1]], name == "linear"))
            bias = node.args[at[2]] if at[2:] and len(node.args) > at[2] else None
            return product if bias is None else self.put(aten.add.Tensor, product, self._vectors(bias))
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            args = [self._vectors(one) if mine else one for one, mine in zip(node.args, own, strict=True)]
            return self.put(node.target, *fx.map_arg(args, self.read), like=node, **node.kwargs)
        raise _Unlike(f"uses a parameter of an expert in {name}")

    def _all(self, node: fx.Node, dims: int) -> tuple[fx.Node, int] | None:
        """Return the tensor of what all experts have in place of a parameter of the first, and how often the two dims
        of each are exchanged; None where it is the same for all."""
        own = self.loop.own(node, self.experts[0])
        if own is None or (own[0] is None and len({*self.same[node]}) == 1 and len(self.experts) > 1):
            return None
        source, turns = own
        if source is None:
            nodes = self.same[node]
            for _ in turns:
                nodes = [one.args[0] for one in nodes]
            source = self.stacks.get(tuple(nodes))
            if source is None:
                source = self.stacks[tuple(nodes)] = self.put(stacked, self.ids, *nodes)
        if source.meta["val"].dim() != dims:
            raise _Unlike("has parameters of experts of other shapes than matrices in products and vectors")
        number = len(self.experts)
        if source.meta["val"].shape[0] != number:
            source = self.put(aten.slice.Tensor, source, 0, 0, number)
        return source, len(turns)

    def _matrices(self, node: fx.Node, transposed: bool) -> fx.Node:
        """Return the matrices of all experts, as a product of rows with them takes them."""
        found = self._all(node, 3)
        if found is None:
            raise _Unlike("has a matrix that all experts share")
        source, turns = found
        return self.put(aten.transpose.int, source, 1, 2) if (turns + transposed) % 2 else source

    def _vectors(self, node: fx.Node) -> fx.Node:
        """Return a vector of each row's expert, or the one of all."""
        known = self._all(node, 2)
        if known is None:
            return node
        found = self.found
        if self.others is not None:
            found = self.put(aten.clamp.default, found, None, len(self.experts) - 1)
        return self.put(aten.index.Tensor, known[0], [found])

    def _product(self, node: fx.Node, rows: fx.Node, weight: fx.Node) -> fx.Node:
        a, b = rows.meta["val"], weight.meta["val"]
        native = a.dtype == b.dtype == torch.bfloat16 and not any(size % ALIGNED for size in b.shape[1:])
        product = aten._grouped_mm.default if native else torch.ops.shardwise.grouped_mm.default
        rest = (self._filled(self.read(rows)), weight, self.ends)
        return self._filled(self.put(product, *rest, like=node))


def _skip_one(graph: fx.Graph, node: fx.Node) -> None:
    """Let a view that removes the dim of one that has been put before all others be what it was of."""
    if op_name(node) in ("view", "reshape") and op_name(node.args[0]) == "unsqueeze" and node.args[0].args[1] == 0:
        source = node.args[0].args[0]
        sizes, own = ([expression(size) for size in one.meta["val"].shape] for one in (node, source))
        if sizes == own:
            wide = node.args[0]
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            if not wide.users:
                graph.erase_node(wide)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _part(sort: fx.Node, number: int) -> fx.Node:
    """Return the node of the sorted numbers, or of their order."""
    for user in sort.users:
        if user.args[1] == number:
            return user
    raise _Unlike("computes nothing")


def _operands(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        yield from node.all_input_nodes


def _leading_to(node: fx.Node) -> set[fx.Node]:
    """Return what a node is computed from."""
    found, open_ = set[fx.Node](), [node]
    while open_:
        new = [one for one in open_.pop().all_input_nodes if one not in found]
        found.update(new)
        open_ += new
    return found


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield numbers in ascending order as ranges."""
    first = last = numbers[0]
    for one in (*numbers[1:], None):
        if one != last + 1:
            yield first, last + 1
            first = one if one is not None else first
        last = one if one is not None else last


def _reached(start: fx.Node, last: fx.Node) -> set[fx.Node]:
    """Return what follows from a node, up to ``last``."""
    found, open_ = set[fx.Node](), [start]
    while open_:
        for user in open_.pop().users:
            if user not in found:
                found.add(user)
                if user is not last:
                    open_.append(user)
    return found


def _turn(add: fx.Node, found: fx.Node, before: fx.Node | None) -> tuple[int, fx.Node]:
    """Return the expert whose rows a node adds to what the one before has, and these rows."""
    into, dim, _, chosen = add.args
    if dim == 0 and before in (None, into) and not add.kwargs and chosen.target is aten.where.self:
        mask, rows, rest = chosen.args
        mask = mask.args[0] if op_name(mask) in ("view", "reshape") else mask
        own = mask.target is aten.eq.Scalar and mask.args[0] is found
        if own and isinstance(rows, fx.Node) and rest.target is aten.zeros_like.default:
            return int(mask.args[1]), rows
    raise _Unlike("does not add what experts give alone")


__all__ = ["group_loops"]
