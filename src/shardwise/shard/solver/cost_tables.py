"""Tensor plans are solved as a problem: variables are the strategies of ops and the states of parameters, and what a
microbatch takes is a sum of tables.

Each op has a table over its strategies; each value has one over the strategies of the op that makes it and of those
that read it, for the moves between.  On several axes a choice is a strategy on each of them.
``variable_elimination.py`` finds the least sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from shardwise.ops.env import ROWS
from shardwise.shard.assignment import Assignment
from shardwise.shard.batch_walk import BatchWalk
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Placement, Strategy
from shardwise.shard.redistribute import Placements, Step
from shardwise.shard.sizes import Unfit
from shardwise.shard.solver.candidates import AxisOptions
from shardwise.shard.solver.cost_model import CostModel, MicrobatchCost, Value
from shardwise.shard.solver.flow import Flow, seconds
from shardwise.shard.solver.memory_limit import BYTES, EXACT, MOST, SECONDS, Costs, Objective, fewest
from shardwise.shard.solver.variable_elimination import LIMIT, CostFactor, Elimination, TooWide

DIRECT = 1 << 18
"""A table of up to this number of elements says what all readers of a value make of it; beyond that each reader has its
own."""
LINK = 1 << 22
"""The most elements of a table of one reader; a weight that very many ops read in ways of their own needs more."""

JointChoice = tuple[Any, ...]
"""The choice for an op is a :class:`Strategy` on each axis, and for a parameter a state on each."""


Made = tuple[Placements, frozenset[Step]]
"""A value's states, and the moves of it that have been made."""

Reading = tuple[int, Sequence[tuple[Placements, ...]]]
"""The variable of an op, and by its choices the states in which it needs a value."""


class Solved(NamedTuple):
    """This is the assignment of each axis, and the seconds and bytes that it is predicted to take; no plan within the
    limit of memory takes fewer seconds than ``bound``, where that is known."""

    assignments: dict[str, Assignment]
    seconds: MicrobatchCost
    bound: float | None = None

    @property
    def gap(self) -> float:
        """Return by what fraction the seconds may exceed the best plan's; 0 if it is the best, or nothing is known."""
        more = 0.0 if self.bound is None else self.seconds.total / self.bound - 1
        return more if more > EXACT else 0.0


@dataclass
class Problem:
    """These are variables with their choices, and tables over them of seconds, and of bytes as the imaginary part."""

    choices: list[Sequence[Any]] = field(default_factory=list)
    factors: list[CostFactor] = field(default_factory=list)

    def variable(self, choices: Sequence[Any]) -> int:
        self.choices.append(choices)
        return len(self.choices) - 1

    @property
    def sizes(self) -> list[int]:
        return [len(one) for one in self.choices]


