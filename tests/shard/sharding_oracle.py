"""An op on pieces against the op whole, one rank after the other in this thread: what :class:`Strategy` says, tested.

Operands are cut by the states that a strategy wants, and random gradients of results by the duals of its results; the
results and the gradients of operands, put together, have to be those of the whole op.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from one_op import OneOp, evaluated, filled, sizes_of_data, traced
from op_cases import ROWS as COUNT
from op_cases import Op
from states import TOLERANCE, Rank, Ranks, Wrong, distance, dual, random_like
from torch import Tensor, fx

from shardwise.core.mesh import Mesh
from shardwise.graph.schema import differentiable, is_tensor, op_name
from shardwise.ops.env import ROWS, Env
from shardwise.ops.own_op import facts_of
from shardwise.runtime.threads import run_ranks
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.shard.batch_walk import BatchWalk
from shardwise.shard.context import ShardingContext, with_gradient
from shardwise.shard.op_spec import OpSharding, Shard, Strategy
from shardwise.shard.rules import find
from shardwise.shard.sizes import ratio

# ---- running an op ---------------------------------------------------------------------------------------------------


class Communicates(Exception):
    """A rank that runs alone would have to hear of others."""


class Alone:
    """Stands for a communicator."""

    def __getattr__(self, name: str) -> Any:
        raise Communicates(name)


Values = Mapping[fx.Node, Any]


@dataclass
class Whole:
    """An op on the whole batch: its results, random gradients of those that have one, and what these make of it: the
    gradients of operands."""

    results: list[Tensor]
    cotangents: list[Tensor | None]
    gradients: dict[fx.Node, Tensor]

    @cached_property
    def finite(self) -> bool:
        return all(bool(x.isfinite().all()) for x in (*self.results, *self.gradients.values()))


def differentiated(
    run: Callable[[Mapping[Any, Tensor]], Any],
    operands: Mapping[Any, Tensor],
    cotangents: Sequence[Tensor | None] | None,
) -> tuple[list[Tensor], list[Tensor | None], dict[Any, Tensor]]:
    """The results of an op on ``operands``, and the gradients of those that require one; what ``cotangents`` are, by
    default random, where a result has a gradient."""
    value = run(operands)
    results = list(value) if isinstance(value, tuple | list) else [value]
    if cotangents is None:
        cotangents = [random_like(one) if one.requires_grad else None for one in results]
    learning = {k: x for k, x in operands.items() if x.requires_grad}
    pairs = [(y, c) for y, c in zip(results, cotangents, strict=True) if c is not None and y.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(learning)
    if pairs and learning:
        found = torch.autograd.grad(
            [y for y, _ in pairs], list(learning.values()), [c for _, c in pairs], allow_unused=True
        )
    gradients = {k: torch.zeros_like(x) if g is None else g for (k, x), g in zip(learning.items(), found, strict=True)}
    return [y.detach() for y in results], list(cotangents), gradients


class Local:
    """The local graph of an op: what a rule emits for these strategies by group of axes."""

    def __init__(self, case: Case, parts: int, form: OpSharding, strategies: Mapping[str, Strategy]) -> None:
        self.emitter = OneOp(case.context(parts), form.node, strategies, case.data)
        self.result = self.emitter.local(form.node, form)
        live, stack = {self.result}, [self.result]
        while stack:
            new = set(stack.pop().all_input_nodes) - live
            live |= new
            stack += new
        self.nodes = [node for node in self.emitter.graph.nodes if node in live and node.op == "call_function"]
        self.operands = {node: one for node, one in self.emitter.operands_of.items() if node in live}
        self.numbers = {new: old for old, new in self.emitter.numbers.items() if new in live}
        self.measured = {new: at for new, at in self.emitter.measured.items() if new in live}

    def run(self, env: Env, values: Values, operands: Mapping[fx.Node, Tensor]) -> Any:
        known: dict[fx.Node, Any] = {self.emitter.env: env, **operands}
        known.update({new: values[old] for new, old in self.numbers.items()})
        known.update({new: values[old].shape[dim] for new, (old, dim) in self.measured.items()})
        for node in self.nodes:
            known[node] = node.target(*filled(node.args, known), **filled(node.kwargs, known))
        return known[self.result]


# ---- comparing -------------------------------------------------------------------------------------------------------


class Case:
    """The ops of one case of ``op_cases.py``, for several numbers of rows."""

    def __init__(self, op: Op) -> None:
        self.normal = traced(op)
        self.data = sizes_of_data(self.normal)
        self.values: dict[int, dict[fx.Node, Any]] = {}
        self.wholes: dict[tuple[fx.Node, int], Whole | None] = {}
        self.contexts: dict[int, ShardingContext] = {}

    def context(self, parts: int) -> ShardingContext:
        """For so many ranks of tensor parallelism; 1: for the axes of the batch alone."""
        if parts not in self.contexts:
            spec = TensorParallelSpec({"tp": parts} if parts > 1 else {})
            self.contexts[parts] = context = ShardingContext(self.normal, find, spec)
            context.carrying = {n: differentiable(n.meta.get("val")) for n in self.normal.graph.nodes}
        return self.contexts[parts]

    def takes(self, rows: int) -> bool:
        """Whether the graph is for so many rows."""
        return self.normal.captured.rows in (None, rows)

    def at(self, rows: int) -> dict[fx.Node, Any]:
        if rows not in self.values:
            self.values[rows] = evaluated(self.normal, rows)
        return self.values[rows]

    def whole(self, node: fx.Node, rows: int) -> Whole | None:
        """The op on the whole batch; None where it does not take this number of rows.  Random ops draw by the sample's
        number: as their rule lets one rank draw."""
        key = node, rows
        if key not in self.wholes:
            values = self.at(rows)
            self.wholes[key] = self._whole(node, rows, values) if node in values and self.takes(rows) else None
        return self.wholes[key]

    def _whole(self, node: fx.Node, rows: int, values: Values) -> Whole:
        context = self.context(1)
        tensors = {i: values[i] for i in node.all_input_nodes if is_tensor(i) and isinstance(values[i], Tensor)}

        def run(operands: Mapping[fx.Node, Tensor]) -> Any:
            if "ordinal" in node.meta:
                form = context.forms[node]
                assert form is not None
                local = Local(self, 1, form, {ROWS: form.whole("I")})
                return local.run(
                    environment(Ranks({ROWS: 1}, rows), {ROWS: 0}, Alone()),
                    values,
                    {new: operands[old] for new, (old, _) in local.operands.items()},
                )
            known = {**values, **operands}
            return node.target(*filled(node.args, known), **filled(node.kwargs, known))

        try:
            found = differentiated(run, {i: leaf(x) for i, x in tensors.items()}, None)
        except (RuntimeError, NotImplementedError):  # some operands of losses cannot have a gradient
            carrying = with_gradient(self.normal)
            found = differentiated(run, {i: leaf(x, carrying[i]) for i, x in tensors.items()}, None)
        return Whole(*found)


def leaf(x: Tensor, learns: bool = True) -> Tensor:
    return x.detach().requires_grad_(learns and (x.is_floating_point() or x.is_complex()))


def environment(ranks: Ranks, rank: Rank, comm: Any) -> Env:
    """What a rank's graph is told."""
    tensor = {group: (ranks.sizes[group], rank[group]) for group in ranks.sizes if group != ROWS}
    return Env(comm, ("dp",), ranks.sizes[ROWS], rank[ROWS], ranks.rows, tensor=tensor)


