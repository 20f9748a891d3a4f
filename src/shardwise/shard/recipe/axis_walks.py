"""The walk of each axis: those of context and expert parallelism have rules of their own, and the others go by the
recipe.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

from torch import fx

from shardwise.core.errors import ConfigError
from shardwise.core.fields import has_rows
from shardwise.core.mesh import sub_axes
from shardwise.core.tensor_options import CONTEXT, EXPERTS
from shardwise.graph.experts import Experts
from shardwise.parallel.tensor import Role, role
from shardwise.shard.assignment import Assignment, place_of
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Shard, Strategy
from shardwise.shard.recipe.walk import TensorWalk


class ContextWalk(TensorWalk):
    """This is the walk for the axis of context parallelism: fields come sharded along the sequence, which stays so
    as long as ops take it, and parameters are whole.

    A sequence of no more elements than ranks is whole on each: a cut into as many pieces as ranks would stand for
    pieces in their order (:func:`~shardwise.shard.sizes.factored`), and the sequence is cut in another one.
    """

    def __init__(self, context: ShardingContext, axis: str, rows: Assignment, before: Mapping[str, Assignment]) -> None:
        super().__init__(context, axis, rows, before, Role(stream="context"))

    def initial_state(self, node: fx.Node) -> Placement:
        field = self.context.captured.fields.get(node.name)
        shape = self.context.shape(node)
        along = field is not None and len(shape) > 1 and shape[1] > self.parts and self.fits(node, Shard(1))
        return Shard(1) if along else "I"

    def note_shared_heads(self, form: OpSharding, states: list[Placement]) -> None:
        """No parameter is cut."""


class ExpertWalk(TensorWalk):
    """This is the walk for the axis of expert parallelism: fields come sharded by rows, which stay so, and parameters
    are whole, but those of experts are sharded by expert."""

    def __init__(self, context: ShardingContext, axis: str, rows: Assignment, before: Mapping[str, Assignment]) -> None:
        super().__init__(context, axis, rows, before, role(context.tensor.recipe, axis))
        self.of_experts = experts_of(context)
        if not self.of_experts:
            raise ConfigError.on("ep", f"{self.parts} is not legal: no layer of experts was found in the model", "1")
        if self.parts > (fewest := fewest_experts(context, self.of_experts)):
            raise ConfigError.on("ep", f"{self.parts} is not legal for {fewest} experts", f"1 to {fewest}")

    def initial_state(self, node: fx.Node) -> Placement:
        if node in self.context.parameters:
            return self.by_number(node) if node in self.of_experts else "I"
        field = self.context.captured.fields.get(node.name)
        return Shard(0) if field is not None and has_rows(field) else "I"

    def by_number(self, node: fx.Node) -> Shard:
        """Return where experts are cut: as in another trace, as they come, or in equal pieces where other axes cut them
        so."""
        size, layouts = self.context.shape(node)[0], self.context.tensor.layouts
        known = place_of((layouts or {}).get(self.context.parameters[node]), self.axis, self.context.tensor.axes)
        for place in (known, Shard(0), self.cuts.even(size, 0)):
            if isinstance(place, Shard) and self.fits(node, place):
                return place
        wrong = f"{self.parts} is not legal beside other axes that cut {size} experts into equal pieces"
        raise ConfigError.on("ep", wrong, "1, or a number that makes equal pieces of theirs")

    def choose(self, form: OpSharding) -> Strategy:
        strategy = form.divided([self.state(o) for o, _ in form.operands]) if form.divided is not None else None
        if strategy is not None and self.together(form, strategy):
            return strategy
        return super().choose(form)

    def note_shared_heads(self, form: OpSharding, states: list[Placement]) -> None:
        """No product is cut."""


def experts_of(context: ShardingContext) -> set[fx.Node]:
    """Return the parameters whose first dim is that of experts."""
    found: set[fx.Node] = set()
    for node in context.normal.graph.nodes:
        if isinstance(node.target, Experts):
            weights = node.args[1 + len(node.target.slots) :]
            for weight in itertools.compress(weights, node.target.of_each):
                while weight.op == "call_function" and len(weight.all_input_nodes) == 1:
                    weight = weight.all_input_nodes[0]
                if weight in context.parameters and context.shape(weight)[:1] == (node.target.experts,):
                    found.add(weight)
    return found


def fewest_experts(context: ShardingContext, weights: Iterable[fx.Node]) -> int:
    """Return the number of experts of the layer that has fewest."""
    return min(context.shape(node)[0] for node in weights)


def check_by_number(context: ShardingContext) -> None:
    """Raise :class:`ConfigError` if ranks of tensor parallelism cannot have at least one expert each."""
    sizes = context.tensor.axes
    if context.tensor.experts != "by-number" or not (own := [axis for axis in sizes if axis not in WALKS]):
        return
    of_experts = experts_of(context)
    if not of_experts:
        wrong = '"by-number" is not legal: no layer of experts was found in the model'
        raise ConfigError.on("experts", wrong, '"inside"')
    ranks, outer = math.prod(sizes[axis] for axis in own), sizes.get(EXPERTS, 1)
    if ranks * outer > (fewest := fewest_experts(context, of_experts)):
        beside = f" over ep = {outer}" if outer > 1 else ""
        wrong = f'{ranks} is not legal with experts = "by-number" for {fewest} experts{beside}'
        raise ConfigError.on("tp", wrong, f'1 to {max(fewest // outer, 1)}, or experts = "inside"')


WALKS: Mapping[str, type[ContextWalk] | type[ExpertWalk]] = {CONTEXT: ContextWalk, EXPERTS: ExpertWalk}
"""The walks of axes that are those of no recipe."""


def recipe(context: ShardingContext, rows: Assignment) -> tuple[dict[str, Assignment], dict[str, int] | None]:
    """Return the assignment of each axis by the recipe, and None; if an axis has too few heads for its ranks, return
    all axes with that one as two sub-axes instead of None."""
    check_by_number(context)
    found: dict[str, Assignment] = {}
    roles = {axis: role(context.tensor.recipe, axis) for axis in context.tensor.axes}
    # Axes whose weights rest within the pieces of others come last.
    for axis, known in sorted(roles.items(), key=lambda one: one[1] is not None and one[1].at_use):
        if axis in WALKS:
            walk: TensorWalk = WALKS[axis](context, axis, rows, found)
        else:
            walk = TensorWalk(context, axis, rows, found, known)
        found[axis] = walk.run()
        if walk.few > 1:
            inner = walk.parts // walk.few
            both = dict(zip(sub_axes(axis, inner), (walk.few, inner), strict=True))
            return found, {
                name: n
                for a, size in context.tensor.axes.items()
                for name, n in (both if a == axis else {a: size}).items()
            }
    return found, None


__all__ = ["WALKS", "recipe"]
