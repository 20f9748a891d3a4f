"""The weight gradients of products are computed outside of backward: their operands become outputs of the unit.

A *product* is an op that is linear in a parameter: a linear, a matrix product, a convolution, a grouped product of
experts, an embedding (a product with rows of the identity). The gradient of its weight needs only the input X and the
output's gradient dY. A unit that trains computes its products with detached weights and returns, for each, X and the
*edge* of Y in the autograd graph: backward then gives dY as one of its results, and the caller multiplies the two when
and where it likes: straight into the gradient buffer, without a copy, or later.

The table ``PRODUCTS`` says which ops are products; autograd computes all other gradients (of biases, norms, slices of
parameters). The weight of a product may be a parameter with its dims permuted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.graph.aten_ops import FACTORS, Fact, may_share, named, permutation
from shardwise.graph.schema import given, op_name, outputs_of
from shardwise.ops import collectives
from shardwise.ops.own_op import own_op
from shardwise.ops.weight_gradients import TABLE, GradientFactors, convolved, grouped
from shardwise.shard.redistribute import communicated

aten = torch.ops.aten


class Operand(NamedTuple):
    """What a unit returns for a product: all factors of its weight gradient but dY, which arrives at the edge ``y``. Of
    ranks that compute the same product one ``counts``. If ``meets``, the gradient of X goes straight to a collective.
    """

    kind: str
    x: Tensor
    dims: tuple[int, ...] | None
    rest: tuple[Any, ...]
    y: GradientEdge
    counts: bool
    meets: bool

    def factors(self, weight: str, dy: Tensor) -> GradientFactors:
        """Return the factors of the gradient of the parameter ``weight``, given dY."""
        return GradientFactors(weight, dy, self.kind, self.x, self.dims, self.rest)


# ---- in the graph of a unit ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A node that is a product; its weight is argument ``at`` and is the unit's parameter number ``parameter``.

    All ranks over the axes ``alike`` compute the same product. ``meets`` says that the gradient of X goes straight to a
    collective. ``forward``, if given, computes the product in place of the op, from X, weight, bias and ``rest``.
    """

    kind: str
    x: fx.Node
    at: int
    parameter: int
    dims: tuple[int, ...] | None
    alike: tuple[str, ...]
    meets: bool
    rest: tuple[Any, ...]
    forward: Callable[..., Tensor] | None


def find(graph: fx.Graph, trainable: Sequence[bool]) -> dict[fx.Node, Product]:
    """Return the products of a unit's graph whose weights are ``trainable`` parameters."""
    parameters = [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("p")]
    learning = {n: i for i, (n, learns) in enumerate(zip(parameters, trainable, strict=True)) if learns}
    found: dict[fx.Node, Product] = {}
    for node in graph.nodes:
        name = op_name(node)
        if name not in PRODUCTS or len(node.args) <= max(FACTORS[name]):
            continue
        rule, (at_x, at) = PRODUCTS[name], FACTORS[name]
        x, weight = node.args[at_x], node.args[at]
        source, dims, alike = _source(weight)
        real = source in learning and not weight.meta["val"].is_complex()  # complex gradients need a conjugate
        form = rule.form(node, x, weight) if real else None
        if form is not None:
            kind, *rest = form
            meets = bool(communicated(x)[1])
            found[node] = Product(kind, x, at, learning[source], dims, alike, meets, tuple(rest), rule.forward)
    return found


def inside(graph: fx.Graph, trainable: Sequence[bool], found: Mapping[fx.Node, Product]) -> tuple[int, ...]:
    """Return the trainable parameters that are read other than as a product's weight: autograd has their gradient."""

    def elsewhere(node: fx.Node) -> bool:
        for user in node.users:
            if permutation(user) is not None or user.target is collectives.own:
                if elsewhere(user):
                    return True
            elif user not in found or [i for i, a in enumerate(user.args) if a is node] != [found[user].at]:
                return True
        return False

    parameters = [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("p")]
    return tuple(i for i, n in enumerate(parameters) if trainable[i] and elsewhere(n))


def lookups(graph: fx.Graph, found: Mapping[fx.Node, Product]) -> dict[int, tuple[fx.Node, ...]]:
    """Return the parameters, by number, that are read as the tables of sparse lookups alone, with the numbers that each
    lookup is given."""
    parameters = [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("p")]
    tables: dict[int, tuple[fx.Node, ...]] = {}
    for at, parameter in enumerate(parameters):
        reads = [found.get(user) for user in parameter.users]
        if reads and all(one is not None and one.kind == TABLE and one.parameter == at for one in reads):
            tables[at] = tuple(one.x for one in reads if one is not None)
    return tables


