"""Views, slices, concatenations: where the rows are after a change of shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise.core.layout import Layout
from shardwise.trace.rules.table import Table, aligned, given, op_name, rank_of, tensors, whole_dims
from shardwise.trace.sharding import Propagation
from shardwise.trace.sizes import expression, ratio, regrouped

aten = torch.ops.aten
RULES = Table()

_END = 1 << 62  # slices to the end of a dim end at the largest integer


@RULES.rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten", "ravel")
def _view(p: Propagation, node: fx.Node) -> Any:
    """A row-major regrouping of dims: the sharded rows stay in one dim, or the operand is gathered."""
    if node.target is aten.view.dtype:
        return None
    x = node.args[0]
    value, place, shape = p.value[x], p.place(x), p.shape(node)
    sizes = given(node, "size") or given(node, "shape") if op_name(node) in ("view", "reshape", "_unsafe_view") else None
    layout = Layout(Layout.replicated(shape).dims, p.layout(value).partial)
    if place is not None:
        after = regrouped(p.expressions(x), place, p.expressions(node), p.rows)
        layout = p.at(shape, after)
        value = p.whole(x) if after is None else value
    return p.emit(node, (value, p.local_sizes(node, layout, sizes)), {}, layout, aten.reshape.default)


# ---- dims added, removed, reordered ----------------------------------------------------------------------------------------


@RULES.rule("unsqueeze")
def _unsqueeze(p: Propagation, node: fx.Node) -> Any:
    x, dim = node.args
    labels: list[Any] = list(range(rank_of(p, x)))
    out = [*labels]
    out.insert(dim % (len(labels) + 1), "new")
    return p.labelled(node, [(x, labels)], out, (0,))


@RULES.rule("squeeze")
def _squeeze(p: Propagation, node: fx.Node) -> Any:
    """By name of the dims that have one element in the whole batch: a rank may happen to have one row."""
    x = node.args[0]
    sizes, rank = p.expressions(x), rank_of(p, x)
    wanted = node.args[1] if len(node.args) > 1 else range(rank)
    dims = {d % rank for d in ([wanted] if isinstance(wanted, int) else wanted)} if rank else set()
    gone = sorted(d for d in dims if sizes[d] == 1)
    labels: list[Any] = [d if d not in gone else None for d in range(rank)]
    (value,), chosen, partial = p.solve([(x, labels)], (0,))
    layout = p.result(p.shape(node), [d for d in labels if d is not None], chosen, partial)
    return p.emit(node, (value, gone), {}, layout, aten.squeeze.dims)


def _reordered(p: Propagation, node: fx.Node, order: Sequence[int]) -> Any:
    return p.labelled(node, [(node.args[0], range(len(order)))], list(order), (0,))


@RULES.rule("transpose", "swapaxes", "swapdims")
def _transpose(p: Propagation, node: fx.Node) -> Any:
    order = list(range(rank_of(p, node)))
    if order:
        a, b = (d % len(order) for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    return _reordered(p, node, order)


@RULES.rule("t", "numpy_T", "mT", "mH", "matrix_H", "adjoint")
def _t(p: Propagation, node: fx.Node) -> Any:
    order = list(range(rank_of(p, node)))
    if op_name(node) in ("t", "numpy_T"):
        return _reordered(p, node, order[::-1])
    return _reordered(p, node, [*order[:-2], order[-1], order[-2]])


@RULES.rule("permute")
def _permute(p: Propagation, node: fx.Node) -> Any:
    rank = rank_of(p, node)
    return _reordered(p, node, [d % rank for d in node.args[1]])


@RULES.rule("movedim", "moveaxis")
def _movedim(p: Propagation, node: fx.Node) -> Any:
    cube = torch.empty([2] * rank_of(p, node), device="meta")  # its strides are all different and name the dims
    moved = torch.movedim(cube, *node.args[1:3])
    return _reordered(p, node, [cube.stride().index(s) for s in moved.stride()])


@RULES.rule("diagonal")
def _diagonal(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(p, x)
    pair = {given(node, "dim1", 0) % rank, given(node, "dim2", 1) % rank}
    labels: list[Any] = [d if d not in pair else None for d in range(rank)]
    return p.labelled(node, [(x, labels)], [*(d for d in labels if d is not None), "diagonal"], (0,))


@RULES.rule("unfold")
def _unfold(p: Propagation, node: fx.Node) -> Any:
    x, dim = node.args[:2]
    rank = rank_of(p, x)
    labels: list[Any] = [d if d != dim % rank else None for d in range(rank)]
    return p.labelled(node, [(x, labels)], [*(d if d is not None else "windows" for d in labels), "window"], (0,))


@RULES.rule("view_as_real", "view_as_complex")
def _view_as_complex(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    labels: list[Any] = list(range(rank_of(p, x)))
    if op_name(node) == "view_as_real":
        return p.labelled(node, [(x, labels)], [*labels, "parts"], (0,))
    return p.labelled(node, [(x, [*labels[:-1], None])], labels[:-1], (0,))


# ---- more of the same ---------------------------------------------------------------------------------------------------------


@RULES.rule("expand", "expand_as", "broadcast_to")
def _expand(p: Propagation, node: fx.Node) -> Any:
    x, shape = node.args[0], p.shape(node)
    ((_, labels),) = aligned(p, [x], p.expressions(node))
    (value,), chosen, partial = p.solve([(x, labels)], (0,))
    layout = p.result(shape, range(len(shape)), chosen, partial)
    fresh = [d for d, s in enumerate(node.meta["val"].shape) if p.sizes.is_rows(s) and d not in labels]
    if chosen is None and not partial and fresh and p.axes:  # a free choice: each rank expands to its own rows
        layout = p.at(shape, (fresh[0], 1, 1))
        value = p.convert(p.value[x], Layout.replicated(p.shape(x)), "R")
    return p.emit(node, (value, p.local_sizes(node, layout)), {}, layout, aten.expand.default)


@RULES.rule("repeat", "tile")
def _repeat(p: Propagation, node: fx.Node) -> Any:
    x, times = node.args
    if not all(isinstance(t, int) for t in times):
        return None
    times = [1] * (rank_of(p, node) - len(times)) + list(times)
    (value,), chosen, partial = p.solve([(x, range(rank_of(p, x)))], (0,))
    layout = p.result(p.shape(node), (), chosen, partial)
    if chosen is not None:
        dim = chosen[0] + len(times) - rank_of(p, x)
        layout = p.at(p.shape(node), (dim, chosen[1] * times[dim], chosen[2])) if times[dim] else None
    return None if layout is None else p.emit(node, (value, times), {}, layout, aten.repeat.default)


@RULES.rule("repeat_interleave")
def _repeat_interleave(p: Propagation, node: fx.Node) -> Any:
    dim, times = given(node, "dim"), given(node, "repeats")
    if node.target is not aten.repeat_interleave.self_int or dim is None or not isinstance(times, int) or times < 1:
        return None
    x = node.args[0]
    dim = dim % rank_of(p, x)
    (value,), chosen, partial = p.solve([(x, range(rank_of(p, x)))], (0,))
    layout = p.result(p.shape(node), range(rank_of(p, x)), None if chosen and chosen[0] == dim else chosen, partial)
    if chosen is not None and chosen[0] == dim:
        layout = p.at(p.shape(node), (dim, chosen[1], chosen[2] * times))
    return p.emit(node, (value, times, dim), {}, layout)


@RULES.rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
            "replication_pad2d", "replication_pad3d")  # fmt: skip
def _pad(p: Propagation, node: fx.Node) -> Any:
    x, pads = node.args[:2]
    rank = rank_of(p, x)
    padded = {rank - 1 - i // 2 for i, n in enumerate(pads) if not isinstance(n, int) or n != 0}
    labels: list[Any] = [d if d not in padded else None for d in range(rank)]
    return p.labelled(node, [(x, labels)], [d if d not in padded else "pad" for d in range(rank)])


RULES.same(whole_dims(lambda n, r: [-1, -2]), "tril triu")
RULES.same(whole_dims(lambda n, r: given(n, "dims", range(r))), "flip")
RULES.same(whole_dims(lambda n, r: given(n, "dims") or range(r)), "roll")


# ---- parts ------------------------------------------------------------------------------------------------------------------


def _blocks(p: Propagation, size: Any, post: int) -> int | None:
    """How many times all rows, each ``post`` elements, a size or a position is."""
    return ratio(expression(size.meta["val"] if isinstance(size, fx.Node) else size), p.rows * post)


@RULES.rule("slice")
def _slice(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(p, x)
    dim, start, end, step = (
        given(node, "dim", 0) % rank,
        given(node, "start", 0),
        given(node, "end", _END),
        given(node, "step", 1),
    )
    labels: list[Any] = list(range(rank))
    everything = start == 0 and step == 1 and isinstance(end, int) and end >= _END
    place = p.place(x)
    if place is not None and place[0] == dim and not everything and step == 1:
        local = _slice_blocks(p, node, x, place, start, end)
        if local is not None:
            return local
    if not everything:
        labels[dim] = None
    return p.labelled(node, [(x, labels)], [d if d is not None else "cut" for d in labels], (0,))


def _slice_blocks(p: Propagation, node: fx.Node, x: fx.Node, place: tuple[int, int, int], start: Any, end: Any) -> Any:
    """A slice of whole copies of the rows: one view of several that were concatenated."""
    dim, pre, post = place
    first = _blocks(p, start, post)
    last = pre if isinstance(end, int) and end >= _END else _blocks(p, end, post)
    if first is None or last is None:
        return None
    first, last = (min(max(i + pre if i < 0 else i, 0), pre) for i in (first, last))
    if first >= last:
        return None
    bounds = [p.sizes.local(i * post) for i in (first, last)]
    return p.emit(node, (p.value[x], dim, *bounds), {}, p.at(p.shape(node), (dim, last - first, post)))


@RULES.rule("narrow")
def _narrow(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    labels: list[Any] = [d if d != given(node, "dim") % rank_of(p, x) else None for d in range(rank_of(p, x))]
    return p.labelled(node, [(x, labels)], [d if d is not None else "cut" for d in labels], (0,))


@RULES.rule("slice_scatter")
def _slice_scatter(p: Propagation, node: fx.Node) -> Any:
    x, source = tensors(node)
    rank = rank_of(p, x)
    dim = given(node, "dim", 0) % rank
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    return p.labelled(node, [(x, labels), (source, labels)], [d if d is not None else "cut" for d in labels], "add")


@RULES.rule("select")
def _select(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(p, x)
    labels: list[Any] = [d if d != given(node, "dim") % rank else None for d in range(rank)]
    return p.labelled(node, [(x, labels)], [d for d in labels if d is not None], (0,))


@RULES.rule("select_scatter")
def _select_scatter(p: Propagation, node: fx.Node) -> Any:
    x, source = tensors(node)
    rank = rank_of(p, x)
    labels: list[Any] = [d if d != given(node, "dim") % rank else None for d in range(rank)]
    kept = [d for d in labels if d is not None]
    return p.labelled(node, [(x, labels), (source, kept)], [d if d is not None else "one" for d in labels], "add")


@RULES.rule("diagonal_scatter")
def _diagonal_scatter(p: Propagation, node: fx.Node) -> Any:
    x, source = tensors(node)
    rank = rank_of(p, x)
    pair = {given(node, "dim1", 0) % rank, given(node, "dim2", 1) % rank}
    labels: list[Any] = [d if d not in pair else None for d in range(rank)]
    kept = [d for d in labels if d is not None]
    return p.labelled(
        node, [(x, labels), (source, [*kept, None])], [d if d is not None else f"w{i}" for i, d in enumerate(labels)], "add"
    )


@RULES.rule("split", "chunk", "split_with_sizes", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "tensor_split")
def _split(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(p, x)
    dim = given(node, "dim", 0) % rank
    place = p.place(x)
    if place is not None and place[0] == dim:
        parts = [_blocks(p, v.shape[dim], place[2]) for v in node.meta["val"]]
        if all(parts):
            sizes = [p.sizes.local(n * place[2]) for n in parts if n]
            layouts = [p.at(s, (dim, n, place[2])) for s, n in zip(p.shapes(node), parts, strict=True) if n]
            return p.emit(node, (p.value[x], sizes, dim), {}, layouts, aten.split_with_sizes.default)
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    out = [d if d is not None else "cut" for d in labels]
    return p.labelled(node, [(x, labels)], [out] * len(node.meta["val"]), (0,), several=True)


@RULES.rule("unbind")
def _unbind(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    rank = rank_of(p, x)
    labels: list[Any] = [d if d != given(node, "dim", 0) % rank else None for d in range(rank)]
    return p.labelled(node, [(x, labels)], [[d for d in labels if d is not None]] * len(node.meta["val"]), (0,), several=True)


# ---- joins -----------------------------------------------------------------------------------------------------------------


@RULES.rule("cat", "concat", "concatenate")
def _cat(p: Propagation, node: fx.Node) -> Any:
    operands = [o for o in tensors(node) if p.shape(o) != (0,)]
    rank, shape = rank_of(p, node), p.shape(node)
    dim = given(node, "dim", 0) % rank
    places = [p.place(o) for o in operands]
    if all(q is not None and q[0] == dim for q in places) and len({q[2] for q in places if q}) == 1:
        pre = sum(q[1] for q in places if q)  # rows inside, operands outside: locally just a concatenation
        post = places[0][2] if places[0] else 1
        return p.emit(node, ([p.value[o] for o in operands], dim), {}, p.at(shape, (dim, pre, post)))
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    values, chosen, partial = p.solve([(o, labels) for o in operands], "add")
    layout = p.result(shape, [d if d != dim else "cat" for d in range(rank)], chosen, partial)
    return p.emit(node, (values, dim), {}, layout)


@RULES.rule("stack")
def _stack(p: Propagation, node: fx.Node) -> Any:
    operands = tensors(node)
    labels: list[Any] = list(range(rank_of(p, operands[0])))
    out = [*labels]
    out.insert(given(node, "dim", 0) % (len(labels) + 1), "new")
    return p.labelled(node, [(o, labels) for o in operands], out, "add")


# ---- factories ----------------------------------------------------------------------------------------------------------------


@RULES.rule("full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def _factory(p: Propagation, node: fx.Node) -> Any:
    at = 1 if op_name(node).startswith("new_") else 0
    fresh = [d for d, s in enumerate(node.meta["val"].shape) if p.sizes.is_rows(s)]
    layout = p.at(p.shape(node), (fresh[0], 1, 1) if fresh and p.axes else None)
    args = [p.value[a] if isinstance(a, fx.Node) and i < at else p.operands(a) for i, a in enumerate(node.args)]
    if fresh:
        args[at] = p.local_sizes(node, layout)
    return p.emit(node, args, p.operands(node.kwargs), layout)


@RULES.rule("arange")
def _arange(p: Propagation, node: fx.Node) -> Any:
    layout = Layout.replicated(p.shape(node))
    whole = p.emit(node, p.operands(node.args), p.operands(node.kwargs), layout)
    if node.target is aten.arange.default and p.sizes.is_rows(node.meta["val"].shape[0]) and p.axes:
        return p.convert(whole, p.at(p.shape(node), (0, 1, 1)))
    return whole
