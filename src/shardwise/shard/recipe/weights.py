"""A walk by a recipe decides on open parameters when it comes to the op that uses them first: which dim of each is
sharded, and what it is made of.

Megatron's turns of columns and rows follow from the state of a product's input (``by_rows``, ``by_columns``); a
table is sharded by rows (``by_table``), and a convolution of groups by groups (``by_groups``).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping

from torch import fx

from shardwise.core.mesh import axis_of
from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.schema import given
from shardwise.ops.env import ROWS
from shardwise.parallel.tensor import Role
from shardwise.shard.assignment import Assignment
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy
from shardwise.shard.recipe.lookahead import Lookahead
from shardwise.shard.recipe.open_parameters import OpenParameters
from shardwise.shard.recipe.split_points import SplitPoints

TABLE = 8
"""A table is split by rows if it has this number of rows or more for each rank."""


class WeightWalk(OpenParameters):
    """This walk decides on parameters for one axis, over which, with its other sub-axis, there are ``parts`` ranks;
    ``before`` are the assignments of the axes before it.

    ``known`` is what the axis does; None means that all ranks compute the same over it.
    """

    def __init__(
        self, context: ShardingContext, axis: str, rows: Assignment, before: Mapping[str, Assignment],
        known: Role | None,
    ) -> None:  # fmt: skip
        super().__init__(context)
        self.axis, self.rows, self.before = axis, rows, before
        # Sub-axes cut alike, one within the other, so that both decide as the axis does.
        own = [name for name in context.tensor.axes if axis_of(name) == axis_of(axis)]
        self.parts, self.major = math.prod(context.tensor.axes[name] for name in own), context.tensor.axes[own[0]]
        self.divided, self.outer = len(own) > 1, axis == own[0]
        self.few = 1  # the number of ranks among which heads are shared out, if not all
        self.shared: set[fx.Node] = set()  # products that several ranks compute alike: each uses a part of the result
        self.role, self.inert = known or Role(), known is None
        self.made: set[fx.Node] = set()  # partial sums that products made
        self.cuts = SplitPoints(context, self.parts)
        self.ahead = Lookahead(context)
        self.streams: set[fx.Node] = set()  # products by columns whose result is gathered, as others add to it

    @property
    def alternates(self) -> bool:
        """Return whether products by columns and by rows take turns by themselves."""
        return self.role.stream in ("whole", "sequence") and not self.role.rows

    # ---- states ----------------------------------------------------------------------------------------------------

    def state(self, node: fx.Node) -> Placement:
        """Return the state of a value as the ops that read it see it."""
        return "I" if node in self.streams else super().state(node)

    def shards(self, form: OpSharding, position: int, place: Shard) -> Strategy | None:
        """Return a form's strategy whose shards go together with those of other axes, or None."""
        return next((strategy for strategy in form.ways(position, place) if self.together(form, strategy)), None)

    def fits(self, node: fx.Node, place: Shard) -> bool:
        """Return whether a value can be sharded at ``place`` beside what other axes make of it."""
        others = {group: one.states[node][0] for group, one in ((ROWS, self.rows), *self.before.items())}
        return self.context.fits(self.context.shape(node), {**others, self.axis: place})

    def together(self, form: OpSharding, strategy: Strategy) -> bool:
        """Return whether a strategy's shards go together with those of other axes."""
        walked = {ROWS: self.rows, **self.before}
        known = {group: one.strategies[form.node] for group, one in walked.items() if form.node in one.strategies}
        return self.context.together(form, {**known, self.axis: strategy})

    def sharded(self, form: OpSharding, states: list[Placement]) -> Strategy | None:
        """Return the strategy of a sharded operand: parameters come first, then the largest; weights that are gathered
        at use do not count."""
        order = []
        for i, (state, (operand, _)) in enumerate(zip(states, form.operands, strict=True)):
            if isinstance(state, Shard):
                mine = self.context.learned(operand)
                if not (mine and self.role.at_use and not self.large_table(form, i)):
                    shape = self.context.shape(operand)
                    coarse = self.divided and self.context.size(operand, state) < self.parts
                    order.append((not mine, coarse, -math.prod(shape), i, state))
        for *_, i, state in sorted(order, key=lambda one: one[:4]):
            found = self.shards(form, i, state)
            if found is not None:
                return found
        return None

    def large_table(self, form: OpSharding, table: int) -> bool:
        """Return whether an op looks up fewer elements than the table has, so that these are reduced instead of the
        table being gathered."""
        rows, found = (
            math.prod(self.context.shape(form.operands[table][0])),
            sum(map(math.prod, self.context.shapes(form.node))),
        )
        return self.looks_up(form, table) and rows > found

    def looks_up(self, form: OpSharding, table: int) -> bool:
        """Return whether an op looks up rows of the operand ``table``."""
        labels = form.operands[table][1]
        return not form.contracts(table) and len(form.operands) > 1 and any(form.sums(label) for label in labels)

    # ---- decisions -------------------------------------------------------------------------------------------------

    def decide(self, form: OpSharding, opened: list[int]) -> None:
        """Close the open operands of an op as its other operands want, or as the recipe says if these are whole.  Of
        open ones that are multiplied with each other the last is the weight."""
        for i in opened[:-1]:
            inner = {label for label in form.operands[i][1] if form.sums(label)}
            if any(inner.intersection(form.operands[j][1]) for j in opened if j > i):
                self.close(form.operands[i][0], None)
        opened = [i for i in opened if form.operands[i][0] in self.origin]
        if self.role.rows:
            place = self.at_rest(form, opened)
        else:
            places = self.places(form, opened) or self.as_read(form, opened)
            place = next((one for one in places if self.possible(form, opened, one)), places[0] if places else None)
        strategy = None if place is None else self.shards(form, *place)
        if place is None:
            strategy = self.sharded(form, [self.state(o) for o, _ in form.operands])
        order = [place[0]] if place is not None and place[0] in opened else []
        for i in [*order, *(i for i in opened if i not in order)]:
            if self.role.at_use:
                wanted = place[1] if place is not None and i in order else None
            else:
                wanted = None if strategy is None else strategy.operands[i]
            good = self.close(form.operands[i][0], wanted)
            if not good and i in order:
                strategy = None

    def places(self, form: OpSharding, opened: list[int]) -> list[tuple[int, Shard]]:
        """Return (operand, where it is sharded) by each way to decide on the open operands of an op."""
        ways = (self.by_rows, self.by_table, self.by_columns, self.by_groups)
        return [found for way in ways if (found := way(form, opened)) is not None]

    def as_read(self, form: OpSharding, opened: list[int]) -> list[tuple[int, Shard]]:
        """Return where to shard the parameters of which an op makes a weight (a direction and a length), as the product
        that alone reads it, or a view of it, wants it."""
        weight, reader = self.until_read(form)
        if len(opened) < len(form.operands) or reader is None or not self.alternates:
            return []
        own = [i for i, (o, _) in enumerate(reader.operands) if o is weight]
        rest = [i for i, (o, _) in enumerate(reader.operands) if o in self.origin]
        if len(own) != 1 or any(o not in self.found.states for o, _ in reader.operands if o is not weight):
            return []
        ways = (self.shards(reader, *place) for place in self.places(reader, [*own, *rest]))
        goals = [goal for way in ways if way is not None and isinstance(goal := way.operands[own[0]], Shard)]
        return [
            (i, place)
            for goal, i in itertools.product(goals, opened)
            for place in self.candidates(form.operands[i][0], weight, goal)
            if self.seen(form, i, place, weight) == goal
        ]

    def until_read(self, form: OpSharding) -> tuple[fx.Node, OpSharding | None]:
        """Return the result of an op, or the last of the views of it that follow, and the op that alone reads that."""
        node = form.node
        while len(node.users) == 1:
            (after,) = node.users
            reader = self.forms.get(after)
            if reader is not None and len(reader.operands) > 1:
                return node, reader
            if reader is None and after.target is not operator.getitem:
                break
            node = after
        return node, None

    def seen(self, form: OpSharding, position: int, place: Shard, view: fx.Node) -> Placement | None:
        """Return the state of a ``view`` of an op's result if the operand ``position`` of the op is sharded at
        ``place``."""
        made, node = form.shards(position, place), form.node
        states = () if made is None else made.results
        while states and node is not view:
            (node,) = node.users
            if node not in self.forms:
                states = (states[node.args[1]],)
            else:
                made = self.forms[node].shards(0, states[0]) if isinstance(states[0], Shard) else None
                states = () if made is None else made.results
        return states[0] if states else None

    def possible(self, form: OpSharding, opened: list[int], place: tuple[int, Shard]) -> bool:
        """Return whether open operands can be as an op wants them that takes one of its operands sharded at a place: a
        weight may be the result of ops that need some of its dims whole."""
        strategy = self.shards(form, *place)
        wanted = [] if strategy is None else [(form.operands[i][0], strategy.operands[i]) for i in opened]
        return all(self.placed(o, goal) is not None for o, goal in wanted if isinstance(goal, Shard))

    def at_rest(self, form: OpSharding, opened: list[int]) -> tuple[int, Shard] | None:
        """Return (weight, where it rests) for a product whose weight is gathered where it is used: along what is summed
        over, else along any dim."""
        if not self.role.at_use:
            return None
        for i in opened:
            operand, labels = form.operands[i]
            if not (form.contracts(i) or self.looks_up(form, i)):
                continue
            dims = sorted(range(len(labels)), key=lambda d: not form.sums(labels[d]))
            for dim in dims:
                size, inner = self.context.shape(operand)[dim], self.within(operand, dim)
                if inner is not None and size % (inner * self.parts) == 0:
                    return i, Shard(dim, inner, size // (inner * self.parts))
        return None

    def within(self, operand: fx.Node, dim: int) -> int | None:
        """Return into how many pieces other axes cut a dim of a parameter; None where that cannot be told."""
        pieces = 1
        for one in self.before.values():
            state = one.states[operand][0]
            if isinstance(state, Shard) and state.dim == dim:
                if state.pre != 1 or pieces != 1:
                    return None
                pieces = self.context.shape(operand)[dim] // state.post
        return pieces

    def by_rows(self, form: OpSharding, opened: list[int]) -> tuple[int, Shard] | None:
        """Return (operand, where it is sharded): along a label that is summed over and that the weight has too."""
        for i, (operand, labels) in enumerate(form.operands if self.role.stream != "width" else ()):
            if i in opened:
                continue
            for place in self.pieces(operand):
                label = labels[place.dim]
                if form.sums(label) and any(label in form.operands[j][1] for j in opened):
                    return None if self.keeps_scores(form, i) else (i, place)
        return None

    def keeps_scores(self, form: OpSharding, position: int) -> bool:
        """Return whether a product is by columns all the same: scores of a vocabulary, larger than its input, are not
        to be whole."""
        sizes = [math.prod(self.context.shape(node)) for node in (form.node, form.operands[position][0])]
        return self.alternates and sizes[0] > sizes[1] and self.ahead.is_scores(form.node)

    def pieces(self, operand: fx.Node) -> list[Shard]:
        """Return where an operand is sharded, or where slices of a whole one may begin turns of columns and rows."""
        state = self.state(operand)
        if state == "I" and self.role.turned and not self.context.learned(operand):
            sizes = self.context.expressions(operand)
            return [
                self.cuts.even(s, d) for d, s in enumerate(sizes) if isinstance(s, int) and s and s % self.parts == 0
            ]
        return [state] if isinstance(state, Shard) else []

    def by_columns(self, form: OpSharding, opened: list[int]) -> tuple[int, Shard] | None:
        """Return (weight, where to shard it) for a product: along a dim of the result that the weight alone has."""
        for i, cut in form.suggested() if form.suggested is not None else ():
            if i in opened:
                return i, cut
        for i in opened:
            labels = form.operands[i][1]
            known = (theirs for j, (_, theirs) in enumerate(form.operands) if j not in opened and j not in form.added)
            others = {label for theirs in known for label in theirs}
            if not any(form.sums(label) and label in others for label in labels):
                continue
            for dim, label in enumerate(labels):
                if label is not None and label in form.results[0] and label not in others:
                    place = self.column_of(form, i, dim, list(form.results[0]).index(label))
                    if place is not None or form.node in self.shared:
                        return None if place is None else (i, place)
        return None

    def column_of(self, form: OpSharding, weight: int, dim: int, result: int) -> Shard | None:
        """Return where to cut a weight by columns.

        Where that leaves a rank less than a head, as of keys and values that groups of queries share, heads are cut
        among as many of the ranks as can have whole ones: those of the major sub-axis.  The ranks of the other sub-axis
        have the same heads.
        """
        found = self.cuts.split(form, weight, dim, result)
        lost, place = found or (1, None)
        if not lost or self.role.stream not in ("whole", "sequence") or not self.cuts.multiplied(form.node):
            return place
        number, heads = self.fewer(form, weight, dim, result)
        given = (self.ahead.size(o) for j, (o, _) in enumerate(form.operands) if j != weight)
        if number == 1 and self.ahead.size(form.node) > max(given):
            return place  # it has the queries too
        if number == 1 or (self.divided and not self.outer and number == self.major):
            self.shared.add(form.node)
            return None
        self.few = max(self.few, 1 if self.divided else number)
        return heads if self.divided and number == self.major else place

    def fewer(self, form: OpSharding, weight: int, dim: int, result: int) -> tuple[int, Shard | None]:
        """Return the largest number of ranks, a divisor of all, among which a dim can be shared out without gathers,
        and its cut."""
        for number in (n for n in range(self.parts // 2, 1, -1) if self.parts % n == 0):
            found = SplitPoints(self.context, number).split(form, weight, dim, result)
            whole = self.context.shape(form.operands[weight][0])[dim]
            if found is not None and not found[0] and whole // (found[1].pre * found[1].post) % number == 0:
                return number, found[1]
        return 1, None

    def by_table(self, form: OpSharding, opened: list[int]) -> tuple[int, Shard] | None:
        """Return (table, where to shard it): along rows that are looked up by what comes from the batch, or along the
        width of each."""
        for i in opened:
            operand, labels = form.operands[i]
            if not self.looks_up(form, i):
                continue
            shape = self.context.shape(operand)
            row = next(d for d, label in enumerate(labels) if form.sums(label))
            if self.role.turned or self.role.stream == "width":
                wide = [d for d, label in enumerate(labels) if label in form.results[0] and shape[d] >= self.parts]
                return (i, self.cuts.even(shape[wide[-1]], wide[-1])) if wide else None
            if self.of_batch(form, opened) or self.of_positions(form, i):
                if shape[row] < TABLE * self.parts:
                    continue
                return i, self.cuts.even(shape[row], row)
        return None

    def of_batch(self, form: OpSharding, opened: list[int]) -> bool:
        """Return whether what an op looks up comes from the batch."""
        known = (o for j, (o, _) in enumerate(form.operands) if j not in opened)
        return any(isinstance(self.rows.states[o][0], Shard) for o in known)

    def of_positions(self, form: OpSharding, table: int) -> bool:
        """Return whether an op looks up, for all rows alike, no more elements than the table has, as positions are."""
        found = sum(map(math.prod, self.context.shapes(form.node)))
        return self.alternates and math.prod(self.context.shape(form.operands[table][0])) >= found

    def by_groups(self, form: OpSharding, opened: list[int]) -> tuple[int, Shard] | None:
        """Return (weight, where to shard it) for a convolution of groups, as of each channel by itself, whose input is
        whole: each rank takes its part of that."""
        if 1 not in opened or not (self.alternates and shares_groups(form)):
            return None
        number, dim = given(form.node, "groups"), list(form.results[0]).index("g")
        wide, rows = self.context.shape(form.node)[dim], self.context.shape(form.operands[1][0])[0]
        found = self.cuts.best(form.node, dim, wide, wide // number)
        return found and (1, Shard(0, found[1].pre, found[1].post // (wide // number) * (rows // number)))


def shares_groups(form: OpSharding) -> bool:
    """Return whether an op is a convolution of groups, of which ranks can have some each."""
    return has(form.node, Fact.CONVOLUTION) and form.moves is not None


__all__ = ["WeightWalk", "shares_groups"]
