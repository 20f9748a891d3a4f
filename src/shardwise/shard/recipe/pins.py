"""Patterns of pins match parameters and results of modules; this module finds these, and where they are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, fx

from shardwise.core.errors import ConfigError, did_you_mean
from shardwise.core.pins import PinnedCut, cuts, starred
from shardwise.graph.schema import outputs_of
from shardwise.shard.context import ShardingContext
from shardwise.shard.op_spec import OpSharding, Shard
from shardwise.shard.recipe.walk import TensorWalk


@dataclass(frozen=True)
class Pin:
    """This is what a pin says on one axis of the tensor called ``name``; ``text``, as the user wrote it, is ``"pattern"
    = "where"``."""

    text: str
    cut: PinnedCut
    name: str


@dataclass(frozen=True)
class Pins:
    """This is what is said of parameters and of results of modules, by node and by axis."""

    parameters: Mapping[fx.Node, Mapping[str, Pin]]
    results: Mapping[fx.Node, Mapping[str, Pin]]


def read_pins(context: ShardingContext) -> Pins:
    """Return the pins of ``context.tensor``; :class:`ConfigError` is raised for a pattern that matches nothing and for
    two pins that disagree.  Where the layouts of parameters are known, as in evaluation, a pattern may match nothing.
    """
    parameters, results = used_parameters(context), dict(returned(context.normal.graph))
    aliases = {alias: own for alias, own in context.captured.names.items() if own in parameters}
    found: tuple[dict[fx.Node, dict[str, Pin]], dict[fx.Node, dict[str, Pin]]] = ({}, {})
    for pattern, text in context.tensor.pins:
        wanted = cuts(pattern, text, tuple(context.tensor.axes))
        matched = {parameters[own]: own for alias, own in aliases.items() if fnmatchcase(alias, pattern)}
        nodes = matched or {
            node: path for path, several in results.items() if fnmatchcase(path, pattern) for node in several
        }
        if not nodes and context.tensor.layouts is None:
            wrong = f'"{pattern}" matches no parameter that is read and no module with a result'
            raise ConfigError.on("pins", wrong, "patterns of such names.", _near(pattern, (*aliases, *results)))
        for node, name in nodes.items():
            for axis, cut in wanted.items():
                new = Pin(f'"{pattern}" = "{text}"', cut, name)
                known = found[0 if matched else 1].setdefault(node, {}).setdefault(axis, new)
                if known.cut != cut:
                    raise ConfigError.on("pins", f"{known.text} and {new.text} disagree on {name}", "one of them.")
    return Pins(*found)


def _near(pattern: str, names: Iterable[str]) -> str:
    """Return a hint at the pattern that may have been meant; for ``*.x.y`` it has the last two parts of a name."""
    rest = pattern.removeprefix("*.")
    if rest != pattern:
        names = (f"*.{'.'.join(name.split('.')[-rest.count('.') - 1 :])}" for name in names)
    elif "*" in pattern:
        names = map(starred, names)
    return did_you_mean(pattern, dict.fromkeys(names))


def used_parameters(context: ShardingContext) -> dict[str, fx.Node]:
    """Return the parameters that an op reads, by name."""
    return {name: node for node, name in context.parameters.items() if node.users}


def returned(graph: fx.Graph) -> Iterator[tuple[str, list[fx.Node]]]:
    """Yield (path, the tensors that the module makes and others read); those that only go into buffers are left out."""
    loss = outputs_of(graph)[0]
    read = {loss}  # the nodes that the loss is made of
    for node in reversed(graph.nodes):
        if node in read:
            read.update(node.all_input_nodes)
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node not in read or node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        for call, path in _calls(node).items():
            if path and any(call not in _calls(user) for user in node.users if user in read or node is loss):
                found.setdefault(path, []).append(node)
    yield from found.items()


def _calls(node: fx.Node) -> dict[str, str]:
    """Return the calls of modules that a node is within, each with the module's path."""
    stack = node.meta.get("nn_module_stack") or {}
    return {call: str(path).removeprefix("module").removeprefix(".") for call, (path, _) in stack.items()}


