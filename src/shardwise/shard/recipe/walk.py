"""A recipe says what the ops of a model are on an axis of tensor parallelism: which parameters are sharded, and where
ranks communicate.

``1d`` (Shoeybi et al., arXiv 1909.08053, section 3): a product whose input is whole has its weight split by columns,
and one whose input is sharded along what it sums over has it split by rows; a table is split by rows where indices come
from the batch or are positions, a convolution of groups is split by groups, and a cross-entropy takes scores that are
split by classes.  ``lookahead.py`` says where these turns
would communicate more than they have to.  For a transformer layer with b·s·h activations that is 8·b·s·h·(t-1)/t
elements per rank and microbatch, forward and backward, over t ranks.  ``1d-sp`` (Korthikanti et al., arXiv 2205.05198,
section 4.2.2): what comes between the products is sharded along the sequence; each all-reduce becomes a reduce-scatter
and an all-gather, of the same total volume.  The others, and their volumes, are in ``parallel/tensor.py``.

Nothing here knows models: what a dim is made of (heads, parts of a fused projection) follows from the views and splits
that come after.
"""

from __future__ import annotations

from torch import fx

from shardwise.core.fields import has_rows
from shardwise.core.tensor_options import CONTEXT
from shardwise.shard.assignment import place_of
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy
from shardwise.shard.recipe.weights import WeightWalk, shares_groups


class TensorWalk(WeightWalk):
    """This is the walk for one axis."""

    def initial_state(self, node: fx.Node) -> Placement:
        name = self.context.parameters.get(node)
        if name is None or self.inert:
            field = self.context.captured.fields.get(node.name)
            return Shard(0) if self.role.rows and field is not None and has_rows(field) else "I"
        if self.context.tensor.layouts is not None:
            return place_of(self.context.tensor.layouts.get(name), self.axis, self.context.tensor.axes)
        return self.leave_open(node)

    # ---- ops ---------------------------------------------------------------------------------------------------------

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
        elif self.alternates and isinstance(strategy.results[0], Shard):
            begun = shares_groups(form) and not isinstance(self.state(form.operands[0][0]), Shard)
            if (product and self.ahead.is_stream(form.node)) or (begun and self.ahead.widens(form.node)):
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
