"""Sums over the rows of a batch that follow from its fields alone, which a step makes before its first forward.

A microbatch is to a batch what a rank is: it has some of the rows. What all ranks have to exchange, all microbatches
have to exchange too, and cannot, for they run one after the other. But where an exchange follows from fields alone
(the number of valid targets, the sum of a mask or of weights, any denominator that is made of them) it can be made
beforehand, once for all microbatches. Then every microbatch computes partial sums of the whole batch's values, and the
sum of their losses is the loss of the whole batch, however its masks are spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardwise.backend import Backend
from shardwise.core.fields import is_kept
from shardwise.core.layout import Layout
from shardwise.graph.aten_ops import Fact, has, regroups
from shardwise.graph.functional import Normal
from shardwise.graph.naming import module_path
from shardwise.graph.normalise import eliminate_dead
from shardwise.graph.schema import given, op_name, outputs_of
from shardwise.graph.sizes import depends_on_data, expression
from shardwise.ops import collectives, cross_entropy, norms
from shardwise.ops.env import ROWS, Env
from shardwise.ops.own_op import facts_of
from shardwise.shard.sharded import Sharded
from shardwise.shard.sizes import local_shape

HEAVY = Fact.MATRIX_PRODUCT | Fact.CONVOLUTION | Fact.ATTENTION
"""A sum whose operand needs one of these is no denominator: to make it beforehand would be to run the model twice."""


SUM_BYTES = 8
"""The bytes of an element of a sum: an int64 or a double."""


class SumPart(NamedTuple):
    """One of the sums of a stage: its ``value`` in the captured graph, its layout, and the ``op`` that makes what is
    added up."""

    value: Tensor
    layout: Layout
    op: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum in the graph; a stage adds up integers as int64, and floats in the widest dtype."""
        return self.value.dtype

    def shape(self, env: Env) -> tuple[int, ...]:
        """Return the shape on the rank and for the batch of ``env``."""
        return local_shape(self.value, self.layout, env)


@dataclass
class SumStage:
    """``function(env, *values)`` gives this rank's parts of the sums of a stage for a microbatch, as a tuple.

    ``values`` are those of ``leaves`` (parameters), ``buffers``, ``constants`` and ``fields``, in this order; ``env``
    has the sums of earlier stages. All ranks call it together, for it may communicate over axes that shard rows again.
    ``floats`` says whether the stage's sums are floats or integers.
    """

    parts: tuple[SumPart, ...]
    function: Callable[..., tuple[Tensor, ...]]
    graph: fx.Graph
    leaves: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Tensor, ...]
    fields: tuple[str, ...]
    floats: bool

    def numel(self, env: Env) -> int:
        """Return the number of elements of the stage's sums on the rank and for the batch of ``env``."""
        return sum(math.prod(part.shape(env)) for part in self.parts)


