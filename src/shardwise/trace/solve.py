"""``tensor_plan = "auto"``: the strategy of each op, and where each parameter rests, of which the predicted step is shortest.

The seconds of a microbatch are a sum of tables: of each op, over its strategies; of each value, over the strategies of the op that makes it and of
those that read it, for the moves between.  ``eliminate.py`` finds the least sum.  On several axes a choice is a strategy on each of them; where that makes tables
too large, one axis after the other is solved with the rest held, until none finds anything better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import fx

from shardwise.core.rates import Machine, rates
from shardwise.trace.assign import Assignment
from shardwise.trace.choices import Choices, learned
from shardwise.trace.eliminate import Factor, TooWide, least
from shardwise.trace.forms import Form, State, Strategy
from shardwise.trace.price import Prices, Seconds, States, Talk, Value
from shardwise.trace.schema import is_tensor

if TYPE_CHECKING:
    from shardwise.trace.sharding import Propagation

DIRECT = 1 << 18
"""Elements of a table up to which one says what all readers of a value make of it; beyond that there is one for each reader."""

Choice = tuple[Any, ...]
"""Of an op a :class:`Strategy` on each axis, of a parameter a state."""


class Reader(NamedTuple):
    """What reads a value: an op, at some of its operands; or, without one, what wants it in ``goal`` on every axis."""

    node: fx.Node | None
    positions: tuple[int, ...] = ()
    goal: str = "I"


class Flow:
    """Who makes and who reads the tensors of a captured graph."""

    def __init__(self, p: Propagation, forms: Mapping[fx.Node, Form | None]) -> None:
        self.p, self.forms = p, forms
        self.values = [n for n in p.normal.graph.nodes if is_tensor(n) and not isinstance(n.meta["val"], tuple | list)]

    def maker(self, value: fx.Node) -> tuple[fx.Node, int]:
        """The placeholder or op that makes a value, and as which of its results."""
        picked: Any = value.args if value.op == "call_function" and value not in self.forms else (value, 0)
        maker, index = picked
        return maker, index

    def readers(self, value: fx.Node) -> Iterator[Reader]:
        for user in value.users:
            form = self.forms.get(user)
            if user.op == "output":
                outputs: Any = user.args[0]
                loss, *updates = outputs
                yield from [Reader(None, (), "P")] * (value is loss) + [Reader(None)] * (value in updates)
            elif form is not None:
                yield Reader(user, tuple(i for i, (o, _) in enumerate(form.operands) if o is value))
            elif is_tensor(user):
                yield Reader(None)


def seconds(prices: Prices, flow: Flow, found: Mapping[str, Assignment]) -> Seconds:
    """What a microbatch takes under assignments, chosen by whomever."""
    axes = [found[axis] for axis in prices.axes]
    computing, talks = 0.0, list[Talk]()
    for node, form in flow.forms.items():
        strategies = [one.strategies[node] for one in axes if node in one.strategies]
        computing += prices.op(node, form, strategies)
        talks += prices.exchanges(node, form, strategies)
    for node in flow.values:
        value, states = prices.value(node), tuple(one.states[node][0] for one in axes)
        goals = {
            tuple(one.strategies[r.node].operands[i] for one in axes) if r.node is not None else (r.goal,) * len(axes)
            for r in flow.readers(node)
            for i in (r.positions if r.node is not None else (0,))
        }
        steps = prices.steps(value, states, goals)
        assert steps is not None, (node, states, goals)
        talks += [talk for step in sorted(steps, key=repr) for talk in prices.talks(value, step)]
    return Seconds(computing, sum(map(prices.seconds, talks)), tuple(talks))


@dataclass
class Problem:
    """Variables with their choices, and tables over them."""

    choices: list[Sequence[Any]] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)

    def variable(self, choices: Sequence[Any]) -> int:
        self.choices.append(choices)
        return len(self.choices) - 1

    @property
    def sizes(self) -> list[int]:
        return [len(one) for one in self.choices]


class Solver:
    """For the axes of ``prices`` together; ``held`` are the assignments of others, which stay."""

    def __init__(
        self, p: Propagation, forms: Mapping[fx.Node, Form | None], prices: Prices, choices: Mapping[str, Choices]
    ) -> None:
        self.p, self.forms, self.prices, self.choices = p, forms, prices, choices
        self.flow = Flow(p, forms)
        self.learned = learned(p)
        self.problem = Problem()
        self.variables: dict[fx.Node, int] = {}
        self.tables: dict[Any, Any] = {}
        self.options: dict[fx.Node, Sequence[Choice]] = {}

    def build(self) -> Problem:
        """Ops and parameters, then the values between them."""
        joint: dict[Any, Sequence[Choice]] = {}
        for node in self.p.normal.graph.nodes:
            axes = [self.choices[axis] for axis in self.prices.axes]
            if node in axes[0].parameters:
                self.add(node, [one.states[node] for one in axes], joint)
            elif node in axes[0].strategies:
                variable = self.add(node, [one.strategies[node] for one in axes], joint)
                self.problem.factors.append(Factor((variable,), self.op_table(node, self.options[node])))
            elif node in self.forms:
                self.problem.factors.append(Factor((), np.array(self.prices.op(node, self.forms[node], ()))))
        for node in self.flow.values:
            self.connect(node)
        return self.problem

    def add(self, node: fx.Node, own: list[Sequence[Any]], joint: dict[Any, Sequence[Choice]]) -> int:
        form = self.forms.get(node)
        key = (node if form is None else self.prices.key(node), tuple(map(id, own)))
        if form is None or key not in joint:
            joint[key] = tuple(one for one in itertools.product(*own) if len(own) == 1 or self.together(node, form, one))
        self.options[node] = joint[key]
        self.variables[node] = self.problem.variable(joint[key])
        return self.variables[node]

    def together(self, node: fx.Node, form: Form | None, choice: Choice) -> bool:
        """Whether what is chosen on the axes fits."""
        rows = self.choices[self.prices.axes[0]].rows
        if form is None:
            return self.fits(self.p.shape(node), choice, rows.states[node][0])
        return all(
            self.fits(self.p.shape(o), [s.operands[i] for s in choice], rows.strategies[node].operands[i])
            for i, (o, _) in enumerate(form.operands)
        ) and all(
            self.fits(shape, [s.results[i] for s in choice], rows.strategies[node].results[i])
            for i, shape in enumerate(self.p.shapes(node))
        )

    def fits(self, shape: Sequence[int], states: Sequence[State], rows: State) -> bool:
        return self.prices.beside(shape, list(zip(self.prices.axes, states, strict=True)), rows)

    def op_table(self, node: fx.Node, options: Sequence[Choice]) -> Any:
        key = (self.prices.key(node), id(options))
        if key not in self.tables:
            form, prices = self.forms[node], self.prices
            self.tables[key] = np.array(
                [prices.op(node, form, one) + sum(map(prices.seconds, prices.exchanges(node, form, one))) for one in options]
            )
        return self.tables[key]

    # ---- values --------------------------------------------------------------------------------------------------------

    def connect(self, node: fx.Node) -> None:
        """Tables for the moves of a value."""
        value, (maker, index) = self.prices.value(node), self.flow.maker(node)
        whole = ("I",) * len(self.prices.axes)
        if maker in self.variables:
            made: Sequence[States] = [self.state(one, index) for one in self.options[maker]]
        elif value.grad:
            made = [whole]
        else:
            return  # slices of what is whole and has no gradient are free
        fixed: set[States] = set()
        readers: dict[int, list[tuple[States, ...]]] = {}
        for reader in self.flow.readers(node):
            variable = self.variables.get(reader.node) if reader.node is not None else None
            if variable is None or reader.node is None:
                fixed.add((reader.goal,) * len(whole))
            else:
                readers[variable] = [
                    tuple(dict.fromkeys(tuple(s.operands[i] for s in one) for i in reader.positions))
                    for one in self.options[reader.node]
                ]
        first = (self.variables[maker],) if maker in self.variables else ()
        self.moves(value, first, made, sorted(fixed), list(readers.items()))

    @staticmethod
    def state(choice: Choice, index: int) -> States:
        return tuple(one.results[index] if isinstance(one, Strategy) else one for one in choice)

    def moves(
        self, value: Value, first: tuple[int, ...], made: Sequence[States], fixed: Sequence[States],
        readers: Sequence[tuple[int, Sequence[tuple[States, ...]]]],
    ) -> None:  # fmt: skip
        """One table over maker and readers; where that would be large, a chain of tables over what has been made for the readers so far."""
        variables, needs = [v for v, _ in readers], [n for _, n in readers]
        states = list(dict.fromkeys(made))
        distinct = [list(dict.fromkeys(n)) for n in needs]
        key = (value, tuple(made), tuple(fixed), tuple(map(tuple, needs)), len(first))
        if len(made) * math.prod(map(len, needs)) <= DIRECT or len(needs) < 2:
            if key not in self.tables:
                core = np.array(
                    [
                        self.moving(value, s, (*fixed, *itertools.chain(*wanted)))
                        for s in states
                        for wanted in itertools.product(*distinct)
                    ]
                ).reshape(len(states), *map(len, distinct))
                at = [[own.index(one) for one in every] for own, every in zip((states, *distinct), (made, *needs), strict=True)]
                self.tables[key] = core[np.ix_(*at)] if first else core[0][np.ix_(*at[1:])] if readers else core[0]
            self.problem.factors.append(Factor((*first, *variables), self.tables[key]))
            return
        self.chain(key, value, first, made, fixed, readers)

    def moving(self, value: Value, states: States, goals: Sequence[States]) -> float:
        steps = self.prices.steps(value, states, dict.fromkeys(goals))
        return math.inf if steps is None else sum(self.prices.step(value, step) for step in sorted(steps, key=repr))

    def chain(
        self, key: Any, value: Value, first: tuple[int, ...], made: Sequence[States], fixed: Sequence[States],
        readers: Sequence[tuple[int, Sequence[tuple[States, ...]]]],
    ) -> None:  # fmt: skip
        """A variable between each reader and the next: the state of the value, and those of its moves that cost and that are made."""
        before: list[tuple[States, frozenset[Any]]] = []
        for states in made:
            steps = self.prices.steps(value, states, fixed)
            before.append((states, frozenset() if steps is None else frozenset(s for s in steps if self.prices.step(value, s))))
        start = [self.moving(value, states, fixed) for states in made]
        self.problem.factors.append(
            Factor(first, self.tables.setdefault((key, "start"), np.array(start) if first else np.array(start[0])))
        )
        variable = first[0] if first else self.problem.variable(before[:1])
        for number, (reader, needs) in enumerate(readers):
            last = number == len(readers) - 1
            links = [[self.link(value, one, need) for need in needs] for one in before]
            after = list(dict.fromkeys(found for row in links for found, _ in row if found is not None)) if not last else [None]
            own = (key, number)
            if own not in self.tables:
                table = np.full((len(before), len(needs), len(after)), math.inf)
                place = {one: i for i, one in enumerate(after)}
                for i, row in enumerate(links):
                    for j, (found, cost) in enumerate(row):
                        if found is not None:
                            table[i, j, 0 if last else place[found]] = cost
                self.tables[own] = table[..., 0] if last else table
            if last:
                self.problem.factors.append(Factor((variable, reader), self.tables[own]))
                return
            following = self.problem.variable(after)
            self.problem.factors.append(Factor((variable, reader, following), self.tables[own]))
            variable, before = following, after

    def link(self, value: Value, before: tuple[States, frozenset[Any]], need: tuple[States, ...]) -> tuple[Any, float]:
        """What has been made after a reader that needs such states, and the seconds of what comes to it."""
        states, made = before
        steps = self.prices.steps(value, states, need)
        if steps is None:
            return None, math.inf
        new = {s: cost for s in steps if s not in made and (cost := self.prices.step(value, s))}
        return (states, made | new.keys()), sum(new[s] for s in sorted(new, key=repr))

    # ---- the answer ----------------------------------------------------------------------------------------------------

    def assignments(self, values: Sequence[int]) -> dict[str, Assignment]:
        """Of each axis, for the values of variables."""
        chosen = {node: self.options[node][values[v]] for node, v in self.variables.items()}
        out = {}
        for a, axis in enumerate(self.prices.axes):
            one = out[axis] = Assignment()
            for node in self.p.normal.graph.nodes:
                if node.op not in ("placeholder", "call_function") or (node.op == "call_function" and not is_tensor(node)):
                    continue
                form = self.forms.get(node)
                if node.op == "placeholder":
                    one.states[node] = (chosen[node][a],) if node in chosen else ("I",)
                elif node not in self.forms:
                    one.states[node] = (one.states[node.args[0]][node.args[1]],)
                elif form is None:
                    one.states[node] = ("I",) * len(self.p.shapes(node))
                else:
                    one.strategies[node] = chosen[node][a] if node in chosen else form.whole("I")
                    one.states[node] = one.strategies[node].results
        return out


class Solved(NamedTuple):
    """What each axis is, and the seconds that this is predicted to take."""

    assignments: dict[str, Assignment]
    seconds: Seconds


def solve(p: Propagation, forms: Mapping[fx.Node, Form | None]) -> Solved:
    """The assignments of all axes under which a microbatch takes least."""
    machine = p.tensor.machine or Machine(rates(p.device.type, p.captured.precision), p.captured.rows or 1)
    prices = Prices(p, machine.rates, machine.rows, p.device.type)
    known = learned(p)
    choices = {axis: Choices(p, forms, axis, prices, known) for axis in prices.axes}
    solver = Solver(p, forms, prices, choices)
    problem = solver.build()
    found = solver.assignments(least(problem.sizes, problem.factors).values)
    return Solved(found, seconds(prices, solver.flow, found))


__all__ = ["Flow", "Reader", "Solver", "TooWide", "seconds", "solve"]
