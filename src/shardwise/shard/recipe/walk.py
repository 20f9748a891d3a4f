"""A recipe says what the ops of a model are on an axis of tensor parallelism: which parameters are sharded, and where
ranks communicate.

``1d`` (Shoeybi et al., arXiv 1909.08053, section 3): a product whose input is whole has its weight split by columns,
and one whose input is sharded along what it sums over has it split by rows; a table is split by rows where indices come
from the batch, and a cross-entropy takes scores that are split by classes.  ``lookahead.py`` says where these turns
would communicate more than they have to.  For a transformer layer with b·s·h activations that is 8·b·s·h·(t-1)/t
elements per rank and microbatch, forward and backward, over t ranks.  ``1d-sp`` (Korthikanti et al., arXiv 2205.05198,
section 4.2.2): what comes between the products is sharded along the sequence; each all-reduce becomes a reduce-scatter
and an all-gather, of the same total volume.  The others, and their volumes, are in ``parallel/tensor.py``.

Nothing here knows models: what a dim is made of (heads, parts of a fused projection) follows from the views and splits
that come after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from shardwise.core.fields import has_rows
from shardwise.core.mesh import axis_of
from shardwise.core.tensor_options import CONTEXT
from shardwise.ops.env import ROWS
from shardwise.parallel.tensor import Role
from shardwise.shard.assignment import Assignment, place_of
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy
from shardwise.shard.recipe.lookahead import Lookahead
from shardwise.shard.recipe.open_parameters import OpenParameters
from shardwise.shard.recipe.split_points import SplitPoints

TABLE = 8
"""A table is split by rows if it has this number of rows or more for each rank."""


class TensorWalk(OpenParameters):
    """This is the walk for one axis, over which, with its other sub-axis, there are ``parts`` ranks; ``before`` are the
    assignments of the axes before it.

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

    # ---- parameters ------------------------------------------------------------------------------------------------

    def initial_state(self, node: fx.Node) -> Placement:
        name = self.context.parameters.get(node)
        if name is None or self.inert:
            field = self.context.captured.fields.get(node.name)
            return Shard(0) if self.role.rows and field is not None and has_rows(field) else "I"
        if self.context.tensor.layouts is not None:
            return place_of(self.context.tensor.layouts.get(name), self.axis, self.context.tensor.axes)
        return self.leave_open(node)

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def state(self, node: fx.Node) -> Placement:
        """Return the state of a value as the ops that read it see it."""
        return "I" if node in self.streams else super().state(node)

    def choose(self, form: OpSharding) -> Strategy:
        opened = [i for i, (o, _) in enumerate(form.operands) if o in self.origin]
        if opened:
            self.decide(form, opened)
        states = [self.state(o) for o, _ in form.operands]
        self.note_shared_heads(form, states)
        if form.node in self.shared:
            return form.whole("R")
        found = self.column(form, states) or self.sharded(form, states)
        if found is not None:
            return self.noted(form, found)
        partial = [i for i, s in enumerate(states) if s == "P"]
        if partial and form.keeps(partial) and self.keeps(form, partial):
            return self.noted(form, form.on_partial(partial))
        for i in partial:
            found = self.in_stream(form, i)
            if found is not None:
                return found
        passing = [
            s for (o, _), s in zip(form.operands, states, strict=True) if self.grad[o] and not self.context.learned(o)
        ]
        return form.whole("R" if passing and all(s == "R" for s in passing) else "I")

    def note_shared_heads(self, form: OpSharding, states: list[Placement]) -> None:
        """Note whether several ranks compute a product alike, where its weight has been left whole before."""
        if self.context.tensor.layouts is not None:
            whole = [i for i, (o, _) in enumerate(form.operands) if states[i] == "I" and self.context.learned(o)]
            if self.by_rows(form, whole) is None:
                self.by_columns(form, whole)

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

    def column(self, form: OpSharding, states: list[Placement]) -> Strategy | None:
        """Return the strategy by columns for a weight that rests cut by rows, if all products are by columns."""
        if self.role.stream != "width":
            return None
        for i, (operand, labels) in enumerate(form.operands):
            state = states[i]
            if (
                isinstance(state, Shard)
                and self.context.learned(operand)
                and form.contracts(i)
                and form.sums(labels[state.dim])
            ):
                place = self.by_columns(form, [i])
                return None if place is None else self.shards(form, *place)
        return None

    def noted(self, form: OpSharding, strategy: Strategy) -> Strategy:
        """Remember where a partial sum is that of a product, and where a stream begins; return the strategy."""
        weights = {i for i, _ in form.suggested()} if form.suggested is not None else ()
        product = any(
            i in weights or form.contracts(i) or self.looks_up(form, i)
            for i, (o, _) in enumerate(form.operands)
            if self.context.learned(o)
        )
        if "P" in strategy.results:
            if product or any(o in self.made for o, _ in form.operands):
                self.made.add(form.node)
        elif product and self.alternates and isinstance(strategy.results[0], Shard) and self.ahead.is_stream(form.node):
            self.streams.add(form.node)
        return strategy

    def keeps(self, form: OpSharding, partial: list[int]) -> bool:
        """Return whether an op is applied to a partial sum, which is reduced later."""
        first = form.operands[partial[0]][0]
        if len(partial) == 1 and self.alternates and self.ahead.shrinks(form, partial[0]):
            return True
        others = [o for i, (o, _) in enumerate(form.operands) if i not in partial and self.grad[o]]
        if others:
            return False
        small = not self.context.shape(first)
        together = form.linear == "add" and len(partial) == len(form.operands) > 1
        later = form.operands[0][0] in self.made and (
            self.in_stream(form, partial[0]) is None
            if self.role.stream != "whole"
            else len(form.operands) == len(first.users) == 1 and self.ahead.size(form.node) <= self.ahead.size(first)
        )
        return small or together or later

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

    def decide(self, form: OpSharding, opened: list[int]) -> None:
        """Close the open operands of an op as its other operands want, or as the recipe says if these are whole."""
        if self.role.rows:
            place = self.at_rest(form, opened)
        else:
            place = self.by_rows(form, opened) or self.by_table(form, opened) or self.by_columns(form, opened)
        strategy = None if place is None else self.shards(form, *place)
        if place is None:
            known = [(i, self.state(o)) for i, (o, _) in enumerate(form.operands) if i not in opened]
            sharded = [(i, s) for i, s in known if isinstance(s, Shard)]
            strategy = next((found for one in sharded if (found := self.shards(form, *one)) is not None), None)
        order = [place[0]] if place is not None and place[0] in opened else []
        for i in [*order, *(i for i in opened if i not in order)]:
            if self.role.at_use:
                wanted = place[1] if place is not None and i in order else None
            else:
                wanted = None if strategy is None else strategy.operands[i]
            good = self.close(form.operands[i][0], wanted)
            if not good and i in order:
                strategy = None

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
            others = {label for j, (_, theirs) in enumerate(form.operands) if j not in opened for label in theirs}
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
            looked = any(
                isinstance(self.rows.states[o][0], Shard) for j, (o, _) in enumerate(form.operands) if j not in opened
            )
            if looked and shape[row] >= TABLE * self.parts:
                return i, self.cuts.even(shape[row], row)
        return None

    def in_stream(self, form: OpSharding, position: int) -> Strategy | None:
        """Return the strategy of an op on the partial sum of a product that is reduced to shards, if activations
        between products are sharded."""
        operand = form.operands[position][0]
        if operand not in self.made:
            return None
        rows, shape = self.rows.states[operand][0], self.context.shape(operand)
        if self.role.rows or self.role.stream == "rows":
            return self.shards(form, position, rows) if isinstance(rows, Shard) else None
        if self.role.stream != "sequence":
            return None
        at = rows.dim if isinstance(rows, Shard) else -1
        sequence = self.before[CONTEXT].states[operand][0] if CONTEXT in self.before else None
        for dim in range(len(shape) - 1):
            if dim != at and shape[dim] >= self.parts and isinstance(self.context.expressions(operand)[dim], int):
                within = isinstance(sequence, Shard) and sequence.dim == dim
                return self.shards(form, position, sequence if within else self.cuts.even(shape[dim], dim))
        return None


__all__ = ["TensorWalk"]
