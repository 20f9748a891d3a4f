"""Selective recomputation: the results of products and attention are kept, and everything else of a unit is computed
again just before its backward.

Matrix products, convolutions and attention are most of the arithmetic and a small part of what autograd saves
(Korthikanti et al. 2022). The training graph of a unit calls each of them through :func:`recalled`. FORWARD runs the
op alone, as a small autograd graph on a :class:`Tape`; RECOMPUTE takes the result from there, and backward runs the
small graph. So no kernel is chosen anew, and the numbers are those without recomputation, bit for bit.

A small graph holds none of its inputs. If autograd saves an input or a view of one, the graph holds a reference, which
is looked up among the inputs of RECOMPUTE, so parameters may have moved by then. The graph keeps whatever else autograd
saves: the op's output and statistics. An op whose statistics are larger than its result (attention with dropout saves
its probabilities) is computed again like any other.

Everything else is computed twice, as under full recomputation. RECOMPUTE leaves out the collectives whose results no
backward reads (:func:`unread`), such as the all-reduce after the last product of a block, and repeats the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from shardwise.core.errors import ShardwiseError
from shardwise.graph.aten_ops import Fact, is_blind, named
from shardwise.graph.schema import op_name, tensors_in
from shardwise.graph.torch_private import storage_key
from shardwise.ops import collectives, own_op, random_ops, weight_gradients
from shardwise.ops.env import Env
from shardwise.ops.silent import Silent
from shardwise.units import weight_products

KEPT = named(Fact.MATRIX_PRODUCT | Fact.GROUPED_PRODUCT | Fact.CONVOLUTION | Fact.ATTENTION)
"""The names of the ATen ops whose results are kept."""

OWN = own_op.named((random_ops, weight_gradients), lambda facts: facts.kept)
"""The functions of shardwise whose results are kept, by the names that stand for them in a graph."""

MOVES = own_op.named((collectives,), collectives.communicates_forward)
"""The moves that communicate in forward, by the names that stand for them in a graph."""


def recallable(graph: fx.Graph, own: int, inner: Collection[int] = ()) -> fx.Graph:
    """Copy a unit's training graph so that it calls ops to be kept through :func:`recalled`, and moves whose results
    nobody reads through :func:`unread`.

    The first ``own`` outputs are those of the unit. RECOMPUTE makes them only for their autograd graphs: nobody reads
    their values then, but for those of ``inner`` numbers, which other units of the block read.
    """
    names = {function: name for name, function in (*OWN.items(), *MOVES.items())}
    read = _read(graph, own, inner)
    new = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    env: Any = None
    count = 0
    for node in graph.nodes:
        copies[node] = new.node_copy(node, lambda a: copies[a])
        if env is None:
            env = copies[node]  # the first placeholder
        target: Any = node.target
        if node.op == "call_function" and target in MOVES.values():
            if node not in read:
                copies[node].target = unread
                copies[node].args = (env, names[target], *copies[node].args[1:])
        elif node.op == "call_function" and (target in names or op_name(node) in KEPT):
            copies[node].target = recalled
            copies[node].args = (env, count, node in read, names.get(target, target), *copies[node].args)
            count += 1
    return new


def note_unread(graph: fx.Graph, exposed: fx.Graph, own: int, inner: Collection[int] = ()) -> None:
    """Note in the metadata of each move of a unit's graph whether its recomputation leaves it out; ``exposed`` is the
    unit's training graph, which has the same moves.
    """
    read = _read(exposed, own, inner)
    moves = ((n for n in g.nodes if n.target in MOVES.values()) for g in (graph, exposed))
    for mine, theirs in zip(*moves, strict=True):
        mine.meta["unread"] = theirs not in read


def _read(graph: fx.Graph, own: int, inner: Collection[int] = ()) -> set[fx.Node]:
    """Return the nodes whose values, and not only their shapes, RECOMPUTE or backward may need."""
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            fx.map_arg([out for i, out in enumerate(node.args[0]) if i >= own or i in inner], read.add)
        elif (
            node.op == "call_function"
            and (node in read or not is_blind(node))
            and node.target is not weight_products.edge
        ):
            read.update(node.all_input_nodes)
    return read


def recalled(env: Env, number: int, read: bool, op: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return ``op(*args, **kwargs)``; if there is an ``env.tape``, the result is kept on it, or taken from it.

    ``number`` is the number of the op in its unit. ``read`` says whether RECOMPUTE or backward needs the values of the
    result, and not only its shape.
    """
    function = OWN[op] if isinstance(op, str) else op
    if env.tape is None:
        result: Tensor = function(*args, **kwargs)
        return result
    return env.tape.run(number, read, function, args, kwargs)  # type: ignore[no-any-return]