@dataclass
class BatchSums:
    """The sums of a step, in stages: those of a stage may depend on those of earlier ones. All are numbered in one row.

    ``weight`` is the number of the sum over which the loss is a mean (of valid targets, or of their weights); None
    where it is none.
    """

    stages: tuple[SumStage, ...]
    weight: int | None = None

    def like(self, other: BatchSums | None) -> bool:
        """Whether microbatches with these sums and with ``other`` ones can be in one step."""
        return other is not None and self.form == other.form

    @property
    def form(self) -> list[list[tuple[Any, ...]]]:
        """What is added up in each stage, for comparisons."""
        return [[(one.op, one.dtype, str(one.layout)) for one in stage.parts] for stage in self.stages]

    @property
    def leaves(self) -> tuple[str, ...]:
        """The parameters that the sums depend on."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.leaves))

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers that the sums depend on."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.buffers))


class Meetings(NamedTuple):
    """Where rows meet in forward: ``known`` follow from fields alone, ``norms`` are BatchNorms, and ``others`` depend
    on parameters, too: these are of one microbatch, for another has not run yet."""

    known: list[fx.Node]
    norms: list[fx.Node]
    others: list[fx.Node]


def meetings(sharded: Sharded) -> Meetings:
    """Return the nodes of the local graph at which rows meet in forward.

    A buffer that forward writes is as good as a field where all microbatches write the same to it."""
    if sharded.over_batch:
        return _meetings(sharded, frozenset())
    every = frozenset(sharded.normal.updates)
    found = _meetings(sharded, frozenset())
    if not found.others:
        found = _meetings(sharded, written_in_turn(sharded, found))
    if not found.others:
        return found
    # Each microbatch is a batch of its own, with sums of its own, which are of one shape.
    found = _meetings(sharded, every)
    sizes = {n: [expression(s) for s in n.meta["val"].shape] for n in found.known}
    fixed = [n for n in found.known if all(isinstance(size, int) for size in sizes[n])]
    return found._replace(known=[n for n in fixed if n.target is collectives.all_reduce])


def _meetings(sharded: Sharded, sequential: frozenset[str]) -> Meetings:
    """Return the same, taken that microbatches write the buffers ``sequential`` one after the other."""
    found, free = Meetings([], [], []), _free(sharded, sequential)
    for node in sharded.graph.nodes:
        if node.op != "call_function" or not _over_rows(node):
            continue
        if node.target is norms.sync_batch_norm:
            found.norms.append(node)
        elif node in free and node.target in (collectives.all_reduce, collectives.gather) and bounded(node):
            found.known.append(node)
        else:
            found.others.append(node)
    return found


def bounded(node: fx.Node) -> bool:
    """Whether the number of rows alone tells the shape of a node's value, a sum of real numbers."""
    value = node.meta["val"]
    return not value.is_complex() and not any(depends_on_data(size) for size in value.shape)


def written_in_turn(sharded: Sharded, meet: Meetings) -> frozenset[str]:
    """Return the buffers whose new values depend on rows that meet in one microbatch alone."""
    pairs = zip(outputs_of(sharded.graph)[1:], sharded.normal.updates, strict=True)
    updates = {node: name for node, name in pairs if not is_kept(name)}
    if meet.others:
        return frozenset(updates.values())
    below = set(meet.norms)  # and what depends on them
    for node in sharded.graph.nodes:
        if not below.isdisjoint(node.all_input_nodes):
            below.add(node)
    return frozenset(name for node, name in updates.items() if node in below)


def for_buffers(sharded: Sharded) -> dict[fx.Node, str]:
    """Return the nodes of the local graph on which the loss depends through a buffer's new value at most, with its
    name."""
    loss, *rest = outputs_of(sharded.graph)
    known = list(zip(rest, sharded.normal.updates, strict=True))
    written = {node: name for node, name in known if not is_kept(name)}
    seen, found = _ancestors([loss, *(n for n, name in known if is_kept(name))], written), dict[fx.Node, str]()
    passed = set[fx.Node]()  # on the way back from the values so far: each node is passed once
    for value, name in written.items():
        new = _ancestors([value], passed) - passed
        found |= dict.fromkeys(new - seen, name)
        passed |= new
    return found


def described(nodes: Iterable[fx.Node], buffers: Mapping[fx.Node, str]) -> list[str]:
    """Return the modules, and the ops in them, in which these nodes let rows meet; or what they are of ``buffers``."""
    places = ((f"the buffer {buffers[n]}" if n in buffers else module_path(n) or "the loss", _cause(n)) for n in nodes)
    return [path if op == "output" else f"{path} ({op})" for path, op in dict.fromkeys(places)]


def _cause(node: fx.Node) -> str:
    if "cause" in node.meta:
        cause = str(node.meta["cause"])
        return cause.removeprefix("aten.").partition(".")[0] if cause.startswith("aten.") else cause
    origin = node.meta.get("origin")
    of = origin if isinstance(origin, fx.Node) else node
    return op_name(of) or str(getattr(of.target, "__name__", of.target))


def _over_rows(node: fx.Node) -> bool:
    """Whether a node exchanges values over the rows in forward."""
    facts = facts_of(node.target)
    if facts.ways:
        if not collectives.communicates_forward(facts):
            return False
        where: Any = node.args[2]
        return ROWS in (where if node.target is collectives.all_reduce else where[0])
    given = (*node.args, *node.kwargs.values())
    return facts.communicates and any(ROWS in a for a in given if isinstance(a, tuple | list))