def check(case: Case, form: OpSharding, strategies: Mapping[str, Strategy], ranks: Ranks, local: Local) -> None:
    """Raises :class:`Wrong` where an op by these strategies computes something else than the whole op does."""
    whole = case.whole(form.node, ranks.rows)
    placed = [state for one in strategies.values() for state in (*one.operands, *one.results)]
    if whole is None and ranks.rows == COUNT:
        raise Wrong("it is not known whole")
    if whole is None or (not whole.finite and ("P" in placed or "R" in placed)):  # what is not finite has no summands
        return
    torch.default_generator.manual_seed(1)
    values = case.at(ranks.rows)
    pieces = {new: ranks.pieces(values[old], states) for new, (old, states) in local.operands.items()}
    results = [{group: one.results[i] for group, one in strategies.items()} for i in range(len(form.results))]
    seeds = [
        None if cotangent is None else ranks.pieces(cotangent, dual(states))
        for cotangent, states in zip(whole.cotangents, results, strict=True)
    ]

    def run(comm: Any, number: int) -> Any:
        rank = ranks.all[number]
        operands = {n: leaf(pieces[n][number], old in whole.gradients) for n, (old, _) in local.operands.items()}
        return differentiated(
            lambda operands: local.run(environment(ranks, rank, comm), values, operands),
            operands,
            [None if seed is None else seed[number] for seed in seeds],
        )

    try:
        found = [run(Alone(), number) for number in range(len(ranks.all))]
    except Communicates as error:
        if not any(facts_of(node.target).communicates for node in local.nodes):
            raise Wrong("it communicates, and no function that it calls says so") from error
        mesh = Mesh.of(**{"dp" if group == ROWS else group: n for group, n in ranks.sizes.items()})
        found = run_ranks(mesh, lambda comm: run(comm, comm.rank))
    for i, (result, states) in enumerate(zip(whole.results, results, strict=True)):
        compare(f"result {i}", ranks.together(result, states, [one[0][i] for one in found]), result)
    for captured, gradient in whole.gradients.items():
        parts = [
            ranks.together(gradient, dual(states), [one[2][new] for one in found])
            for new, (old, states) in local.operands.items()
            if old is captured
        ]
        compare(f"the gradient of {captured}", sum(parts, torch.zeros_like(gradient)), gradient)


def compare(what: str, mine: Tensor, theirs: Tensor) -> None:
    error = distance(mine, theirs)
    if not error <= TOLERANCE:
        raise Wrong(f"{what} is off by {error:.1e}")


