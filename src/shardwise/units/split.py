"""Cut a local graph into units at the model's repeated blocks; each unit is a function of tensors alone.

Every block is a unit, as are the ops before the first block ("head") and after the last ("tail"); ops between two
blocks belong to the block before them. A block that exchanges something inside may be several units, its segments
(``segments.py``). Values that follow from batch fields and constants alone (masks, positions,
rotary tables) and are read by several units form the unit "inputs", which has no parameters: a pipeline runs it on
every stage instead of sending its results. Units with the same code share one function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardwise.core.fields import is_kept, is_output
from shardwise.graph.captured import Captured
from shardwise.graph.schema import outputs_of
from shardwise.ops import collectives, norms
from shardwise.ops.own_op import argument_at, facts_of
from shardwise.shard.sharded import Sharded
from shardwise.units import segments
from shardwise.units.exchanges import Merge, merge_of, phases
from shardwise.units.selective_recompute import note_unread, recallable
from shardwise.units.trace import INPUTS_OF, Unit
from shardwise.units.weight_products import expose, find, held, inside, lookups

INPUTS = -1
"""The key of the unit "inputs"."""


def split(sharded: Sharded, exchanges: Sequence[fx.Node] = (), inside: bool = False) -> list[Unit]:
    """Cut a local graph into units, and blocks ``inside`` too; return them in the order in which they run. Each of the
    ``exchanges``, together with those that do not depend on it, is a unit, and no other unit has nodes before and after
    it."""
    graph = sharded.graph
    loss, *rest = outputs_of(graph)
    updates = list(zip(rest, sharded.normal.updates, strict=True))
    useful = gradient_paths([loss])
    assigned, keys = _assign(graph, sharded, exchanges, [n for n, name in updates if is_output(name)])
    whole = {key for key in assigned.values() if key < 0 or keys.exchanges(key) or not inside}
    placed, moves = segments.cut(graph, assigned, whole, _sources)
    for node in _read_first(graph, sharded, placed):
        readers = {placed[r][0] for r in _readers(node) if r in placed}
        placed[node] = keys.inputs_of(readers.pop()) if len(readers) == 1 else INPUTS, 0
    order = sorted(set(placed.values()))
    own = frozenset(exchanges)
    builder = _Builder(sharded, placed, own, moves, useful, loss, updates)
    shared: dict[str, Callable[..., Any]] = {}
    return [builder.unit(i, key, keys, shared) for i, key in enumerate(order)]


def gradient_paths(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that a gradient passes on its way back from ``ends``, these included."""
    found: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node not in found and node.meta.get("grad"):
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def with_backward(graph: fx.Graph, output_grads: Sequence[bool]) -> set[fx.Node]:
    """Return the nodes that a gradient passes on its way back from the outputs that ``output_grads`` marks."""
    if not output_grads:  # a graph without a backward; its output may be one tensor
        return set()
    return gradient_paths(node for node, grad in zip(outputs_of(graph), output_grads, strict=False) if grad)


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node reads; a node of a size is replaced by the nodes that the size is computed from."""
    return _through(node, lambda n: n.all_input_nodes)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a node; a node of a size is replaced by the nodes that read the size."""
    return _through(node, lambda n: list(n.users))


def _through(node: fx.Node, edges: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}  # in the order of the arguments, so that equal blocks have equal code
    for n in edges(node):
        if n.op == "call_function" and "layout" not in n.meta:
            found |= dict.fromkeys(_through(n, edges))
        else:
            found[n] = None
    return list(found)


def _read_first(graph: fx.Graph, sharded: Sharded, unit: dict[fx.Node, segments.Key]) -> list[fx.Node]:
    """Return the buffers that forward writes and whose old values the loss, a kept value, or several units read.

    They become outputs of the unit "inputs", or of one for the only unit that reads them, so that a pipeline has each
    on one stage. Those are never run again: a later unit, and a unit that is recomputed, read what the buffer held when
    the microbatch began. (BatchNorm's running statistics are not among them: only their
    own updates read them.)
    """
    captured, written = sharded.normal.captured, set(sharded.normal.updates)
    loss, *rest = outputs_of(graph)
    kept = [node for node, name in zip(rest, sharded.normal.updates, strict=True) if is_kept(name)]
    matters = _reaching([loss, *kept])
    places = [n for n in graph.nodes if n.op == "placeholder" and captured.buffers.get(n.name) in written]
    return [n for n in places if n in matters or len({unit[r] for r in _readers(n) if r in unit}) > 1]