def unread(env: Env, move: str, *args: Any) -> Tensor:
    """Call a move whose result nobody reads in RECOMPUTE: there it communicates nothing, and its result has the right
    shape and the values NaN. Its backward communicates as always.
    """
    if not env.again:
        return MOVES[move](env, *args)
    mine = replace(env, comm=Silent(torch.nan))
    result = MOVES[move](mine, *args)
    mine.comm = env.comm
    return result


class Tape:
    """The results that one run of a unit has kept; FORWARD makes it, and RECOMPUTE and backward use it up."""

    def __init__(self) -> None:
        self.kept: dict[int, _Kept | None] = {}
        self.recording = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep the results of the ops that run inside this context.

        Autograd is on, so that the same kernels are chosen as without recomputation, but it saves nothing.
        """
        self.recording = True
        with torch.enable_grad(), saved_tensors_hooks(_forget, _remember):
            yield
        self.recording = False

    def run(self, number: int, read: bool, op: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        """Run ``op`` and keep its result, or return the result that was kept."""
        if self.recording:
            result, self.kept[number] = _keep(read, op, args, kwargs)
            return result
        kept = self.kept.pop(number)
        if kept is None:
            return op(*args, **kwargs)
        return kept.replay(tensors_in((args, kwargs)))


def _forget(tensor: Tensor) -> None:
    return None


def _remember(nothing: None) -> Tensor:
    raise ShardwiseError("backward through a FORWARD that was to be computed again")


# ---- one kept op -----------------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """The result of an op, with its values if somebody reads them, and the small autograd graph of the op."""

    like: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
    value: Tensor | None
    learns: bool  # whether the result requires a gradient
    end: GradientEdge | None  # the result's edge in the small graph; None if no input has a gradient
    starts: dict[int, GradientEdge]  # the edges of the inputs that have gradients, by position
    views: dict[int, tuple[torch.Size, tuple[int, ...]]]  # the shape and strides of the inputs that backward reads
    inputs: dict[int, Tensor]  # these inputs while backward runs, else empty

    def replay(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the result as a function of ``inputs``, the recomputed inputs of the op; raises
        :class:`ShardwiseError` if an input that backward reads has another shape or other strides than before.
        """
        for i, form in self.views.items():
            if (inputs[i].shape, inputs[i].stride()) != form:
                raise ShardwiseError(
                    f"recomputation gave {tuple(inputs[i].shape)}, strides {inputs[i].stride()}; it was "
                    f"{tuple(form[0])}, {form[1]}"
                )
        if self.end is None:
            return self.take().requires_grad_(self.learns)
        result: Tensor = _Replay.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return result

    def take(self) -> Tensor:
        """Return the result's values, NaN if none were kept; they can be taken once."""
        shape, stride, dtype, device = self.like
        value, self.value = self.value, None
        if value is None:
            value = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            if dtype.is_floating_point or dtype.is_complex:
                value.fill_(torch.nan)
        return value.detach()