def _free(sharded: Sharded, written: frozenset[str]) -> set[fx.Node]:
    """Return the nodes that can be computed before the first forward: they have no gradient, depend on none of the
    buffers ``written``, and on parameters only by light ops."""
    captured = sharded.normal.captured
    free: set[fx.Node] = set()
    learned: dict[fx.Node, bool] = {}  # whether a node depends on parameters
    for node in sharded.graph.nodes:
        if node.op == "placeholder":
            learned[node] = node.name in captured.parameters
            if captured.buffers.get(node.name) not in written:
                free.add(node)
        elif node.op == "call_function":
            learned[node] = any(learned[n] for n in node.all_input_nodes)
            heavy = learned[node] and has(node, HEAVY)
            of_gradient = learned[node] and bool(node.meta.get("grad"))
            if not heavy and not of_gradient and all(n in free for n in node.all_input_nodes):
                free.add(node)
    return free


# ---- the loss --------------------------------------------------------------------------------------------------------


def mean_cross_entropy(normal: Normal) -> fx.Node | None:
    """Return the cross-entropy whose mean over integer targets is the loss that the model returns, if there is one."""
    node: Any = outputs_of(normal.graph)[0]
    while isinstance(node, fx.Node) and _passes(node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    mean = has(node, Fact.CLASS_LOSS) and given(node, "reduction", 1) == 1
    integer = mean and not node.args[1].meta["val"].is_floating_point()
    return node if integer else None


def _passes(node: fx.Node) -> bool:
    """Whether a node of a scalar only passes its value on."""
    return regroups(node) or has(node, Fact.CASTS) or op_name(node) in ("clone", "contiguous", "alias")


def summands(normal: Normal) -> set[fx.Node]:
    """Return the nodes whose plain sum is the loss, partial sums included: each has the same gradient as the loss."""
    stack: list[Any] = [outputs_of(normal.graph)[0]]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, fx.Node):
            found.add(node)
            if _passes(node):
                stack.append(node.args[0])
            elif op_name(node) == "add" and given(node, "alpha", 1) == 1:
                stack.extend(node.args[:2])
    return found


# ---- the sums --------------------------------------------------------------------------------------------------------


def take_sums(sharded: Sharded, known: list[fx.Node], mean: fx.Node | None) -> BatchSums | None:
    """Take the exchanges ``known`` out of the local graph, which then reads the step's sums, and return these; None if
    there are none.  ``mean`` is the captured cross-entropy that is the loss."""
    if not known:
        return None
    levels: dict[fx.Node, int] = {}
    exchanged = set(known)
    for node in sharded.graph.nodes:
        below = max((levels[n] for n in node.all_input_nodes), default=0)
        levels[node] = below + 1 if node in exchanged else below
    groups: dict[tuple[int, bool], list[fx.Node]] = {}
    for node in known:
        groups.setdefault((levels[node], node.meta["val"].dtype.is_floating_point), []).append(node)
    ordered = [groups[key] for key in sorted(groups)]
    number = {node: i for i, node in enumerate(n for group in ordered for n in group)}
    stages = tuple(_stage(sharded, group, number) for group in ordered)
    weight = None
    for node, i in number.items():
        source: Any = node.args[1]
        if source.target is cross_entropy.valid_targets and mean is not None and source.meta.get("origin") is mean:
            weight = i
    env = next(n for n in sharded.graph.nodes if n.name == "env")
    for node, i in number.items():
        with sharded.graph.inserting_before(node):
            new = sharded.graph.call_function(collectives.counted, (env, i))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
    eliminate_dead(sharded.graph)
    return BatchSums(stages, weight)