def held(graph: fx.Graph, found: Mapping[fx.Node, Product]) -> list[tuple[str, int]]:
    """Return the inputs and outputs of a unit that may share memory with the X of a product, as ("input", index) and
    ("output", index)."""
    wanted = {_base(one.x) for one in found.values()}
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("i")]
    places = (("input", inputs), ("output", outputs_of(graph)))
    return [(kind, i) for kind, nodes in places for i, n in enumerate(nodes) if _base(n) in wanted]


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose memory ``node`` may share, by way of views; it may be ``node`` itself."""
    while node.op == "call_function" and may_share(node):
        sources = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), Tensor | tuple | list)]
        if not sources:
            break
        node = sources[0]
    return node


def expose(graph: fx.Graph, found: Mapping[fx.Node, Product]) -> fx.Graph:
    """Copy a unit's graph with more outputs: the fields of an :class:`Operand` for each of the products ``found``."""
    new = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    operands: list[Any] = []
    for node in graph.nodes:
        if node.op == "output":
            new.output((*fx.map_arg(node.args[0], lambda a: copies[a]), *operands))
            continue
        copies[node] = copy = new.node_copy(node, lambda a: copies[a])
        if node in found:
            one = found[node]
            with new.inserting_before(copy):
                weight = new.call_function(aten.detach.default, (copies[node.args[one.at]],))
            copy.update_arg(one.at, weight)
            if one.forward is not None:
                bias = given(copy, "bias")
                copy.target, copy.kwargs = one.forward, {}
                copy.args = (copies[one.x], weight, bias, *fx.map_arg(one.rest, lambda a: copies[a]))
            copies[node] = new.call_function(begun, (copy,))
            y = new.call_function(edge, (copies[node],))
            counts = (
                new.call_function(collectives.is_first, (copies[next(iter(graph.nodes))], one.alike))
                if one.alike
                else True
            )
            operands.append(
                (one.kind, copies[one.x], one.dims, fx.map_arg(one.rest, lambda a: copies[a]), y, counts, one.meets)
            )
    return new


@own_op(shares=True, blind=True)
def begun(y: Tensor) -> Tensor:
    """Return ``y``, as the start of an autograd graph if it does not require a gradient."""
    return y if y.requires_grad else start([y])[0]