# ---- all strategies --------------------------------------------------------------------------------------------------


def of_rows(context: ShardingContext, operand: fx.Node) -> Iterator[Shard]:
    """Where an operand has the rows of the batch: as a factor of any dim that is a multiple of their number."""
    for dim, size in enumerate(context.expressions(operand)):
        times = ratio(size, context.rows)
        for pre in range(1, (times or 0) + 1):
            if times and times % pre == 0:
                yield Shard(dim, pre, times // pre)


def of_sizes(context: ShardingContext, operand: fx.Node) -> Iterator[Shard]:
    """All other factors of an operand's dims that two ranks can share out, each by itself and as a concatenation; three
    ranks share out dims as they are, and halves of them, of which one has none.
    """
    for dim, size in enumerate(context.expressions(operand)):
        if not isinstance(size, int) or size < 2:
            continue
        yield Shard(dim)
        if context.tensor.axes["tp"] > 2:
            if not size % 2:
                yield Shard(dim, 1, size // 2)
            continue
        for pre, post in itertools.product(range(1, size + 1), repeat=2):
            factor, rest = divmod(size, pre * post)
            if factor > 1 and not rest:
                yield Shard(dim, pre, post)
                if pre == 1 and factor > 2:
                    yield Shard(dim, 1, post, (1, factor - 1))


def strategies(form: OpSharding, places: Sequence[Sequence[Shard]]) -> Iterator[Strategy]:
    """All that a rule says, if operands may be sharded at these places."""
    yield form.whole("I")
    yield form.whole("R")
    for i, mine in enumerate(places):
        for place in mine:
            yield from form.ways(i, place)
        if form.keeps([i]):
            partial = form.on_partial([i])
            summed = [o for (o, _), state in zip(form.operands, partial.operands, strict=True) if state == "P"]
            if all(o.meta["val"].dtype is not torch.bool for o in summed):  # truth values have no summands
                yield partial


def like(node: fx.Node) -> str:
    """The same for ops that a rule treats alike: what an index is made of tells whether rows look at themselves."""

    def described(one: fx.Node) -> str:
        value = one.meta["val"]
        made_of = like(one) if "index" in op_name(node) and one.op == "call_function" else ""
        shape = f"{value.dtype}{[str(s) for s in value.shape]}" if isinstance(value, Tensor) else value
        return f"{node.all_input_nodes.index(one)}: {shape} {made_of}"

    return f"{node.target} {fx.map_arg((node.args, node.kwargs), described)} {'ordinal' in node.meta}"


def kinds(case: Case, new: Container[fx.Node]) -> Iterator[tuple[OpSharding, Mapping[str, Strategy], int]]:
    """Each op of a case with each of its strategies, by group of axes, for so many ranks of tensor parallelism."""
    context = case.context(1)
    for node, form in context.forms.items():
        if form is None or node not in new:
            continue
        places = [list(of_rows(context, operand)) for operand, _ in form.operands]
        fresh = [Strategy(("R",) * len(places), (form.fresh,))] if form.fresh is not None else []
        for one in dict.fromkeys([*strategies(form, places), *fresh]):
            yield form, {ROWS: one}, 1
    batch = BatchWalk(case.context(2)).run()
    for parts in (2, 3):
        context = case.context(parts)
        for node, form in context.forms.items():
            if form is None or node not in new:
                continue
            places = [[*of_rows(context, o), *of_sizes(context, o)] for o, _ in form.operands]
            for one in dict.fromkeys(strategies(form, places)):
                if not one.sharded and (parts == 3 or "P" not in one.operands):
                    continue  # nothing that ranks of the batch do not do as well
                rows = batch.strategies[node] if parts == 2 else form.whole("I")
                if context.together(form, {ROWS: rows, "tp": one}):
                    yield form, {ROWS: rows, "tp": one}, parts


RANKS = {
    1: [Ranks({ROWS: 2}, 7), Ranks({ROWS: 3}, 2)],
    2: [Ranks({ROWS: 2, "tp": 2}, 7)],
    3: [Ranks({ROWS: 1, "tp": 3}, 7)],
}
"""For so many ranks of tensor parallelism; one of three has none of two rows."""


def errors(op: Op, seen: set[str]) -> list[str]:
    """What is wrong with any of the ops of a case by any of their strategies; those like ops ``seen`` before are left
    out."""
    case, found = Case(op), []
    ops = (node for node in case.context(1).forms if not op_name(node).startswith("empty"))  # no values to compare
    new = {key: node for node in ops if (key := like(node)) not in seen}
    seen.update(new)
    for form, chosen, parts in kinds(case, set(new.values())):
        try:
            local = Local(case, parts, form, chosen)
            for ranks in RANKS[parts] if any(one.sharded for one in chosen.values()) else RANKS[parts][:1]:
                check(case, form, chosen, ranks, local)
        except Exception as error:
            found.append(f"{form.node.format_node()}\n  {chosen} {error!r}")
    return found
