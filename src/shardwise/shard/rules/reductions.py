"""These rules are for reductions, norms, pooling and sorting: sums over rows are partial sums, most others need dims
whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.core.layout import Factor, Layout
from shardwise.graph.schema import as_result, values_of
from shardwise.ops import local_ops, norms, softmax
from shardwise.ops.env import ROWS
from shardwise.shard.context import ShardingContext
from shardwise.shard.emit import Emitter
from shardwise.shard.op_spec import Emission, OwnCall, Shard, Strategy, sharding
from shardwise.shard.rules.table import (
    Table,
    aligned,
    broadcast,
    dims_of,
    given,
    has_argument,
    may_be_empty,
    op_name,
    pointwise,
    rank_of,
    tensors,
    unary,
    whole_dims,
    with_rows,
)  # fmt: skip

aten = torch.ops.aten
RULES = Table()


def _kept(rank: int, dims: Sequence[int], keep: bool) -> list[Any]:
    return [f"r{d}" if d in dims else d for d in range(rank) if keep or d not in dims]


@RULES.rule("sum", "mean", "nansum", "count_nonzero")
def _sum(context: ShardingContext, node: fx.Node) -> Any:
    x, name = node.args[0], op_name(node)
    rank = rank_of(context, x)
    dims, keep = dims_of(node, rank), bool(given(node, "keepdim", False))
    out = _kept(rank, dims, keep)
    form = context.labelled(node, [(x, range(rank))], out, (0,) if name in ("sum", "mean") else ())

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        """Divide this rank's sum by the number of elements on all ranks, if a mean is over what is sharded."""
        places = [s.operands[0] for s in solved.strategies.values()]
        if not any(isinstance(q, Shard) and q.dim in dims for q in places):
            return emitter.plain(node, solved)
        count = emitter.sizes.product([x.meta["val"].shape[d] for d in dims])
        args = (solved.values[0], count, node.meta["val"].dtype, dims, keep)
        return emitter.emit(node, args, {}, solved.layout, local_ops.mean)

    form.emit = emit if name == "mean" else None
    return form


