"""A recipe looks ahead at what reads a product's result: products that add to it, or a cross-entropy.

A recipe walks forward, and one product by columns and the next by rows is the least that a chain of products can
communicate.  It is not the least where the result that is cut by columns is a *stream*: products of one layer after the
other read it, and each adds its result to it.  A transformer that begins with a product instead of a table (ViT's
patches) has one, and so has what modulates another's stream (DiT).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import fx

from shardwise.graph.aten_ops import Fact, has
from shardwise.graph.schema import is_tensor
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding


@dataclass
class Reach:
    """This is what a value reaches through ops that are no products: those ops, and the products of a weight that read
    it there."""

    ops: dict[fx.Node, None] = field(default_factory=dict)
    products: dict[fx.Node, None] = field(default_factory=dict)


class Lookahead:
    """This looks at the ops after a product, before states are chosen for them."""

    def __init__(self, context: ShardingContext) -> None:
        self.context, self.forms = context, context.forms

    def is_stream(self, product: fx.Node) -> bool:
        """Return whether products that read the result add to it, and more is summed if it is cut by columns than if it
        is whole.

        If it is cut, the results of the products that read it are partial sums, which are reduced; if it is whole, it
        is gathered, and what is added to it is reduced.
        """
        reach = self.reach(product)
        spared = 2 * sum(map(self.size, reach.products)) - 2 * self.size(product)
        if spared <= 0:
            return False
        added = self.added(reach)
        return bool(added) and spared > 2 * sum(map(self.size, added))

    def widens(self, node: fx.Node) -> bool:
        """Return whether products make of a value at least as much as it has: if it is cut, these are reduced; if it is
        whole, it is gathered."""
        return sum(map(self.size, self.reach(node).products)) >= self.size(node)

    def shrinks(self, first: OpSharding, position: int) -> bool:
        """Return whether a partial sum, an operand of an op, becomes smaller there or behind ops that nothing else
        reads, so that less is summed there; gradients of what it is multiplied by are partial sums then.

        A token's experts are added up behind their layer, each weighed.
        """
        node = partial = first.operands[position][0]
        form: OpSharding | None = first
        beside = 0
        while form is not None and len(node.users) == 1:
            others = [o for o, _ in form.operands if o is not node]
            if not form.keeps([i for i, (o, _) in enumerate(form.operands) if o is node]):
                return False
            if others and form.linear == "add":
                return False
            beside += sum(self.size(o) for o in others if self.context.carrying[o])
            node = form.node
            if self.size(node) + beside < self.size(partial):
                return True
            form = self.forms.get(next(iter(node.users), node))
        return False

    def is_scores(self, product: fx.Node) -> bool:
        """Return whether the result reaches a cross-entropy over classes."""
        return any(has(node, Fact.CLASS_LOSS) for node in self.reach(product).ops)

    def size(self, node: fx.Node) -> int:
        """Return the number of elements of an op's results."""
        return sum(map(math.prod, self.context.shapes(node)))

    def multiplies(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands that an op sums over together with others; one of several results has no form."""
        form = self.forms.get(node)
        return [] if form is None else [o for i, (o, _) in enumerate(form.operands) if form.contracts(i)]

    def weighted(self, node: fx.Node) -> bool:
        """Return whether an op multiplies by a weight."""
        return any(map(self.context.learned, self.multiplies(node)))

    def reach(self, product: fx.Node) -> Reach:
        found, todo = Reach({product: None}), [product]
        while todo:
            for user in todo.pop().users:
                if user in found.ops or not is_tensor(user) or self.forms.get(user, ...) is None:
                    continue  # an op without a rule takes whole operands
                if self.weighted(user):
                    found.products[user] = None
                elif not self.multiplies(user):
                    found.ops[user] = None
                    todo.append(user)
        return found

    def added(self, reach: Reach) -> dict[fx.Node, None]:
        """Return the products whose results join what is reached, and that come after products that read it."""
        after = set(reach.products)
        for node in self.context.normal.graph.nodes:
            if any(n in after for n in node.all_input_nodes):
                after.add(node)
        found: dict[fx.Node, None] = {}
        seen = set(reach.ops)
        todo = [o for node in reach.ops for o in node.all_input_nodes]
        while todo:
            node = todo.pop()
            if node in seen or node not in after:
                continue
            seen.add(node)
            if self.weighted(node):
                found[node] = None
            else:
                todo += node.all_input_nodes
        return found


__all__ = ["Lookahead"]