class _Replay(torch.autograd.Function):
    """Returns a kept result; its backward runs the small graph."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, *inputs: Tensor) -> Tensor:
        ctx.kept = kept
        ctx.save_for_backward(*(inputs[i] for i in kept.views))
        return kept.take()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, ctx.kept = ctx.kept, None  # the small graph is freed with its backward
        wanted = [i for i in kept.starts if ctx.needs_input_grad[1 + i]]
        kept.inputs.update(zip(kept.views, ctx.saved_tensors, strict=True))
        found = torch.autograd.grad([kept.end], [kept.starts[i] for i in wanted], grads, allow_unused=True)
        kept.inputs.clear()
        by_position = dict(zip(wanted, found, strict=True))
        return None, *(by_position.get(i) for i in range(len(ctx.needs_input_grad) - 1))


def _keep(read: bool, op: Callable[..., Tensor], args: Any, kwargs: Any) -> tuple[Tensor, _Kept | None]:
    """Run ``op`` as an autograd graph of its own; return the detached result and what is kept, which is None if
    autograd saves more bytes than the result has, or if the result shares memory with an input.
    """
    given = tensors_in((args, kwargs))
    learning = [i for i, t in enumerate(given) if t.requires_grad]
    alone = [t.detach() for t in given]
    if learning:
        for i, t in zip(learning, weight_products.start([given[i] for i in learning]), strict=True):
            alone[i] = t
    saver = _Saver(list(alone))
    feed = iter(alone)
    args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: next(feed) if isinstance(a, Tensor) else a)
    with saved_tensors_hooks(saver.pack, saver.unpack):
        result = op(*args, **kwargs)
    value = result.detach()
    cut = result.detach().requires_grad_(result.requires_grad)
    saver.sources.clear()  # autograd holds the saver, which must not hold the inputs
    key = storage_key(value)
    beside = sum(size for k, size in saver.held.items() if k != key)
    if beside > value.untyped_storage().nbytes() or any(storage_key(t) == key for t in given):
        return cut, None
    end = get_gradient_edge(result) if result.grad_fn is not None else None
    starts = {i: get_gradient_edge(alone[i]) for i in learning} if end is not None else {}
    views = {i: (given[i].shape, given[i].stride()) for i in sorted(saver.viewed)}
    like = (value.shape, value.stride(), value.dtype, value.device)
    return cut, _Kept(like, value if read else None, result.requires_grad, end, starts, views, saver.inputs)


@dataclass
class _View:
    """Describes a view of the input at position ``index``."""

    index: int
    offset: int  # in elements, from the input's first element
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass
class _Saver:
    """The hooks for what autograd saves for an op: they replace the inputs ``sources`` by references, and count in
    ``held`` the bytes of each other storage that is saved.
    """

    sources: list[Tensor]
    viewed: set[int] = field(default_factory=set)
    held: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)  # the inputs that references mean while backward runs

    def pack(self, tensor: Tensor) -> _View | Tensor:
        """Return a reference to an input if ``tensor`` is a view of one, else the tensor without its graph."""
        key = storage_key(tensor)
        aliases = [i for i, s in enumerate(self.sources) if storage_key(s) == key]
        for i in aliases:
            if (view := _view(i, self.sources[i], tensor)) is not None:
                self.viewed.add(i)
                return view
        tensor = tensor.clone() if aliases else tensor.detach()  # a clone does not keep the input's memory alive
        self.held[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def unpack(self, saved: _View | Tensor) -> Tensor:
        """Return the tensor that was packed; a reference is looked up."""
        if isinstance(saved, Tensor):
            return saved
        source = self.inputs[saved.index]
        return source.detach().as_strided(saved.shape, saved.stride, source.storage_offset() + saved.offset)


def _view(index: int, source: Tensor, tensor: Tensor) -> _View | None:
    """Return ``tensor`` as a view of ``source``, whose storage it shares; None if it lies outside of ``source``, as
    another parameter of the same bucket does, or has another dtype.
    """
    same = (tensor.dtype, tensor.is_conj(), tensor.is_neg()) == (source.dtype, source.is_conj(), source.is_neg())
    offset = tensor.storage_offset() - source.storage_offset()
    if same and offset >= 0 and offset + _extent(tensor) <= _extent(source):
        return _View(index, offset, tensor.shape, tensor.stride())
    return None


def _extent(x: Tensor) -> int:
    """Return the number of elements of memory from the first element of ``x`` to its last."""
    return sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