def _whole(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of a reduction that cannot be finished from partial results."""
    x = node.args[0]
    rank = rank_of(context, x)
    dims, keep = dims_of(node, rank, none=_default_dims(node, rank)), bool(given(node, "keepdim", False))
    labels: list[Any] = [d if d not in dims else None for d in range(rank)]
    out = _kept(rank, dims, keep)
    value = node.meta["val"]
    many = isinstance(value, tuple | list)
    return context.labelled(node, [(x, labels)], [out] * len(value) if many else out, several=many)


def _default_dims(node: fx.Node, rank: int) -> list[int]:
    if op_name(node) == "linalg_matrix_norm":
        return [rank - 2, rank - 1]
    last = op_name(node) in ("kthvalue", "mode") and has_argument(node, "dim")
    return [rank - 1] if last and rank else list(range(rank))


@RULES.rule("histc")
def _histc(context: ShardingContext, node: fx.Node) -> Any:
    if given(node, "min", 0) == given(node, "max", 0):
        return None  # the bins lie between the least and the largest of all elements
    x = node.args[0]
    return context.labelled(node, [(x, range(rank_of(context, x)))], ["bins"])


RULES.same(
    _whole,
    """amax amin argmax argmin prod any all median nanmedian kthvalue mode var std var_mean std_mean linalg_vector_norm
    linalg_norm linalg_matrix_norm norm aminmax""",
)


@RULES.rule("max", "min")
def _max(context: ShardingContext, node: fx.Node) -> Any:
    return pointwise(context, node) if len(tensors(node)) == 2 else _whole(context, node)


@RULES.rule("cosine_similarity", "pairwise_distance")
def _between(context: ShardingContext, node: fx.Node) -> Any:
    operands = tensors(node)
    sizes = broadcast(context, operands)
    dim = (given(node, "dim", 1) if op_name(node) == "cosine_similarity" else -1) % len(sizes)
    keep = bool(given(node, "keepdim", False))
    pairs = [(o, [lab if lab != dim else None for lab in labels]) for o, labels in aligned(context, operands, sizes)]
    return context.labelled(node, pairs, _kept(len(sizes), [dim], keep))


# ---- along a dim -----------------------------------------------------------------------------------------------------

_named = whole_dims(lambda n, r: dims_of(n, r))
_last = whole_dims(lambda n, r: dims_of(n, r, none=[-1]))

RULES.same(_named, "_softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin")
RULES.same(_last, "sort argsort topk")
RULES.same(
    whole_dims(lambda n, r: dims_of(n, r, none=[-1]), never_empty=True),
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft",
)
RULES.same(
    whole_dims(lambda n, r: dims_of(n, r, none=[-2, -1]), never_empty=True), "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"
)
RULES.same(
    whole_dims(lambda n, r: dims_of(n, r, none=range(-len(given(n, "s") or range(r)), 0)), never_empty=True),
    "fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift fft_ifftshift",
)
RULES["msort"] = whole_dims(lambda n, r: [0])

FEW = 8
"""A softmax of fewer numbers per rank than this (a router's experts) gathers them rather than exchange statistics."""


@RULES.rule("softmax", "log_softmax", "logsumexp")
def _softmax(context: ShardingContext, node: fx.Node) -> Any:
    """Let ranks exchange two numbers per row along a dim that is shared out."""
    x, name = node.args[0], op_name(node)
    sums = name == "logsumexp"
    form = (_whole if sums else _named)(context, node)
    dims = dims_of(node, rank_of(context, x))
    if len(dims) != 1:
        return form
    (dim,) = dims

    def moves(position: int, place: Shard) -> Strategy | None:
        if place.dim != dim:
            return form.by_label(position, place)
        simple = (
            isinstance(place.pre, int)
            and not place.parts
            and context.shape(x)[dim] >= FEW * math.prod(context.tensor.axes.values())
        )
        return Strategy((place,), ("I" if sums else place,)) if simple and context.shared_out(x, place) else None

    def call(strategies: Mapping[str, Strategy], values: Sequence[Any]) -> OwnCall | None:
        axes = sharding(strategies, dim)
        if not axes:
            return None
        if sums:
            return OwnCall(softmax.logsumexp, (*values, dim, axes, bool(given(node, "keepdim", False))))
        return OwnCall(softmax.softmax, (*values, dim, axes, given(node, "dtype"), name == "log_softmax"))

    form.moves, form.call, form.factors = moves, call, True
    return form


# ---- norms -----------------------------------------------------------------------------------------------------------


@RULES.rule("layer_norm", "rms_norm")
def _layer_norm(context: ShardingContext, node: fx.Node) -> Any:
    x, shape = node.args[:2]
    rank = rank_of(context, x)
    labels: list[Any] = [d if d < rank - len(shape) else None for d in range(rank)]
    operands = [(x, labels), *((o, [None] * rank_of(context, o)) for o in tensors(node)[1:])]
    form = context.labelled(node, operands, [d if d is not None else "w" for d in labels])
    if len(shape) > 1:
        return form

    def moves(position: int, place: Shard) -> Strategy | None:
        """Let ranks exchange what a row's statistics need along the width."""
        width = rank - 1 if position == 0 else 0
        if place.dim != width or place.pre != 1 or context.size(operands[position][0], place) == context.rows:
            return form.by_label(position, place)
        x_at, at = Shard(rank - 1, 1, place.post), Shard(0, 1, place.post)
        return Strategy((x_at, *[at] * (len(operands) - 1)), (x_at,))

    def call(strategies: Mapping[str, Strategy], values: Sequence[Any]) -> OwnCall | None:
        axes = sharding(strategies, rank - 1)
        if not axes:
            return None
        value, *rest = values
        feed = iter(rest)
        weight, bias = (next(feed) if isinstance(given(node, name), fx.Node) else None for name in ("weight", "bias"))
        eps = given(node, "eps", 1e-5 if op_name(node) == "layer_norm" else None)
        args = (value, weight, bias, eps, context.shape(x)[-1], axes, op_name(node) == "layer_norm")
        return OwnCall(norms.norm_of_width, args)

    form.moves, form.call = moves, call
    return form


@RULES.rule("batch_norm")
def _fixed_norm(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of a norm whose statistics are fixed.  (BatchNorm in training is ``norms.batch_norm``.)"""
    operands = tensors(node)
    rank = rank_of(context, node)
    pairs = [(operands[0], ["b", "c", *[None] * (rank - 2)]), *((o, ["c"]) for o in operands[1:])]

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        places = [q for s in solved.strategies.values() if isinstance(q := s.operands[0], Shard) and q.dim == 1]
        if not any(may_be_empty(context, operands[0], q) for q in places):
            return emitter.plain(node, solved)
        args, _ = emitter.filled(node, solved.values)
        return emitter.emit(node, args, {}, solved.layout, norms.fixed_batch_norm)

    return context.labelled(node, pairs, ["b", "c", *[f"w{d}" for d in range(2, rank)]], emit=emit, factors=True)


@RULES.rule("group_norm", "instance_norm")
def _group_norm(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of a norm with statistics of each sample and group of channels; an instance norm has one channel
    in each group."""
    operands = tensors(node)
    if given(node, "running_mean") is not None:
        return None
    rank, channels = rank_of(context, node), context.shape(node)[1]
    each = channels // given(node, "num_groups", channels)
    pairs = [(operands[0], ["b", "c", *[None] * (rank - 2)]), *((o, ["c"]) for o in operands[1:])]
    form = context.labelled(node, pairs, ["b", "c", *[f"w{d}" for d in range(2, rank)]])

    def moves(position: int, place: Shard) -> Strategy | None:
        """Cut channels where groups begin."""
        of_channels = form.operands[position][1][place.dim] == "c"
        return None if of_channels and place.post % each else form.by_label(position, place)

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        feed = iter(solved.values[1:])
        weight, bias = (next(feed) if given(node, name) is not None else None for name in ("weight", "bias"))
        args = (solved.values[0], each, weight, bias, given(node, "eps", 1e-5))
        if not any(isinstance(q := s.operands[0], Shard) and q.dim == 1 for s in solved.strategies.values()):
            groups = (args[0], channels // each, *args[2:])
            return emitter.emit(node, groups, {}, solved.layout, aten.group_norm.default)
        return emitter.emit(node, args, {}, solved.layout, norms.group_norm)

    form.moves, form.emit, form.factors = moves, emit, True
    form.grain = {0: Shard(1, 1, each)} if each > 1 else {}
    return form


def batch_norm(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of BatchNorm over dim 0 of all ranks, channel by channel; the other dims are gathered."""
    operands = tensors(node)
    shapes = context.shapes(node)
    rank = len(shapes[0])
    labels: list[Any] = ["b", "c", *[None] * (rank - 2)]
    out = [["b", "c", *[f"w{d}" for d in range(2, rank)]], *[["c"]] * (len(shapes) - 1)]
    form = context.labelled(
        node, [(operands[0], labels), *((o, ["c"]) for o in operands[1:])], out, several=True,
        alike=frozenset(range(1, len(shapes))),
    )  # fmt: skip

    def moves(position: int, place: Shard) -> Strategy | None:
        if labels[place.dim] == "b" and position == 0:
            return form.by_label(position, place)
        every = form.by_label(position, place)
        at = Shard(0, place.pre, place.post)
        return every and Strategy(every.operands, (every.results[0], *[at] * (len(shapes) - 1)))

    def call(strategies: Mapping[str, Strategy], values: Sequence[Any]) -> OwnCall | None:
        axes = sharding(strategies, 0)
        if not axes or apart(axes):
            return None
        rest = iter(values[1:])
        others = (next(rest) if a in operands[1:] else a for a in node.args[1:])
        return OwnCall(norms.sync_batch_norm, (values[0], *others, axes))

    def apart(axes: Sequence[str]) -> bool:
        """Whether statistics are an op of their own, which microbatches exchange."""
        return context.over_batch and ROWS in axes

    def emit(emitter: Emitter, solved: Emission) -> fx.Node:
        axes = sharding(solved.strategies, 0)
        if not apart(axes):
            return emitter.plain(node, solved)
        args, _ = emitter.filled(node, solved.values)
        return _norm_by_statistics(emitter, node, args, axes, solved.layouts)

    form.moves, form.call, form.emit = moves, call, emit
    return form


def _norm_by_statistics(
    emitter: Emitter, node: fx.Node, args: Sequence[Any], axes: tuple[str, ...], layouts: Sequence[Layout]
) -> fx.Node:
    """Emit a BatchNorm as statistics of this rank's rows, their exchange over ``axes``, and what is made of them."""
    x, *_ = values_of(node)
    dtype = torch.promote_types(x.dtype, torch.float32) if args[3] is None else args[3].meta["val"].dtype
    channels, each, value = x.shape[1], layouts[0].dims[1], args[0]
    for function, more, whole in (
        (norms.batch_statistics, (dtype,), (1, 3, channels)),
        (norms.combined_statistics, (axes,), (3, channels)),
    ):
        env = (emitter.env,) if function is norms.combined_statistics else ()
        new = emitter.graph.call_function(function, (*env, value, *more))
        layout = Layout((*((Factor(size),) for size in whole[:-1]), each))
        emitter.annotate(new, layout, dict.fromkeys(emitter.groups, "R"), bool(value.meta["grad"]), node)
        new.meta["val"] = x.new_empty(whole, dtype=dtype)
        value = new
    return emitter.emit(node, (*args, value), {}, as_result(node, layouts), norms.batch_norm_by)


@RULES.rule("_weight_norm")
def _weight_norm(context: ShardingContext, node: fx.Node) -> Any:
    """Let ranks add up the squares of a weight that they share out along other dims than that which is kept."""
    v, g = node.args[:2]
    dim, labels = given(node, "dim", 0), list(range(rank_of(context, v)))
    if dim < 0 or rank_of(context, g) != len(labels):
        return None
    form = context.labelled(node, [(v, labels), (g, [d if d == dim else None for d in labels])], labels)

    def moves(position: int, place: Shard) -> Strategy | None:
        if place.dim == dim:
            return form.by_label(position, place)
        known = position == 0 and isinstance(context.size(v, place), int)
        return Strategy((place, "R"), (place,)) if known else None

    def call(strategies: Mapping[str, Strategy], values: Sequence[Any]) -> OwnCall | None:
        axes = tuple(axis for d in labels if d != dim for axis in sharding(strategies, d))
        places = [q for s in strategies.values() if isinstance(q := s.operands[0], Shard)]
        own = axes or any(may_be_empty(context, v, place) for place in places)  # torch's kernel fails without elements
        return OwnCall(norms.weight_norm, (*values, dim, axes)) if own else None

    form.moves, form.call, form.factors = moves, call, True
    return form


# ---- pooling and resampling ------------------------------------------------------------------------------------------


def _channels(node: fx.Node, rank: int) -> int:
    """Return the dim of channels: that before those which are pooled or resized, whose number is in the op's name."""
    return rank - 1 - next(int(c) for c in op_name(node) if c.isdigit())


_within_channels = whole_dims(lambda n, r: range(_channels(n, r) + 1, r))


@RULES.rule("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
            "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
            "adaptive_max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
            "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")  # fmt: skip
def _pooling(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of an op on each channel by itself; its kernel needs at least one of them."""
    form = _within_channels(context, node)
    channels = _channels(node, rank_of(context, tensors(node)[0]))
    form.emit = functools.partial(with_rows, node, needed=[channels])
    return form


_sample = whole_dims(lambda n, r: range(1, r))
RULES["channel_shuffle"] = _sample


@RULES.rule("im2col", "col2im")
def _patches(context: ShardingContext, node: fx.Node) -> Any:
    """Return the form of patches of a batch, channel by channel; a single image has channels in dim 0, and patches
    within them."""
    taken, x = op_name(node) == "im2col", node.args[0]
    if rank_of(context, x) != (4 if taken else 3):
        return None
    each = math.prod(given(node, "kernel_size"))

    def moves(position: int, place: Shard) -> Strategy | None:
        if place.dim == 0:
            return Strategy((place,), (place,))
        after, rest = (place.post * each, 0) if taken else divmod(place.post, each)
        if place.dim > 1 or rest or may_be_empty(context, x, place):
            return None
        return Strategy((place,), (place._replace(post=after),))

    return unary(context, node, moves, lambda emitter, solved: emitter.plain(node, solved), factors=True)


RULES.same(whole_dims(lambda n, r: range(r - 3, r), never_empty=True), "pixel_shuffle pixel_unshuffle")
