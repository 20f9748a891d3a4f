"""``tensor_plan = "auto"`` chooses the strategy of each op, and where each parameter rests, so that the predicted step
is shortest.

On one axis the answer is exact, also within a limit of memory.  Several are solved in turn and then together, from what
was chosen on the way; there a limit only gives bytes a price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.core.rates import Link, SolverObjective, rates
from shardwise.ops.env import ROWS
from shardwise.parallel.tensor import role
from shardwise.shard.assignment import Assignment
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import Placement, Shard, Strategy
from shardwise.shard.recipe.axis_walks import recipe
from shardwise.shard.sizes import Unfit
from shardwise.shard.solver.candidates import AxisOptions, Candidates
from shardwise.shard.solver.cost_model import CostModel, MicrobatchCost
from shardwise.shard.solver.cost_tables import Solved, Solver
from shardwise.shard.solver.decisions import check_taken, take_up
from shardwise.shard.solver.flow import Flow, seconds
from shardwise.shard.solver.memory_limit import BYTES, EXACT, SECONDS, Objective
from shardwise.shard.solver.variable_elimination import LIMIT, TooWide

PARTS = 16
"""Where the choices of all ops of an axis are too many together, the ops are divided into at most this number of parts,
whose choices are free one after the other."""
NOT_EXACT = (
    "tensor_plan: too many ops depend on each other for the fastest of all plans to be found; of those that "
    "were looked at this is the fastest"
)


def solve(context: ShardingContext, batch: Assignment) -> Solved:
    """Return the assignments of all axes under which a microbatch takes least time within the machine's memory; what
    was decided before is taken up.  The plan is the best that was found if there are several axes, or if ops depend on
    each other too closely for exact elimination, as where many steps read the same weights."""
    prices = priced(context, batch)
    choices = {axis: Candidates(context, axis, prices) for axis in prices.axes}
    if (decided := context.tensor.decided) is not None:
        found = Solver(context, prices, take_up(decided, context, choices)).least()
        check_taken(decided, context, found.assignments)
        return found
    limit = None if context.tensor.machine is None else context.tensor.machine.memory
    if len(choices) == 1:
        try:
            solver = Solver(context, prices, choices, limited=True)
            return limited(context, limit, partial(least, solver), lambda limit: best_within(solver, limit))
        except TooWide:
            context.notes[NOT_EXACT] = None

    def find(weights: Objective) -> Solved:
        return _Several(context, prices, choices, weights).least()

    return limited(context, limit, find, lambda limit: within(find, limit)[0])


def limited(
    context: ShardingContext, limit: int | None, find: Callable[[Objective], Solved], fitting: Callable[[int], Solved]
) -> Solved:  # fmt: skip
    """Return what ``find`` gives without a ``limit`` of bytes, or what ``fitting`` gives within it."""
    if limit is None:
        return find(SECONDS)
    try:
        found = fitting(limit)
    except TooFew as error:
        if context.tensor.layouts is None:
            raise
        found = fitting(error.least)  # parameters lie as in another trace, whose plan fits
    if found.gap:
        note = (
            f"tensor_plan: a microbatch takes at most {found.gap:.2%} longer than the fastest plan of {limit} "
            "bytes "
            "would"
        )
        context.notes[note] = None
    return found


def least(solver: Solver, weights: Objective) -> Solved:
    """Return the least plan; if several are equally fast, it is the one of fewest bytes."""
    found = solver.least(weights)
    if weights != SECONDS or not found.seconds.nbytes:
        return found
    return solver.least(Objective(1.0, EXACT * found.seconds.total / found.seconds.nbytes))


class TooFew(ConfigError):
    """No plan found takes as few bytes; ``least`` is how many the smallest of them takes."""

    def __init__(self, limit: int, least: int) -> None:
        super().__init__(
            f"tensor_bytes: {limit} is not legal; legal: {least} or more, which the smallest plan found takes. It "
            "follows from train.memory_gib, or from what the device has: more of that, or more ranks over parallel.tp"
        )
        self.least = least


def best_within(solver: Solver, limit: int) -> Solved:
    """Return the fastest plan of ``limit`` bytes or less; :class:`TooFew` is raised where there is none."""
    found, price = within(partial(least, solver), limit)
    return found._replace(bound=found.seconds.total) if price == SECONDS else solver.within(limit, found, price)


def within(find: Callable[[Objective], Solved], limit: int) -> tuple[Solved, Objective]:
    """Return the fastest plan of ``limit`` bytes or less among those that are best for some price of a byte (Everett
    1963), and that price; no plan of as many bytes or fewer is faster.  :class:`TooFew` is raised where there is none.
    """
    fast = find(SECONDS)
    if fast.seconds.nbytes <= limit:
        return fast, SECONDS
    small = find(BYTES)
    if small.seconds.nbytes > limit:
        raise TooFew(limit, small.seconds.nbytes)
    while True:
        # At this price both cost the same, so what is cheaper lies between them.
        weights = Objective(
            1.0, (small.seconds.total - fast.seconds.total) / (fast.seconds.nbytes - small.seconds.nbytes)
        )
        found = find(weights)
        if cost(weights, found) >= cost(weights, fast) * (1 - EXACT):
            return small, weights
        if found.seconds.nbytes <= limit:
            small = found
        else:
            fast = found


def cost(weights: Objective, one: Solved) -> float:
    return weights.seconds * one.seconds.total + weights.nbytes * one.seconds.nbytes


def priced(context: ShardingContext, batch: Assignment) -> CostModel:
    """Return the prices of the machine that the plan is for, else those of one row on a device of the kind."""
    machine = context.tensor.machine or SolverObjective(
        rates(Backend.of(context.device).kind, context.captured.precision), context.captured.rows or 1
    )
    return CostModel(
        context,
        batch,
        machine.rates,
        machine.rows,
        machine.kind or Backend.of(context.device).kind,
        beside=machine.state_bytes_per_element,
        live=machine.live_microbatches,
        summed=machine.summed,
    )


def predicted(context: ShardingContext, assignments: Mapping[str, Assignment]) -> MicrobatchCost:
    """Return the predicted seconds of a microbatch under given assignments."""
    return seconds(priced(context, assignments[ROWS]), Flow(context), assignments)


class _Several:
    """This solves axes whose choices together are too many: each in turn, from the best of a few plans; then all
    together, from what was chosen on the way."""

    def __init__(
        self,
        context: ShardingContext,
        prices: CostModel,
        choices: Mapping[str, Candidates],
        weights: Objective,
    ) -> None:
        self.context, self.forms, self.prices, self.choices, self.weights = (
            context,
            context.forms,
            prices,
            choices,
            weights,
        )
        self.limited = weights.nbytes > 0
        self.seen: list[dict[str, Assignment]] = []

    def least(self) -> Solved:
        starts = [found for start in self.starts() if (found := self.tried([start])) is not None]
        best = self.descended(min(starts, key=self.cost))
        joint = self.tried(self.seen)
        if joint is None:
            return best
        return self.descended(joint) if self.cost(joint) < self.cost(best) else best

    def cost(self, one: Solved) -> float:
        return cost(self.weights, one)

    def tried(self, several: Sequence[Mapping[str, Assignment]]) -> Solved | None:
        """Return the best of what several plans choose; None where that does not go together, or is too much."""
        try:
            return self.solved({axis: one.only([plan[axis] for plan in several]) for axis, one in self.choices.items()})
        except (TooWide, Unfit):
            return None

    def solved(self, chosen: Mapping[str, AxisOptions], limit: int = LIMIT) -> Solved:
        found = Solver(self.context, self.prices, chosen, self.limited).least(self.weights, limit)
        self.seen.append(found.assignments)
        return found

    def starts(self) -> Iterator[Mapping[str, Assignment]]:
        """Yield plans to start from: everything whole, the recipe of the mesh, and the best on one axis of all ranks,
        over the slowest link."""
        yield {axis: Assignment() for axis in self.choices}
        if all(role(self.context.tensor.recipe, axis) is not None for axis in self.choices):
            yield recipe(self.context, self.prices.batch)[0]
        if self.context.tensor.layouts is not None:
            return
        found = self.together() if len(self.choices) > 1 else None
        if found is not None:
            yield {axis: self.shared(found, axis) for axis in self.choices}

    def together(self) -> Assignment | None:
        """Return what is best on one axis of all ranks, or None if that cannot be told."""
        own, name = self.prices.rates, "_".join(self.choices)
        links = [own.links.get(axis, own.link) for axis in self.choices]
        slow = Link(max(link.latency for link in links), min(link.bandwidth for link in links))
        one = CostModel(
            self.context,
            self.prices.batch,
            replace(own, link=slow, links={}),
            self.prices.rows,
            self.prices.kind,
            {name: math.prod(self.prices.parts)},
            beside=self.prices.state_bytes,
            live=self.prices.live,
            summed=self.prices.summed,
        )
        try:
            solver = Solver(self.context, one, {name: Candidates(self.context, name, one)}, self.limited)
            return solver.least(self.weights).assignments[name]
        except TooWide:
            return None

    def shared(self, found: Assignment, axis: str) -> Assignment:
        """Return what an axis does where several do together what one did: equal pieces of equal pieces."""
        parts, every = self.prices.ranks_of[axis], math.prod(self.prices.parts)

        def own(state: Placement, shape: Sequence[int]) -> Placement:
            if not isinstance(state, Shard) or shape[state.dim] != state.pre * state.post * every:
                return state
            return state._replace(post=shape[state.dim] // (state.pre * parts))

        out = Assignment({n: tuple(map(own, states, self.context.shapes(n))) for n, states in found.states.items()})
        for node, strategy in found.strategies.items():
            form = self.forms[node]
            assert form is not None
            operands = tuple(
                own(s, self.context.shape(o)) for s, (o, _) in zip(strategy.operands, form.operands, strict=True)
            )
            out.strategies[node] = Strategy(operands, out.states[node])
        return out

    def descended(self, best: Solved) -> Solved:
        """Solve each axis in turn, the others held, until none finds anything better."""
        since = 0
        for axis in itertools.cycle(self.choices):
            found = self.freed(best, axis, list(self.choices[axis].strategies))
            since += 1
            if self.cost(found) < self.cost(best) * (1 - EXACT):
                best, since = found, 1
            if since >= len(self.choices):
                break
        return best

    def freed(self, best: Solved, axis: str, nodes: Sequence[fx.Node]) -> Solved:
        """Return the best with the choices of ``nodes`` on an axis free and all others held; where that is too much,
        free the nodes in halves."""
        chosen = {a: one.only([best.assignments[a]]) for a, one in self.choices.items()}
        every = self.choices[axis]
        chosen[axis] = replace(
            chosen[axis],
            strategies=chosen[axis].strategies | {node: every.strategies[node] for node in nodes},
            states=every.states,
        )
        whole = len(nodes) == len(every.strategies)
        try:
            found = self.solved(chosen, LIMIT if whole else LIMIT // 16)
        except TooWide:
            self.context.notes[NOT_EXACT] = None
            if len(nodes) * PARTS > len(every.strategies):
                half = len(nodes) // 2
                best = self.freed(self.freed(best, axis, nodes[:half]), axis, nodes[half:])
            return best
        return found if self.cost(found) < self.cost(best) else best


__all__ = ["TooFew", "predicted", "solve", "within"]
