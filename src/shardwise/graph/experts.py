"""A layer of experts (Shazeer et al., arXiv 1701.06538) as one op of a normal graph.

Models sort the numbers of the experts that their tokens have chosen, so that the tokens of each expert follow each
other, compute grouped products, and put the results back in the old order.  Sorting looks at all tokens, but nothing
depends on their order: any part of the tokens, and any part of the experts, can be computed by itself.  That is what
:func:`group_experts` makes visible: what lies between the sort and its inverse becomes the *body* of one node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.schema import given, is_tensor, op_name
from shardwise.graph.sizes import expression
from shardwise.ops.experts import by_expert, placed, taken

ROW, IDS, ORDER, TOKEN, INVERSE, COUNTS, OFFSETS, BLANK = range(8)
"""What a value between the sort and its inverse is: rows by expert, the sorted numbers of experts, the place in the old
order of each row, its token, the way back, the rows of each expert, where they end, and memory."""


class Experts:
    """A layer of experts, as the target of a node ``experts(ids, *entries, *weights)``.

    ``ids`` (slots) are numbers of experts, and the result has a row for each.  Entry i has a row for each
    ``slots[i]`` of them: 1, or the number of experts that a token chooses.  The ``body`` is a graph of rows that are
    sorted by expert: its placeholders are the rows of each entry, the sorted numbers, the ends (experts) of the rows of
    each expert, and the weights.
    """

    def __init__(self, body: fx.Graph, slots: Sequence[int], experts: int) -> None:
        self.body, self.slots, self.experts = body, tuple(slots), experts
        self.__name__ = self.__qualname__ = "experts"

    def __call__(self, ids: Tensor, *tensors: Tensor) -> Tensor:
        """Return the rows of all experts."""
        order, found, ends = by_expert(ids, self.experts)
        number = len(self.slots)
        rows = [taken(x, order, n) for x, n in zip(tensors[:number], self.slots, strict=True)]
        out: Tensor = fx.Interpreter(torch.nn.Module(), graph=self.body).run(*rows, found, ends, *tensors[number:])
        return placed(out, order, ids)

    @property
    def places(self) -> list[fx.Node]:
        """Return the placeholders of the body."""
        return [node for node in self.body.nodes if node.op == "placeholder"]

    @property
    def of_each(self) -> list[bool]:
        """Return for each weight whether its first dim is that of experts: it is multiplied by groups of rows, or taken
        by their numbers."""
        first = len(self.slots)
        ids, weights = self.places[first], self.places[first + 2 :]

        def by_expert(weight: fx.Node) -> bool:
            numbers = {ids, *(user for user in ids.users if op_name(user) == "clamp")}
            return all(
                user.args[1] is weight
                if has(user, Fact.GROUPED_PRODUCT)
                else not numbers.isdisjoint(user.all_input_nodes)
                for user in weight.users
            )

        return [by_expert(weight) for weight in weights]

    @property
    def result(self) -> fx.Node:
        """Return the node of the body whose rows are the result."""
        (output,) = self.body.find_nodes(op="output")
        found: fx.Node = output.args[0]
        return found


def group_experts(graph: fx.Graph) -> None:
    """Replace every layer of experts by one node."""
    for node in list(graph.nodes):
        if node.op == "call_function" and op_name(node) == "sort" and _numbers_experts(node):
            Region(graph, node).replace()


def _numbers_experts(node: fx.Node) -> bool:
    value = node.args[0].meta["val"]
    descending = given(node, "descending", False)
    return value.dim() == 1 and not value.is_floating_point() and not descending


class Region:
    """What depends on a sort, up to where its inverse is applied."""

    def __init__(self, graph: fx.Graph, sort: fx.Node) -> None:
        self.graph, self.sort = graph, sort
        self.size = expression(sort.args[0].meta["val"].shape[0])
        self.kinds: dict[fx.Node, int] = {}
        self.entries: dict[fx.Node, tuple[fx.Node, int]] = {}  # the first rows: of which tensor, and slots a row of it
        self.experts = 0

    def replace(self) -> bool:
        """Replace the region by one node, if everything in it is understood; return whether it is."""
        last = self._last()
        if last is None or not self.experts or not self.entries:
            return False
        inside = [node for node in self.graph.nodes if node in self.kinds]
        if any(user not in self.kinds and user is not last for node in (*inside, self.sort) for user in node.users):
            return False
        return self._put(inside, last)

    def _last(self) -> fx.Node | None:
        """Classify what depends on the sort; return the node that restores the order, or None."""
        self.kinds[self.sort] = BLANK
        for node in self.graph.nodes:
            if node is self.sort or not any(one in self.kinds for one in node.all_input_nodes):
                continue
            if self._restores(node):
                found: fx.Node = node
                return found
            kind = self._kind(node)
            if kind is None:
                return None
            self.kinds[node] = kind
        return None

    def _restores(self, node: fx.Node) -> bool:
        indices = self._indices(node)
        return indices is not None and self.kinds.get(indices) == INVERSE and self.kinds.get(node.args[0]) == ROW

    @staticmethod
    def _indices(node: fx.Node) -> Any:
        """Return the indices by which a node takes rows of its first operand, or None."""
        if op_name(node) == "index" and len(node.args[1]) == 1:
            return node.args[1][0]
        if op_name(node) == "index_select" and node.args[1] == 0:
            return node.args[2]
        return None

    def _kind(self, node: fx.Node) -> int | None:
        first, name = node.args[0], op_name(node)
        own = [self.kinds[one] for one in node.all_input_nodes if one in self.kinds]
        if first is self.sort:
            return {0: IDS, 1: ORDER}.get(node.args[1]) if node.target is operator.getitem else None
        if (indices := self._indices(node)) is not None and first not in self.kinds:
            return self._taken(node, first, indices)
        if own == [ORDER]:
            return self._of_order(node, name)
        if has(node, Fact.CASTS) and own[0] != ROW:
            return own[0]
        if own == [IDS] and name in ("histc", "bincount"):
            return self._counted(node, name)
        if own == [IDS] and self.experts > 0 and (known := self._of_missing(node, name)) is not None:
            return known
        if own == [IDS] and name == "searchsorted":
            return self._ends_found(node)
        if own == [COUNTS]:
            return OFFSETS if name == "cumsum" and given(node, "dim") == 0 else None
        if name == "index_put" and own == [BLANK, ORDER] and not given(node, "accumulate", False):
            fits = node.args[1] == [node.all_input_nodes[1]] and self._all_numbers(node.args[2])
            return INVERSE if fits else None
        return ROW if self._by_row(node) else None

    def _taken(self, node: fx.Node, source: fx.Node, indices: fx.Node) -> int | None:
        """Return the kind of rows that are taken of a tensor outside of the region."""
        rows, kind = expression(source.meta["val"].shape[0]), self.kinds[indices]
        if kind == IDS:  # an expert's parameter for each row
            return ROW if rows == self.experts or not self.experts else None
        if kind not in (ORDER, TOKEN):
            return None
        slots = 1 if kind == ORDER else indices.args[1]
        if rows * slots != self.size:
            return None
        self.entries[node] = (source, slots)
        return ROW

    def _of_order(self, node: fx.Node, name: str) -> int | None:
        if name in ("floor_divide", "div") and isinstance(node.args[1], int):
            return TOKEN if name == "floor_divide" or given(node, "rounding_mode") in ("floor", "trunc") else None
        if name == "argsort" and not given(node, "descending", False):
            return INVERSE
        return BLANK if has(node, Fact.LIKE) else None

    def _of_missing(self, node: fx.Node, name: str) -> int | None:
        """Return the kind of what tells numbers that are those of no expert, which come last, from others: this holds
        also where experts are counted from the first of a rank."""
        if name == "clamp" and given(node, "min") in (None, 0) and given(node, "max") == self.experts - 1:
            return IDS
        return ROW if name == "ge" and node.args[1] == self.experts else None

    def _counted(self, node: fx.Node, name: str) -> int | None:
        if name == "histc":
            experts, bounds = given(node, "bins", 100), (given(node, "min", 0), given(node, "max", 0))
            fits = bounds == (0, experts - 1)
        else:
            experts, fits = given(node, "minlength", 0), given(node, "weights") is None
        self.experts = experts if self.experts in (0, experts) else -1
        return COUNTS if fits and self.experts > 0 else None

    def _ends_found(self, node: fx.Node) -> int | None:
        """Return the kind of the places before which all numbers up to 0, 1, 2 and so on are: where experts end."""
        wanted = node.args[1]
        if not isinstance(wanted, fx.Node) or wanted.target is not torch.ops.aten.arange.default:
            return None
        experts = wanted.meta["val"].shape[0]
        fits = given(node, "right", False) and given(node, "sorter") is None and isinstance(experts, int)
        self.experts = experts if fits and self.experts in (0, experts) else -1
        return OFFSETS if self.experts > 0 else None

    def _all_numbers(self, node: Any) -> bool:
        """Return whether a value is 0, 1, 2 and so on for all rows."""
        is_range = isinstance(node, fx.Node) and node.target is torch.ops.aten.arange.default
        return bool(is_range and expression(node.meta["val"].shape[0]) == self.size)

    def _by_row(self, node: fx.Node) -> bool:
        """Return whether each row of a result follows from the same row of operands, and from what has no rows."""
        inside = [one for one in node.all_input_nodes if one in self.kinds]
        if has(node, Fact.GROUPED_PRODUCT):
            x, weight, offsets = node.args[0], node.args[1], given(node, "offs")
            return [self.kinds.get(one) for one in (x, weight, offsets)] == [ROW, None, OFFSETS]
        return all(self.kinds[one] == ROW for one in inside) and follows_rows(node, inside)

    # ---- the node ----------------------------------------------------------------------------------------------------

    def _put(self, inside: Sequence[fx.Node], last: fx.Node) -> bool:
        """Put one node in place of ``last``; return whether that is possible."""
        body, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        rows = [node for node in inside if self.kinds[node] == ROW or op_name(node) == "clamp"]
        weights = dict.fromkeys(
            one for node in rows if node not in self.entries for one in node.all_input_nodes if one not in self.kinds
        )
        if any(not is_tensor(one) for one in weights):
            return False

        def place(name: str, meta: Mapping[str, Any]) -> fx.Node:
            made = body.placeholder(name)
            made.meta = dict(meta)
            return made

        for node in self.entries:
            copies[node] = place("rows", node.meta)
        ids, ends = place("ids", self.sort.args[0].meta), place("ends", self._ends().meta)
        for weight in weights:
            copies[weight] = place("weight", weight.meta)
        stand_in = {IDS: ids, OFFSETS: ends}
        read: Callable[[fx.Node], fx.Node] = lambda one: copies.get(one) or stand_in[self.kinds[one]]  # noqa: E731
        for node in rows:
            if node not in copies:
                copies[node] = body.node_copy(node, read)
        body.output(copies[last.args[0]])
        target = Experts(body, [slots for _, slots in self.entries.values()], self.experts)
        operands = (self.sort.args[0], *(source for source, _ in self.entries.values()), *weights)
        with self.graph.inserting_before(last):
            new = self.graph.call_function(target, operands)
        new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        self.graph.erase_node(last)
        return True

    def _ends(self) -> fx.Node:
        return [node for node, kind in self.kinds.items() if kind == OFFSETS][-1]


def follows_rows(node: fx.Node, rows: Collection[fx.Node]) -> bool:
    """Return whether each row of a result follows from the same row of those operands that are ``rows``, and from what
    has no rows."""
    if "ordinal" in node.meta:
        return False
    if node.target is operator.getitem:
        return True
    inside = [one for one in node.all_input_nodes if one in rows]
    name, x = op_name(node), node.args[0]
    rank = inside[0].meta["val"].dim() if isinstance(inside[0].meta["val"], torch.Tensor) else 0
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or has(node, Fact.CASTS):
        others = [one.meta["val"] for one in node.all_input_nodes if one not in rows and is_tensor(one)]
        size = node.meta["val"].dim()
        return all(one.dim() < size or one.shape[0] == 1 for one in others) and rank == size
    if has(node, Fact.SPLIT) or name in ("slice", "select", "narrow", "softmax", "log_softmax"):
        return bool(given(node, "dim", 0) % rank) and len(inside) == 1
    if name == "unsqueeze":
        return bool(given(node, "dim") % (rank + 1))
    if name in ("layer_norm", "rms_norm"):
        return inside == [x] and len(node.args[1]) < rank
    return False


__all__ = ["Experts", "Region", "follows_rows", "group_experts"]