class PinnedPlaces:
    """This finds where the pins of one walk cut."""

    def __init__(self, walk: TensorWalk) -> None:
        self.walk, self.context = walk, walk.context

    # ---- parameters ------------------------------------------------------------------------------------------------

    def parameter(self, node: fx.Node, pin: Pin) -> tuple[Shard, bool] | None:
        """Return where a parameter is cut (None means whole), and whether that is along what a product sums over."""
        cut, shape = pin.cut, self.context.shape(node)
        if cut.side == "whole":
            return None
        if not cut.side and cut.parts is None:
            dim = self.dim(node, pin)
            for side in ("column", "row"):
                found = next((place for place in self.sides(node, side) if place.dim == dim), None)
                if found is not None:
                    return self.beside(node, found, pin), side == "row"
        if not cut.side:
            return self.beside(node, self.explicit(node, pin), pin), False
        found = next(self.sides(node, cut.side), None)
        if found is None:
            wrong = f"{pin.text}: {pin.name} of {list(shape)} has no such pieces for {self.walk.parts} ranks"
            raise ConfigError.on("pins", wrong, f"{', '.join(self.legal(node))}.")
        return self.beside(node, found, pin), cut.side == "row"

    def legal(self, node: fx.Node) -> list[str]:
        """Return what may be said of a parameter."""
        sides = [side for side in ("column", "row") if next(self.sides(node, side), None) is not None]
        dims = [str(d) for d, size in enumerate(self.context.shape(node)) if size >= self.walk.parts]
        return [f'"{word}"' for word in (*sides, *dims, "whole")]

    def sides(self, node: fx.Node, side: str) -> Iterator[Shard]:
        """Yield where a parameter is cut along what its products keep of it, or along what they sum over."""
        for form, position, views in self.products(node):
            operand, labels = form.operands[position]
            beside = {label for o, theirs in form.operands if not self.walk.context.learned(o) for label in theirs}
            shape = self.context.shape(operand)
            for dim, label in enumerate(labels):
                wanted = None
                if side == "row" and form.sums(label) and shape[dim] >= self.walk.parts:
                    wanted = self.walk.cuts.even(shape[dim], dim)
                elif side == "column" and label is not None and label in form.results[0] and label not in beside:
                    found = self.walk.cuts.split(form, position, dim, list(form.results[0]).index(label))
                    wanted = None if found is None else found[1]
                for place in self.walk.candidates(node, operand, wanted) if wanted is not None else ():
                    if self.through(place, views) == wanted:
                        yield place
                        break

    def products(self, node: fx.Node) -> Iterator[tuple[OpSharding, int, list[fx.Node]]]:
        """Yield (form, which operand, the views in between) for products and lookups that use a parameter."""
        stack: list[tuple[fx.Node, list[fx.Node]]] = [(node, [])]
        while stack:
            value, views = stack.pop(0)
            for user, position, form in self.walk.cuts.uses(value):
                if len(form.operands) == 1:
                    stack += [(r, [*views, r]) for r in self.walk.cuts.results(user) if r is not None]
                elif form.multiplies:
                    yield form, position, views

    def through(self, place: Shard, views: list[fx.Node]) -> Shard | None:
        """Return where a shard is after views; None where one of them does not take it."""
        at: Shard | None = place
        for node in views:
            source, index = (node, 0) if node in self.walk.forms else (node.args[0], node.args[1])
            form = self.walk.forms[source]
            strategy = None if form is None or at is None else form.shards(0, at)
            state = None if strategy is None else strategy.results[index]
            at = state if isinstance(state, Shard) else None
        return at

    def beside(self, node: fx.Node, place: Shard, pin: Pin) -> Shard:
        """Return a place within what other axes cut along the same dim, if any do."""
        others = [one.states[node][0] for one in self.walk.before.values()]
        if any(isinstance(s, Shard) and s.dim == place.dim for s in others):
            size, inner = self.context.shape(node)[place.dim], self.walk.within(node, place.dim)
            if inner is None or size % (inner * self.walk.parts):
                why = f"cannot be cut over {self.walk.axis} within the pieces of other axes"
                wrong = f"{pin.text}: dim {place.dim} of {pin.name} is {size}, which {why}"
                raise ConfigError.on("pins", wrong, "another dim, or one axis.")
            return Shard(place.dim, inner, size // (inner * self.walk.parts))
        return place

    def dim(self, node: fx.Node, pin: Pin) -> int:
        """Return the dim that a pin names; :class:`ConfigError` is raised if there is none."""
        rank = len(self.context.shape(node))
        if not -rank <= pin.cut.dim < rank:
            wrong = f"{pin.text}: {pin.name} of {list(self.context.shape(node))} has no dim {pin.cut.dim}"
            legal = f'{", ".join(map(str, range(rank)))} and "whole".' if rank else '"whole".'
            raise ConfigError.on("pins", wrong, legal)
        return pin.cut.dim % rank

    def explicit(self, node: fx.Node, pin: Pin) -> Shard:
        """Return the place that cuts each of the equal parts of a dim which a pin names."""
        dim, parts = self.dim(node, pin), pin.cut.parts or 1
        size = self.context.shape(node)[dim]
        if size % parts or size // parts < self.walk.parts:
            why = f"has no {parts} equal parts with a piece for each of {self.walk.parts} ranks"
            wrong = f"{pin.text}: dim {dim} of {pin.name} is {size}, which {why}"
            raise ConfigError.on("pins", wrong, '"whole", or a dim with them.')
        found: Shard = self.walk.cuts.even(size, dim, parts)
        return found

    # ---- results of modules ----------------------------------------------------------------------------------------

    def result(self, node: fx.Node, pin: Pin) -> Shard | None:
        """Return where the result of a module is cut; None means whole."""
        if pin.cut.side == "whole":
            return None
        if pin.cut.side:
            wrong = f"{pin.text} is of a parameter, and {pin.name} is a module"
            raise ConfigError.on("pins", wrong, 'a dim of its result, such as "1", or "whole".')
        dim = self.dim(node, pin)
        if isinstance(self.context.expressions(node)[dim], int):
            found = self.walk.cuts.best(node, dim, self.context.shape(node)[dim])
            place = self.explicit(node, pin) if pin.cut.parts else None if found is None else found[1]
        else:
            rows = self.walk.rows.states[node][0]
            place = rows if isinstance(rows, Shard) and rows.dim == dim and pin.cut.parts is None else None
        if place is None or not self.walk.fits(node, place):
            what = f"{pin.text}: dim {dim} of what {pin.name} returns, {list(self.context.shape(node))},"
            wrong = f"{what} cannot be cut into pieces for {self.walk.parts} ranks over {self.walk.axis}"
            raise ConfigError.on("pins", wrong, '"whole", or another dim.')
        return place


def check_table(context: ShardingContext, pins: Pins, places: PinnedPlaces) -> None:
    """Raise a :class:`ConfigError` that lists the parameters of several dims that no pin of a table is about."""
    left: dict[str, list[str]] = {}
    for name, node in used_parameters(context).items():
        if len(context.shape(node)) > 1 and node not in pins.parameters:
            left.setdefault(starred(name), places.legal(node))
    if left:
        legal = "; ".join(f'"{name}" = {" or ".join(words)}' for name, words in left.items())
        wrong = 'under tensor_plan = "table" every parameter of several dims needs one'
        raise ConfigError.on("pins", f"{wrong}, and {len(left)} kinds of them have none", f"also {legal}.")