def _reaching(ends: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        source = node.args[0] if node.target is operator.getitem else None
        of_batch_norm = isinstance(source, fx.Node) and source.target in (
            norms.batch_norm,
            norms.sync_batch_norm,
            norms.batch_norm_by,
        )
        if of_batch_norm and node.args[1] == 0:  # y does not depend on the running statistics
            found.add(source)
            running = [argument_at(source.target, name) for name in ("mean", "var")]
            stack.extend(a for i, a in enumerate(source.args) if isinstance(a, fx.Node) and i not in running)
        else:
            stack.extend(node.all_input_nodes)
            if of_batch_norm:
                stack.extend(source.all_input_nodes)
    return found


def block_of(path: str, numbered: Callable[[str], bool] = str.isdigit) -> str:
    """Return the outermost numbered module on a path: ``model.layers.3`` for ``model.layers.3.mlp``; "" for none."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if numbered(part.partition("@")[0]):
            return ".".join(parts[: i + 1])
    return ""


@dataclass(frozen=True)
class _Keys:
    """The units' sortable keys. -1 is "inputs", and lower ones are the inputs of single units. Each phase has the same
    ``names``: place 0 is before the first block, i is the i-th block, counted from 1, then comes what is after the last
    block, and then the exchange that ends the phase."""

    names: Sequence[str]

    def key(self, phase: int, place: int) -> int:
        """Return the key of a place in a phase."""
        return phase * (len(self.names) + 1) + place

    def inputs_of(self, key: int) -> int:
        """Return the key of the inputs of a unit, and the key of the unit for that of its inputs."""
        return INPUTS - 1 - key

    def exchange(self, phase: int) -> int:
        """Return the key of the exchange before a phase."""
        return phase * (len(self.names) + 1) - 1

    def phase(self, key: int) -> int:
        """Return the phase of a key: an exchange belongs to the phase that it begins."""
        return max(key + self.exchanges(key), 0) // (len(self.names) + 1)

    def exchanges(self, key: int) -> bool:
        """Whether a key is that of an exchange."""
        return key >= 0 and key % (len(self.names) + 1) == len(self.names)

    def of(self, key: int) -> str:
        """Return the name of a unit."""
        if key < 0:
            return "inputs" if key == INPUTS else f"{INPUTS_OF}{self.of(self.inputs_of(key))}"
        phase, place = divmod(key, len(self.names) + 1)
        if place == len(self.names):
            return f"exchange {phase + 1}"
        return self.names[place] + (f", part {phase + 1}" if phase else "")


def _assign(
    graph: fx.Graph, sharded: Sharded, exchanges: Sequence[fx.Node], results: Collection[fx.Node] = ()
) -> tuple[dict[fx.Node, int], _Keys]:
    """Return the key of the unit of every call, and what the keys mean; the last unit has the ``results``, the model's
    outputs, so that a pipeline brings them to one rank."""
    phase, own = phases(graph, exchanges), frozenset(exchanges)
    free = {n for n in _free(graph, sharded) if not phase[n]}
    calls = [n for n in graph.nodes if n.op == "call_function" and "layout" in n.meta]
    block = _in_blocks(calls, sharded.normal.captured)
    blocks: dict[str, int] = {}
    for node in calls:
        if node not in free and node in block:
            blocks.setdefault(block[node], len(blocks) + 1)
    last = len(blocks)
    unit: dict[fx.Node, int] = {}
    early = _early((n for n in calls if not phase[n]), free, block, sharded.normal.captured)
    for node in calls:
        if node in free or node in early or node in results:
            continue
        if node.target is operator.getitem:  # a tuple never crosses a cut
            unit[node] = unit[node.args[0]]
            continue
        below = max((unit[i] for i in _sources(node) if i in unit), default=0)
        if node in block:
            unit[node] = max(below, blocks[block[node]])
        else:
            unit[node] = below + 1 if last and below == last else below
    names = ["head" if last else "model", *blocks, *(["tail"] if last else [])]
    keys = _Keys(names)
    for node, place in unit.items():
        unit[node] = keys.exchange(phase[node]) if _source(node) in own else keys.key(phase[node], place)
    unit |= dict.fromkeys(results, max((k for k in unit.values() if not keys.exchanges(k)), default=0))
    for node in reversed(calls):
        if node not in results and (node in free or node in early) and node.target is not operator.getitem:
            items = [u for u in node.users if u.target is operator.getitem]
            users = {unit[u] for n in (node, *items) for u in _readers(n) if u in unit}
            if node in early:
                place = min(users, default=0)
                place = 0 if place == 1 and early[node] else place
            else:
                place = users.pop() if len(users) == 1 else INPUTS
            if keys.exchanges(place):  # nothing but the exchange itself is in its unit
                place -= 1
            unit.update(dict.fromkeys((node, *items), place))
    return unit, keys


def _source(node: fx.Node) -> Any:
    """Return the op that a node is a result of."""
    return node.args[0] if node.target is operator.getitem else node


def _early(
    calls: Iterable[fx.Node], free: set[fx.Node], blocks: Container[fx.Node], captured: Captured
) -> dict[fx.Node, bool]:
    """Return the calls outside the blocks that depend on parameters, buffers and fields alone, and whether on fields.

    They belong to the first unit that reads them; if that is the first block, those that depend on fields (embeddings)
    come before it.
    """
    known = {*captured.parameters, *captured.buffers, *captured.fields}
    found: dict[fx.Node, bool] = {}
    batch: set[fx.Node] = set()  # the calls that depend on fields
    for node in calls:
        sources = [i for i in _sources(node) if i.name != "env"]
        if any(i in batch or i.name in captured.fields for i in sources):
            batch.add(node)
        if node not in free and node not in blocks and all(i in found or i in free or i.name in known for i in sources):
            found[node] = node in batch
    return found


def _in_blocks(calls: Sequence[fx.Node], captured: Captured) -> dict[fx.Node, str]:
    """Return the path of the block of each call that is in one. A block uses a parameter, which may be frozen; other
    modules (a lone activation) belong to the unit before.

    Blocks are numbered modules. A model without any is cut at modules whose names end in a number (``conv2_1``)."""
    for numbered in (str.isdigit, _ends_in_number):
        paths = {n: path for n in calls if (path := block_of(n.meta.get("path", ""), numbered))}
        owned = {paths[n] for n in paths if any(i.name in captured.parameters for i in n.all_input_nodes)}
        if owned:
            return {n: path for n, path in paths.items() if path in owned}
    return {}


def _ends_in_number(name: str) -> bool:
    return name[-1:].isdigit()


def _free(graph: fx.Graph, sharded: Sharded) -> set[fx.Node]:
    """Return the calls that depend on fields, constants and unwritten buffers alone."""
    captured, written = sharded.normal.captured, set(sharded.normal.updates)
    bound = {
        n
        for n in graph.nodes
        if n.op == "placeholder" and (n.name in captured.parameters or captured.buffers.get(n.name) in written)
    }
    ends, free = outputs_of(graph), set[fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function":
            if any(i in bound for i in node.all_input_nodes) or node in ends:
                bound.add(node)
            else:
                free.add(node)
    return free


class _Builder:
    def __init__(
        self,
        sharded: Sharded,
        assigned: dict[fx.Node, segments.Key],
        exchanges: Container[fx.Node],
        moves: Mapping[segments.Key, segments.Moves],
        useful: set[fx.Node],
        loss: fx.Node,
        updates: list[tuple[fx.Node, str]],
    ) -> None:
        self.sharded, self.assigned, self.useful, self.loss, self.updates = sharded, assigned, useful, loss, updates
        self.exchanges, self.moves = exchanges, moves
        self.last = dict(sorted(assigned.values()))  # the last segment of each block
        self.captured = sharded.normal.captured

    def unit(self, index: int, key: segments.Key, keys: _Keys, shared: dict[str, Callable[..., Any]]) -> Unit:
        own = [n for n in self.sharded.graph.nodes if self.assigned.get(n) == key]
        mine = [n for n in own if n.op != "placeholder"]
        kinds: dict[str, list[fx.Node]] = {"parameters": [], "buffers": [], "constants": [], "fields": [], "inputs": []}
        for node in dict.fromkeys((*(n for n in own if n.op == "placeholder"), *self._outside(mine))):
            kinds[self._kind(node, key)].append(node)
        outputs = [n for n in own if n is self.loss or any(self.assigned.get(r, key) > key for r in _readers(n))]
        updated = [(n, buffer) for n, buffer in self.updates if self.assigned.get(n) == key]
        graph, ordinal = self._graph(mine, kinds, [*outputs, *(n for n, _ in updated)])
        code = graph.python_code("self").src
        if code not in shared:
            module = fx.GraphModule(torch.nn.Module(), graph)
            shared[code] = module.forward
        captured, (block, _) = self.captured, key
        moves = self.moves.get(key)
        parameters = tuple(captured.parameters[n.name] for n in kinds["parameters"])
        trainable = [captured.trainable[n] for n in parameters]
        products = find(graph, trainable)
        exposed, own_outputs = expose(graph, products), len(outputs) + len(updated)
        inner = tuple(
            i for i, n in enumerate(outputs) if any(key < self.assigned.get(r, key) < (block + 1,) for r in _readers(n))
        )
        readers = {self.assigned.get(r, key) for n in outputs for r in _readers(n)} - {key}
        note_unread(graph, exposed, own_outputs, inner)
        exposed = recallable(exposed, own_outputs, inner)
        key_code = exposed.python_code("self").src
        if key_code not in shared:
            shared[key_code] = fx.GraphModule(torch.nn.Module(), exposed).forward
        return Unit(
            index=index,
            name=self._name(key, keys.of(block), moves is not None),
            block=keys.of(block),
            function=shared[code],
            code=code,
            graph=graph,
            parameters=parameters,
            buffers=tuple(captured.buffers[n.name] for n in kinds["buffers"]),
            constants=tuple(captured.constants[n.name] for n in kinds["constants"]),
            fields=tuple(captured.fields[n.name] for n in kinds["fields"]),
            inputs=tuple(n.name for n in kinds["inputs"]),
            outputs=tuple("loss" if n is self.loss else n.name for n in outputs),
            updates=tuple(buffer for _, buffer in updated),
            input_grads=tuple(n in self.useful for n in kinds["inputs"]),
            output_grads=tuple(n in self.useful for n in outputs),
            ordinal=ordinal,
            collectives=any(facts_of(n.target).communicates for n in mine),
            reads_sums=any(n.target is collectives.counted for n in mine),
            values={n.name: n for n in (*kinds["inputs"], *outputs)},
            training_function=shared[key_code],
            products=tuple(parameters[one.parameter] for one in products.values()),
            inside=tuple(parameters[i] for i in inside(graph, trainable, products)),
            lookups={parameters[i]: given for i, given in lookups(graph, products).items()},
            held=self._names(held(graph, products), kinds["inputs"], outputs),
            merges=self._merges(mine, kinds["inputs"]),
            phase=keys.phase(block),
            moves=moves,
            inner=inner,
            closed=(closed := all(r < (block + 1,) for r in readers) and self.loss not in outputs),
            passing=closed and moves is None and bool(readers) and all(r in self.moves for r in readers),
        )

    def _name(self, key: segments.Key, block: str, moves: bool) -> str:
        """Return a name that tells a segment from others of its ``block``."""
        if self.last[key[0]] == 0:
            return block
        return f"{block}, {'move' if moves else 'segment'} {key[1] + 1}"

    def _merges(self, mine: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> tuple[Merge, ...]:
        """Return how an exchange takes each of its ``inputs``; nothing for any other unit."""
        each = {node.args[1]: merge_of(node) for node in mine if node in self.exchanges}
        return tuple(each[node] for node in inputs) if each else ()

    @staticmethod
    def _names(places: Iterable[tuple[str, int]], inputs: list[fx.Node], outputs: list[fx.Node]) -> tuple[str, ...]:
        """Return the names of live tensors by their places in a unit; new values of buffers are left out."""
        return tuple(nodes[i].name for kind, i in places if i < len(nodes := inputs if kind == "input" else outputs))

    def _kind(self, node: fx.Node, key: segments.Key) -> str:
        if node.op != "placeholder" or self.assigned.get(node, key) != key:
            return "inputs"
        for kind in ("parameters", "buffers", "constants", "fields"):
            if node.name in getattr(self.captured, kind):
                return kind
        raise AssertionError(f"placeholder {node.name} is nothing known")

    def _outside(self, mine: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the nodes that the unit reads from outside, without sizes, which every unit computes for itself."""
        inside = set(mine)
        return list(dict.fromkeys(n for one in mine for n in _sources(one) if n not in inside and n.name != "env"))

    def _graph(
        self, mine: list[fx.Node], kinds: dict[str, list[fx.Node]], outputs: list[fx.Node]
    ) -> tuple[fx.Graph, int]:
        """Return the unit's graph, with names that do not depend on its place in the model, and its first ordinal."""
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        env = graph.placeholder("env")
        for kind, nodes in kinds.items():
            for i, node in enumerate(nodes):
                copies[node] = graph.placeholder(f"{kind[0]}{i}")
                copies[node].meta = {key: node.meta.get(key) for key in ("val", "layout", "grad")}
        ordinals = [o for n in mine if (o := _ordinal(n)) is not None]
        first = min(ordinals, default=0)

        def value(node: fx.Node) -> Any:
            if node.name == "env" and node.op == "placeholder":
                return env
            if node not in copies:  # a size
                copies[node] = graph.call_function(
                    node.target, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
                )
            return copies[node]

        for node in mine:
            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            if (own := _ordinal(node)) is not None:
                at = argument_at(node.target, "ordinal")
                args = (*args[:at], own - first, *args[at + 1 :])  # relative: equal blocks have equal code
            copies[node] = graph.call_function(node.target, args, kwargs)
            copies[node].meta = {k: node.meta[k] for k in ("val", "layout", "grad", "path", "cause") if k in node.meta}
        graph.output(tuple(copies[n] for n in outputs))
        return graph, first


def _ordinal(node: fx.Node) -> int | None:
    """Return the ordinal among the arguments of a random op; None for any other op."""
    at = argument_at(node.target, "ordinal")
    return None if at is None else int(node.args[at])