def start(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return ``tensors`` as the start of an autograd graph, which does not keep them alive as it keeps leaves."""
    begun: tuple[Tensor, ...] = _Start.apply(torch.empty(0, requires_grad=True), tensors)  # type: ignore[no-untyped-call]
    return begun


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def edge(y: Tensor) -> GradientEdge:
    """Return the edge at which the gradient of ``y`` arrives; it does not keep ``y`` alive."""
    return get_gradient_edge(y)


# ---- which ops -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """How an op is a product: ``form`` gives the kind and ``rest`` of a call, given X and the weight, or None if the
    call is no product."""

    form: Callable[[fx.Node, fx.Node, fx.Node], tuple[str, *tuple[Any, ...]] | None]
    # It replaces an op whose backward would compute the weight's gradient in any case.
    forward: Callable[..., Tensor] | None = None


def _rank(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _left(node: fx.Node, x: fx.Node, weight: fx.Node) -> tuple[str] | None:
    return ("linear",) if _rank(weight) == 2 else None


def _right(node: fx.Node, x: fx.Node, weight: fx.Node) -> tuple[str] | None:
    """The weight is one matrix, or a batch of as many as X has; a scaled product (``alpha``) is none."""
    if given(node, "alpha", 1) != 1:
        return None
    if _rank(weight) == 3:
        first = x.meta["val"].shape[0]
        return (
            ("batched",) if _rank(x) == 3 and isinstance(first, int) and first == weight.meta["val"].shape[0] else None
        )
    return ("right",) if _rank(weight) == 2 else None


def _groups(node: fx.Node, x: fx.Node, weight: fx.Node) -> tuple[str, Any] | None:
    """X has rows in groups, and the weight has a matrix for each group."""
    offsets, kind = given(node, "offs"), "grouped" if op_name(node) == "_grouped_mm" else "in turn"
    plain = given(node, "out_dtype") is None and isinstance(offsets, fx.Node)
    return (kind, offsets) if plain and _rank(x) == 2 and _rank(weight) == 3 else None


def _filters(node: fx.Node, x: fx.Node, weight: fx.Node) -> tuple[str, *tuple[Any, ...]] | None:
    """``rest`` has the arguments of ``aten.convolution_backward`` after the weight and the bias's sizes."""
    size = [int(s) for s in weight.meta["val"].shape[2:]]

    def each(name: str, default: int) -> list[int]:
        value = given(node, name, default)
        value = [value] if isinstance(value, int) else list(value)
        return value * len(size) if len(value) == 1 else value

    dilation, padding = each("dilation", 1), given(node, "padding", 0)
    if isinstance(padding, str):
        both = [d * (s - 1) if padding == "same" else 0 for d, s in zip(dilation, size, strict=True)]
        if any(b % 2 for b in both):  # padding that differs between the two sides has no form in `rest`
            return None
        pad = [b // 2 for b in both]
    else:
        pad = each("padding", 0)
    transposed = bool(given(node, "transposed", op_name(node).startswith("conv_transpose")))
    return (
        "convolution",
        each("stride", 1),
        pad,
        dilation,
        transposed,
        each("output_padding", 0),
        given(node, "groups", 1),
    )


def _rows(node: fx.Node, x: fx.Node, weight: fx.Node) -> tuple[str, int] | None:
    """``rest`` is the index of the row without a gradient, or -1; scaled gradients are left to autograd."""
    if given(node, "scale_grad_by_freq", False):
        return None
    padding, kind = given(node, "padding_idx", -1), TABLE if given(node, "sparse", False) else "embedding"
    return (kind, padding) if isinstance(padding, int) else None


PRODUCTS: Mapping[str, _Rule] = {
    "embedding": _Rule(_rows),
    "linear": _Rule(_left),
    **dict.fromkeys(("mm", "matmul", "bmm", "addmm", "baddbmm"), _Rule(_right)),
    "_grouped_mm": _Rule(_groups),
    **dict.fromkeys(("transformers::grouped_mm_fallback", "shardwise::grouped_mm"), _Rule(_groups, grouped)),
    **dict.fromkeys(named(Fact.CONVOLUTION), _Rule(_filters, convolved)),
}
"""The rules by the name of the op; each name is a key of ``FACTORS``."""


def _source(node: Any) -> tuple[Any, tuple[int, ...] | None, tuple[str, ...]]:
    """Return the node under views that only permute dims, the permutation of them all, and the axes over which all
    ranks use the node in the same way.
    """
    dims, alike = None, ()
    while isinstance(node, fx.Node):
        if node.target is collectives.own:
            alike, node = node.args[2], node.args[1]
        elif (step := permutation(node)) is not None:
            dims = step if dims is None else tuple(step[d] for d in dims)
            node = node.args[0]
        else:
            break
    return node, dims, alike


# ---- in backward, and after it ---------------------------------------------------------------------------------------


class Multiplier(ABC):
    """Computes weight gradients as soon as backward has their factors.

    If the gradient of X goes to a collective, the product is kept until :meth:`flush`, which runs between the posting
    of the collective and the wait for it, so that the two overlap. At most one product is kept.
    """

    def __init__(self) -> None:
        self.held: list[GradientFactors] = []

    @abstractmethod
    def multiply(self, factors: GradientFactors) -> None:
        """Compute a weight gradient."""

    def behind(self, factors: GradientFactors) -> None:
        """Keep these factors for the next collective, and compute those kept before: of several products with the same
        X only the last is followed by the collective.
        """
        self.flush()
        self.held.append(factors)

    def flush(self) -> None:
        """Compute the weight gradient whose factors are kept, if any."""
        while self.held:
            self.multiply(self.held.pop())


def watch(
    names: Sequence[str],
    operands: Sequence[Operand],
    add: Callable[[GradientFactors], None],
    behind: Callable[[GradientFactors], None],
) -> list[tuple[str, Operand]]:
    """Have ``add`` called as soon as backward has a product's dY, while it is in the cache, or ``behind`` if the
    gradient of X goes straight to a collective.

    ``names`` are the products' weights. Return the products that backward would not pass, for their X has no gradient:
    the caller has to ask backward for their dY.
    """
    later = []
    for name, one in zip(names, operands, strict=True):
        if not one.x.requires_grad:
            # Products that do not count are returned too: their dY may need collectives, which all ranks must join.
            later.append((name, one))
            continue
        if not one.counts:
            continue
        held = [one._replace(x=one.x.detach())]

        def arrive(grads: Sequence[Tensor | None], name: str = name, held: list[Operand] = held) -> None:
            operand = held.pop()  # frees X, unless it is deferred
            dy = grads[operand.y.output_nr]
            if dy is not None:
                (behind if operand.meets else add)(operand.factors(name, dy))

        one.y.node.register_prehook(arrive)
    return later