class Solver:
    """This chooses for the axes of ``prices`` together, from what there is to choose on each; without ``limited``,
    bytes are left out."""

    def __init__(
        self, context: ShardingContext, prices: CostModel, choices: Mapping[str, AxisOptions],
        limited: bool = False, direct: int = DIRECT,
    ) -> None:  # fmt: skip
        self.context, self.forms, self.prices, self.choices = context, context.forms, prices, choices
        self.limited, self.direct = limited, direct
        self.flow = Flow(context)
        self.variables: dict[fx.Node, int] = {}
        self.tables: dict[Any, Any] = {}
        self.options: dict[fx.Node, Sequence[JointChoice]] = {}
        self.problem = Problem()
        self.build()

    def build(self) -> None:
        """Add variables and tables of ops and parameters, then tables of the values between them."""
        joint: dict[Any, Sequence[JointChoice]] = {}
        for node in self.context.normal.graph.nodes:
            axes = [self.choices[axis] for axis in self.prices.axes]
            if node in axes[0].states:
                variable = self.add(node, [one.states[node] for one in axes], joint)
                self.problem.factors.append(CostFactor((variable,), self.rest(node, self.options[node])))
            elif node in axes[0].strategies:
                variable = self.add(node, [one.strategies[node] for one in axes], joint)
                self.problem.factors.append(CostFactor((variable,), self.op_table(node, self.options[node])))
            elif node in self.forms:
                self.problem.factors.append(CostFactor((), np.array(self.op_cost(node, ()))))
        for node in self.flow.values:
            self.connect(node)

    def add(self, node: fx.Node, own: list[Sequence[Any]], joint: dict[Any, Sequence[JointChoice]]) -> int:
        form = self.forms.get(node)
        key = (node if form is None else self.prices.works.key(node), tuple(map(id, own)))
        if form is None or key not in joint:
            good = tuple(one for one in itertools.product(*own) if len(own) == 1 or self.together(node, form, one))
            joint[key] = good or ((("I",) if form is None else (form.whole("I"),)) * len(own),)
        self.options[node] = joint[key]
        self.variables[node] = self.problem.variable(joint[key])
        return self.variables[node]

    def together(self, node: fx.Node, form: OpSharding | None, choice: JointChoice) -> bool:
        """Return whether what is chosen on the axes fits."""
        rows, axes = self.choices[self.prices.axes[0]].rows, self.prices.axes
        if form is None:
            return self.prices.fits_captured(
                self.context.shape(node), {ROWS: rows.states[node][0], **dict(zip(axes, choice, strict=True))}
            )
        return self.prices.together(form, rows.strategies[node], dict(zip(axes, choice, strict=True)))

    def rest(self, node: fx.Node, options: Sequence[JointChoice]) -> Any:
        """Return the table of what a parameter costs where it rests."""
        key = (self.prices.value(node), bool(node.users), tuple(options))
        if key not in self.tables:
            self.tables[key] = np.array([self.rest_cost(node, own) for own in options])
        return self.tables[key]

    def rest_cost(self, node: fx.Node, states: Placements) -> complex:
        took = sum(map(self.prices.seconds, self.prices.once(node, states)))
        return complex(took, self.prices.resting(node, states) if self.limited else 0)

    def op_table(self, node: fx.Node, options: Sequence[JointChoice]) -> Any:
        key = (self.prices.works.key(node), id(options))
        if key not in self.tables:
            self.tables[key] = np.array([self.op_cost(node, one) for one in options])
        return self.tables[key]

    def op_cost(self, node: fx.Node, strategies: JointChoice) -> complex:
        form, prices = self.forms[node], self.prices
        took = prices.op(node, form, strategies) + sum(map(prices.seconds, prices.exchanges(form, strategies)))
        return complex(took, prices.kept(node, strategies) if self.limited else 0)

    def step(self, value: Value, step: Step) -> complex:
        """Return what a move costs."""
        return complex(self.prices.step(value, step), self.prices.copied(value, step) if self.limited else 0)

    # ---- values ------------------------------------------------------------------------------------------------------

    def connect(self, node: fx.Node) -> None:
        """Add tables for the moves of a value."""
        value, (maker, index) = self.prices.value(node), self.flow.maker(node)
        whole = ("I",) * len(self.prices.axes)
        fixed: set[Placements] = set()
        readers: dict[int, list[tuple[Placements, ...]]] = {}
        for reader in self.flow.readers(node):
            variable = self.variables.get(reader.node) if reader.node is not None else None
            if variable is None or reader.node is None:
                fixed.add((reader.goal,) * len(whole))
            else:
                readers[variable] = [
                    tuple(dict.fromkeys(tuple(s.operands[i] for s in one) for i in reader.positions))
                    for one in self.options[reader.node]
                ]
        if maker in self.variables:
            made = [self.state(one, index) for one in self.options[maker]]
            self.moves(value, (self.variables[maker],), made, sorted(fixed), list(readers.items()))
        elif value.grad:
            self.moves(value, (), [whole], sorted(fixed), list(readers.items()))
        else:
            self.slices(value, whole, readers)

    def slices(self, value: Value, whole: Placements, readers: Mapping[int, Sequence[tuple[Placements, ...]]]) -> None:
        """Forbid slices that do not fit of a value that is whole and has no gradient; the others are free."""
        for variable, needs in readers.items():
            legal = [self.prices.steps(value, whole, goals) is not None for goals in needs]
            if not all(legal):
                self.problem.factors.append(CostFactor((variable,), np.where(legal, 0.0, math.inf)))

    @staticmethod
    def state(choice: JointChoice, index: int) -> Placements:
        return tuple(one.results[index] if isinstance(one, Strategy) else one for one in choice)

    def moves(
        self, value: Value, first: tuple[int, ...], made: Sequence[Placements], fixed: Sequence[Placements],
        readers: Sequence[Reading],
    ) -> None:  # fmt: skip
        """Add one table over maker and readers; where that would be large, add a chain of tables over what has been
        made for the readers so far."""
        variables, needs = [v for v, _ in readers], [n for _, n in readers]
        states = list(dict.fromkeys(made))
        distinct = [list(dict.fromkeys(n)) for n in needs]
        key = (value, tuple(made), tuple(fixed), tuple(map(tuple, needs)), len(first))
        if len(made) * math.prod(map(len, needs)) <= self.direct or len(needs) < 2:
            if key not in self.tables:
                core = np.array(
                    [
                        self.moving(value, s, (*fixed, *itertools.chain(*wanted)))
                        for s in states
                        for wanted in itertools.product(*distinct)
                    ],
                    complex,
                ).reshape(len(states), *map(len, distinct))
                options: list[list[Any]] = [list(states), *distinct]
                at = [[own.index(one) for one in every] for own, every in zip(options, (made, *needs), strict=True)]
                self.tables[key] = core[np.ix_(*at)] if first else core[0][np.ix_(*at[1:])] if readers else core[0]
            self.problem.factors.append(CostFactor((*first, *variables), self.tables[key]))
            return
        self.chain(key, value, first, made, fixed, readers)

    def moving(self, value: Value, states: Placements, goals: Sequence[Placements]) -> complex:
        steps = self.prices.steps(value, states, dict.fromkeys(goals))
        return math.inf if steps is None else sum(self.step(value, step) for step in sorted(steps, key=repr))

    def chain(
        self,
        key: Any,
        value: Value,
        first: tuple[int, ...],
        made: Sequence[Placements],
        fixed: Sequence[Placements],
        readers: Sequence[Reading],
    ) -> None:
        """Add a variable between each reader and the next: the states of the value, and which of its moves that cost
        something have been made."""
        if key not in self.tables:
            self.tables[key] = self.links(value, made, fixed, [needs for _, needs in readers])
        start, links = self.tables[key]
        self.problem.factors.append(CostFactor(first, start if first else start[0]))
        variable = first[0] if first else self.problem.variable(made[:1])
        for (reader, _), table in zip(readers, links, strict=True):
            last = table is links[-1]
            following = () if last else (self.problem.variable(range(table.shape[2])),)
            self.problem.factors.append(CostFactor((variable, reader, *following), table))
            if not last:
                (variable,) = following

    def links(
        self,
        value: Value,
        made: Sequence[Placements],
        fixed: Sequence[Placements],
        needs: Sequence[Sequence[tuple[Placements, ...]]],
    ) -> tuple[Costs, list[Costs]]:
        """Return the cost of what fixed readers need, and for each other reader a table over (before, its choice,
        after); :class:`TooWide` is raised where many readers make one with more than ``LINK`` elements."""
        start = np.array([self.moving(value, states, fixed) for states in made], complex)
        before: list[Made] = [(states, self.costly(value, states, fixed)) for states in made]
        tables: list[Costs] = []
        for number, need in enumerate(needs):
            later = {
                s
                for one in needs[number + 1 :]
                for n in set(one)
                for states in set(made)
                for s in self.costly(value, states, n)
            }
            distinct, known = list(dict.fromkeys(need)), list(dict.fromkeys(before))
            after: dict[Made, int] = {}
            found = []  # (before, need, after, cost)
            for i, (states, there) in enumerate(known):
                for j, goals in enumerate(distinct):
                    if self.prices.steps(value, states, goals) is not None:
                        new = self.costly(value, states, goals) - there
                        k = after.setdefault((states, (there | new) & later), len(after))
                        found.append((i, j, k, sum(self.step(value, s) for s in sorted(new, key=repr))))
            if (size := len(before) * len(need) * len(after)) > LINK:
                raise TooWide(f"a value with {len(needs)} readers has a table of {size} elements; limit: {LINK}")
            table = np.full((len(known), len(distinct), len(after)), math.inf, complex)
            for i, j, k, cost in found:
                table[i, j, k] = cost
            rows, columns = ([own.index(one) for one in every] for own, every in ((known, before), (distinct, need)))
            table = table[np.ix_(rows, columns)]
            tables.append(table if number < len(needs) - 1 else table.min(-1))
            before = list(after)
        return start, tables

    def costly(self, value: Value, states: Placements, goals: Sequence[Placements]) -> frozenset[Step]:
        steps = self.prices.steps(value, states, goals)
        return frozenset(s for s in steps or () if self.step(value, s))

    # ---- the answer --------------------------------------------------------------------------------------------------

    def least(self, weights: Objective = SECONDS, limit: int = LIMIT) -> Solved:
        """Return the plan that costs least; ``limit`` is the most elements of a table."""
        best = Elimination(self.problem.sizes, weights.factors(self.problem.factors), limit).least()
        if math.isinf(best.total):
            raise Unfit("of what there is to choose on several axes nothing goes together")
        return self.solved(best.values)

    def within(self, limit: int, known: Solved, price: Objective, most: Sequence[int] = MOST) -> Solved:
        """Return the fastest plan of at most ``limit`` bytes; ``known`` is best at some ``price`` of a byte."""
        prices = (price, SECONDS, BYTES)
        found = fewest(self.problem.sizes, self.problem.factors, limit, known.seconds.total, prices, most)
        return (known if found.values is None else self.solved(found.values))._replace(bound=found.bound)

    def solved(self, values: Sequence[int]) -> Solved:
        found = self.assignments(values)
        return Solved(found, seconds(self.prices, self.flow, found))

    def assignments(self, values: Sequence[int]) -> dict[str, Assignment]:
        """Return the assignment of each axis for the values of the variables."""
        chosen = {node: self.options[node][values[v]] for node, v in self.variables.items()}
        return {
            axis: _ChosenWalk(self.context, {node: choice[a] for node, choice in chosen.items()}).run()
            for a, axis in enumerate(self.prices.axes)
        }


class _ChosenWalk(BatchWalk):
    """This walk takes on one axis what has been ``chosen`` for an op or a parameter; everything else is whole."""

    def __init__(self, context: ShardingContext, chosen: Mapping[fx.Node, Any]) -> None:
        super().__init__(context)
        self.chosen = chosen

    def initial_state(self, node: fx.Node) -> Placement:
        state: Placement = self.chosen.get(node, "I")
        return state

    def choose(self, form: OpSharding) -> Strategy:
        return self.chosen.get(form.node) or form.whole("I")


__all__ = ["Solved", "Solver"]