def _stage(sharded: Sharded, exchanges: list[fx.Node], number: dict[fx.Node, int]) -> SumStage:
    """Return the part of the local graph that makes the operands of ``exchanges``; ``number`` numbers all exchanges."""
    captured = sharded.normal.captured
    seen = _ancestors((i for n in exchanges for i in n.all_input_nodes), number)
    places = [n for n in sharded.graph.nodes if n in seen and n.op == "placeholder" and n.name != "env"]
    kinds = [captured.parameters, captured.buffers, captured.constants, captured.fields]
    leaves, buffers, constants, fields = groups = [[n for n in places if n.name in names] for names in kinds]
    graph = fx.Graph()
    env = graph.placeholder("env")
    copies = {next(n for n in sharded.graph.nodes if n.name == "env"): env}
    for n in (n for group in groups for n in group):
        copies[n] = graph.placeholder(n.name)
        copies[n].meta = dict(n.meta)
    for n in sharded.graph.nodes:
        if n in number and n in seen:
            copies[n] = graph.call_function(collectives.counted, (env, number[n]))
            copies[n].meta = dict(n.meta)
        elif n in seen and n not in copies:
            copies[n] = graph.node_copy(n, lambda a: copies[a])
    operands = [_operand(graph, env, n, copies) for n in exchanges]
    graph.output(tuple(operands))
    return SumStage(
        tuple(SumPart(n.meta["val"], n.meta["layout"], _cause(n)) for n in exchanges),
        fx.GraphModule(torch.nn.Module(), graph).forward,
        graph,
        tuple(captured.parameters[n.name] for n in leaves),
        tuple(captured.buffers[n.name] for n in buffers),
        tuple(captured.constants[n.name] for n in constants),
        tuple(captured.fields[n.name] for n in fields),
        exchanges[0].meta["val"].dtype.is_floating_point,
    )


def _operand(graph: fx.Graph, env: fx.Node, exchange: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return what a rank adds to an exchange over rows: its part of a sum, which other axes than the rows' sum first,
    or zeros with its piece of what is put together."""
    given: Any = fx.map_arg(exchange.args[:3], lambda n: copies[n])
    _, value, where = given
    axes = where
    if exchange.target is collectives.gather:
        axes, value = where[0], graph.call_function(collectives.placed, (env, value, where))
        value.meta = dict(exchange.meta)
    others = tuple(axis for axis in axes if axis != ROWS)
    if others:
        value = graph.call_function(collectives.all_reduce, (env, value, others))
        value.meta = dict(exchange.meta)
    found: fx.Node = value
    return found


def _ancestors(nodes: Iterable[Any], ends: Container[fx.Node]) -> set[fx.Node]:
    """Return the nodes and all that they depend on, but for what is behind the nodes ``ends``."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        node = stack.pop()
        new = [n for n in node.all_input_nodes if n not in seen] if node not in ends else []
        seen.update(new)
        stack.extend(new)
    return seen


class StandIns(list[Tensor]):
    """Tensors on the meta device in place of the sums that a step makes; that of number ``apart`` is of a microbatch
    that is a batch of its own."""

    apart: int | None = None

    def __getitem__(self, number: Any) -> Any:
        found = super().__getitem__(number)
        return at_least_one(found) if number == self.apart else found


def stand_ins(sums: BatchSums | None, env: Env, cuts_batch: bool = True) -> StandIns:
    """Return what stands for the sums that a step makes, for microbatches that cut the batch or are batches of their
    own."""
    parts = [part for stage in ([] if sums is None else sums.stages) for part in stage.parts]
    found = StandIns(torch.empty(part.shape(env), dtype=part.dtype, device="meta") for part in parts)
    found.apart = None if cuts_batch or sums is None else sums.weight
    return found


def at_least_one(targets: Tensor) -> Tensor:
    """Return a number of targets by which a mean can divide: without targets the loss is then 0, not 0/0."""
    return targets + (targets == 0)


def flattened(parts: Sequence[Tensor], floats: bool) -> Tensor:
    """Return a rank's parts of the sums of a stage in one row, 1-d: int64, or the widest float of the device."""
    widest = Backend.of(parts[0].device).widest_float if floats else torch.int64
    return torch.cat([one.reshape(-1).to(widest) for one in parts])
