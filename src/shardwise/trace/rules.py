"""How each op of a captured graph treats a sharded batch: a table of small functions.

Most ops are one line: labels for the dims of operands and result, as in an einsum.  A rule returns None where the op, so used, is not
covered; it is then computed for the whole batch on every rank, and reported.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.trace import ops
from shardwise.trace.functional import argument
from shardwise.trace.sharding import Propagation, Rule, _is_tensor, module_path

aten = torch.ops.aten
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the ops called so, whatever their overload."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def find(node: fx.Node) -> Rule | None:
    """The rule of an op, if there is one."""
    if node.target is ops.batch_norm:
        return _batch_norm
    schema = getattr(node.target, "_schema", None)
    name = schema.name.removeprefix("aten::") if schema is not None else getattr(node.target, "__name__", "")
    if name in RULES:
        return RULES[name]
    tags = getattr(node.target, "tags", ())
    if torch.Tag.pointwise in tags and "ordinal" not in node.meta:
        return pointwise
    return None


# ---- elementwise ---------------------------------------------------------------------------------------------------------


def tensors(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node, in the order of its arguments, repeated ones repeated."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda a: found.append(a) if _is_tensor(a) else None)
    return found


def aligned(p: Propagation, operands: Sequence[fx.Node], shape: Sequence[int]) -> list[tuple[fx.Node, list[Any]]]:
    """Labels of operands that broadcast to ``shape``: the position in it; None where an operand is broadcast."""
    out = []
    for node in operands:
        own = p.shape(node)
        shift = len(shape) - len(own)
        out.append((node, [d + shift if s == shape[d + shift] else None for d, s in enumerate(own)]))
    return out


def pointwise(p: Propagation, node: fx.Node, linear: Any = ()) -> Any:
    shape = p.shape(node)
    return p.labelled(node, aligned(p, tensors(node), shape), range(len(shape)), linear)


for _name in ("masked_fill", "where", "copy", "softplus", "log_sigmoid", "hardtanh", "relu6", "mish", "hardswish", "hardsigmoid",
              "leaky_relu", "elu", "selu", "celu", "prelu", "logical_not", "bitwise_not", "isnan", "isinf", "floor_divide",
              "__and__", "__or__", "zeros_like", "ones_like", "full_like", "empty_like", "rsub", "square", "view_as_complex_",
              "gelu", "silu", "relu", "tanh", "sigmoid", "eq", "ne", "lt", "le", "gt", "ge", "clamp", "clamp_min", "clamp_max",
              "maximum", "minimum", "lerp", "addcmul", "addcdiv", "threshold", "hardshrink", "softshrink", "tanhshrink"):  # fmt: skip
    RULES[_name] = pointwise


@rule("add", "sub")
def _add(p: Propagation, node: fx.Node) -> Any:
    return pointwise(p, node, "add" if len(tensors(node)) == 2 else ())


@rule("mul", "multiply")
def _mul(p: Propagation, node: fx.Node) -> Any:
    return pointwise(p, node, (0, 1))


@rule("div", "divide", "true_divide")
def _div(p: Propagation, node: fx.Node) -> Any:
    return pointwise(p, node, (0,) if _is_tensor(node.args[0]) and not node.kwargs.get("rounding_mode") else ())


@rule("neg", "clone", "contiguous", "alias", "detach", "positive", "to", "lift_fresh_copy")
def _linear(p: Propagation, node: fx.Node) -> Any:
    floats = node.meta["val"].is_floating_point() and node.args[0].meta["val"].is_floating_point()
    return pointwise(p, node, (0,) if floats else ())


# ---- shapes --------------------------------------------------------------------------------------------------------------


def regroup(p: Propagation, node: fx.Node, emit: Callable[[fx.Node, Any], fx.Node]) -> Any:
    """A row-major regrouping of dims: the sharded rows stay in one dim, or the operand is gathered."""
    x = node.args[0]
    value, shape = p.value[x], p.shape(node)
    layout = value.meta["layout"]
    place = p.place(layout)
    if place is None:
        return emit(value, type(layout)(type(layout).replicated(shape).dims, layout.partial))
    dim, pre, _ = place
    size = layout.shape[dim] // (pre * place[2])
    outer = math.prod(layout.shape[:dim]) * pre
    done = 1
    for d, s in enumerate(shape):
        if outer % done == 0 and s % (outer // done * size) == 0 and s:
            return emit(value, p.at(shape, (d, outer // done, s // (outer // done * size))))
        done *= s
    return emit(p.whole(x), type(layout).replicated(shape))


@rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten")
def _view(p: Propagation, node: fx.Node) -> Any:
    sizes = node.args[1] if node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default) else None

    def emit(value: fx.Node, layout: Any) -> fx.Node:
        if sizes is not None:
            return p.emit(node, (value, p.local_sizes(p.arguments(list(sizes)), layout)), {}, layout, aten.reshape.default)
        whole = [p.symbolic(s) for s in node.meta["val"].shape]
        return p.emit(node, (value, p.local_sizes(whole, layout)), {}, layout, aten.reshape.default)

    return regroup(p, node, emit)


@rule("unsqueeze")
def _unsqueeze(p: Propagation, node: fx.Node) -> Any:
    x, dim = node.args
    labels: list[Any] = list(range(len(p.shape(x))))
    out = [*labels]
    out.insert(dim % (len(labels) + 1), "new")
    return p.labelled(node, [(x, labels)], out, (0,))


@rule("squeeze")
def _squeeze(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    shape, rank = p.shape(x), len(p.shape(x))
    wanted = node.args[1] if len(node.args) > 1 else range(rank)
    dims = {d % rank for d in ([wanted] if isinstance(wanted, int) else wanted)} if rank else set()
    place = p.place(p.layout(p.value[x]))
    gone = {d for d in dims if shape[d] == 1 and not (place and place[0] == d)}
    return p.labelled(node, [(x, range(rank))], [d for d in range(rank) if d not in gone], (0,))


@rule("transpose", "swapaxes")
def _transpose(p: Propagation, node: fx.Node) -> Any:
    x, a, b = node.args
    labels = list(range(len(p.shape(x))))
    out = list(labels)
    out[a], out[b] = out[b], out[a]
    return p.labelled(node, [(x, labels)], out, (0,))


@rule("t", "numpy_T")
def _t(p: Propagation, node: fx.Node) -> Any:
    labels = list(range(len(p.shape(node.args[0]))))
    return p.labelled(node, [(node.args[0], labels)], labels[::-1], (0,))


@rule("permute")
def _permute(p: Propagation, node: fx.Node) -> Any:
    labels = list(range(len(p.shape(node.args[0]))))
    return p.labelled(node, [(node.args[0], labels)], [labels[d] for d in node.args[1]], (0,))


@rule("movedim")
def _movedim(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    names = list(range(len(p.shape(x))))
    cube = torch.empty([2] * len(names), device="meta")  # its strides are all different and name the dims
    moved = torch.movedim(cube, *node.args[1:])
    return p.labelled(node, [(x, names)], [cube.stride().index(s) for s in moved.stride()], (0,))


@rule("expand", "expand_as", "broadcast_to")
def _expand(p: Propagation, node: fx.Node) -> Any:
    x, shape = node.args[0], p.shape(node)
    ((_, labels),) = aligned(p, [x], shape)
    (value,), chosen, partial = p.solve([(x, labels)], (0,))
    layout = p.result(shape, range(len(shape)), chosen, partial)
    fresh = [d for d, s in enumerate(node.meta["val"].shape) if p.is_rows(s) and d not in labels]
    if chosen is None and not partial and fresh and p.axes:  # a free choice: each rank expands to its own rows
        layout = p.at(shape, (fresh[0], 1, 1))
        value = p.convert(p.value[x], type(layout).replicated(p.shape(x)), "R")
    sizes = [p.symbolic(s) for s in node.meta["val"].shape]
    return p.emit(node, (value, p.local_sizes(sizes, layout)), {}, layout, aten.expand.default)


@rule("slice", "slice_scatter")
def _slice(p: Propagation, node: fx.Node) -> Any:
    operands = tensors(node)
    at = len(operands)  # (x, dim, …) or (x, source, dim, …)
    dim = argument(node, at, "dim", 0) % len(p.shape(operands[0]))
    labels: list[Any] = list(range(len(p.shape(operands[0]))))
    start, end, step = (argument(node, at + i, n, v) for i, (n, v) in enumerate((("start", 0), ("end", None), ("step", 1)), 1))
    everything = start in (0, None) and step == 1 and (end is None or (isinstance(end, int) and end >= 1 << 62))
    if not everything:
        labels[dim] = None
    out = [d if d != dim or everything else "cut" for d in range(len(labels))]
    return p.labelled(node, [(o, labels) for o in operands], out, "add" if at == 2 else (0,))


@rule("select", "select_scatter")
def _select(p: Propagation, node: fx.Node) -> Any:
    operands = tensors(node)
    dim = argument(node, len(operands), "dim") % len(p.shape(operands[0]))
    labels: list[Any] = [d if d != dim else None for d in range(len(p.shape(operands[0])))]
    kept = [d for d in labels if d is not None]
    if len(operands) == 2:
        return p.labelled(node, [(operands[0], labels), (operands[1], kept)], [d if d is not None else "x" for d in labels], "add")
    return p.labelled(node, [(operands[0], labels)], kept, (0,))


@rule("split", "chunk", "split_with_sizes", "unbind", "tensor_split")
def _split(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    unbind = node.target is aten.unbind.int
    dim = argument(node, 1 if unbind else 2, "dim", 0) % len(p.shape(x))
    labels: list[Any] = [d if d != dim else None for d in range(len(p.shape(x)))]
    out = [d for d in labels if d is not None] if unbind else [d if d is not None else "cut" for d in labels]
    return p.labelled(node, [(x, labels)], [out] * len(node.meta["val"]), (0,), several=True)


@rule("cat", "concat")
def _cat(p: Propagation, node: fx.Node) -> Any:
    operands = [o for o in tensors(node) if p.shape(o) != (0,)]
    rank, shape = len(p.shape(node)), p.shape(node)
    dim = argument(node, 1, "dim", 0) % rank
    places = [p.place(p.layout(p.value[o])) for o in operands]
    if all(q is not None and q[0] == dim for q in places) and len({q[2] for q in places if q}) == 1:
        pre = sum(q[1] for q in places if q)  # rows inside, operands outside: locally just a concatenation
        post = places[0][2] if places[0] else 1
        return p.emit(node, ([p.value[o] for o in operands], dim), {}, p.at(shape, (dim, pre, post)))
    labels: list[Any] = [d if d != dim else None for d in range(rank)]
    values, chosen, partial = p.solve([(o, labels) for o in operands], "add")
    layout = p.result(shape, [d if d != dim else "cat" for d in range(rank)], chosen, partial)
    return p.emit(node, (values, dim), {}, layout)


@rule("stack")
def _stack(p: Propagation, node: fx.Node) -> Any:
    operands = tensors(node)
    labels: list[Any] = list(range(len(p.shape(operands[0]))))
    out = [*labels]
    out.insert(argument(node, 1, "dim", 0) % (len(labels) + 1), "new")
    return p.labelled(node, [(o, labels) for o in operands], out, "add")


@rule("repeat")
def _repeat(p: Propagation, node: fx.Node) -> Any:
    x, times = node.args
    if not all(isinstance(t, int) for t in times):
        return None
    lead = len(times) - len(p.shape(x))
    value = p.value[x]
    place = p.place(value.meta["layout"])
    layout = type(value.meta["layout"]).replicated(p.shape(node))
    if place is not None:
        layout = p.at(p.shape(node), (place[0] + lead, place[1] * times[place[0] + lead], place[2]))
    else:
        value = p.whole(x)
    return p.emit(node, (value, times), {}, layout)


@rule("repeat_interleave")
def _repeat_interleave(p: Propagation, node: fx.Node) -> Any:
    dim = argument(node, 2, "dim")
    if node.target is not aten.repeat_interleave.self_int or dim is None or not isinstance(node.args[1], int):
        return None
    x, times = node.args[:2]
    value, dim = p.value[x], dim % len(p.shape(x))
    place = p.place(value.meta["layout"])
    if place is None or place[0] != dim:
        labels = list(range(len(p.shape(x))))
        return p.labelled(node, [(x, labels)], labels, (0,))
    return p.emit(node, (value, times, dim), {}, p.at(p.shape(node), (dim, place[1], place[2] * times)))


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def _pad(p: Propagation, node: fx.Node) -> Any:
    x, pads = node.args[:2]
    rank = len(p.shape(x))
    padded = {rank - 1 - i // 2 for i, n in enumerate(pads) if n != 0}
    labels: list[Any] = [d if d not in padded else None for d in range(rank)]
    return p.labelled(node, [(x, labels)], [d if d not in padded else "pad" for d in range(rank)])


def whole_dims(dims: Callable[[fx.Node, int], Sequence[int]]) -> Rule:
    """A rule: the op needs these dims whole and keeps them; all others pass."""

    def apply(p: Propagation, node: fx.Node) -> Any:
        x = node.args[0]
        rank = len(p.shape(x))
        gone = {d % rank for d in dims(node, rank)} if rank else set()
        labels: list[Any] = [d if d not in gone else None for d in range(rank)]
        out = [d if d not in gone else "whole" for d in range(rank)]
        value = node.meta["val"]
        several = isinstance(value, tuple | list)
        return p.labelled(node, [(x, labels)], [out] * len(value) if several else out, several=several)

    return apply


RULES.update(dict.fromkeys(
    ("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp"), whole_dims(lambda n, r: [n.args[1]])))
RULES.update(dict.fromkeys(("sort", "argsort"), whole_dims(lambda n, r: [argument(n, 1, "dim", -1)] if n.target in (
    aten.sort.default, aten.argsort.default) else range(r))))
RULES["topk"] = whole_dims(lambda n, r: [argument(n, 2, "dim", -1)])
RULES.update(dict.fromkeys(("tril", "triu"), whole_dims(lambda n, r: [-1, -2])))
RULES["flip"] = whole_dims(lambda n, r: n.args[1])
RULES["roll"] = whole_dims(lambda n, r: argument(n, 2, "dims") or range(r))
RULES.update(dict.fromkeys(
    ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
     "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d",
     "pixel_shuffle", "pixel_unshuffle", "max_pool2d_with_indices"), whole_dims(lambda n, r: range(1, r))))  # fmt: skip


@rule("one_hot")
def _one_hot(p: Propagation, node: fx.Node) -> Any:
    labels = list(range(len(p.shape(node.args[0]))))
    return p.labelled(node, [(node.args[0], labels)], [*labels, "classes"])


# ---- factories -----------------------------------------------------------------------------------------------------------


@rule("full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def _factory(p: Propagation, node: fx.Node) -> Any:
    at = 1 if node.target._schema.name.startswith("aten::new_") else 0
    values = node.meta["val"].shape
    fresh = [d for d, s in enumerate(values) if p.is_rows(s)]
    layout = p.at(p.shape(node), (fresh[0], 1, 1) if fresh and p.axes else None)
    args = list(p.arguments(node.args))
    if fresh:
        args[at] = p.local_sizes([p.symbolic(s) for s in values], layout)
    return p.emit(node, args, p.arguments(node.kwargs), layout)


@rule("arange")
def _arange(p: Propagation, node: fx.Node) -> Any:
    layout = p.replicated_layouts(node)
    args = p.arguments(node.args)
    if node.target is aten.arange.default and p.is_rows(node.meta["val"].shape[0]) and p.axes:
        whole = p.emit(node, args, p.arguments(node.kwargs), layout)
        return p.convert(whole, p.at(p.shape(node), (0, 1, 1)))
    return p.emit(node, args, p.arguments(node.kwargs), layout)


# ---- lookups -------------------------------------------------------------------------------------------------------------


@rule("embedding")
def _embedding(p: Propagation, node: fx.Node) -> Any:
    weight, index = node.args[:2]
    if argument(node, 3, "scale_grad_by_freq", False):
        return None  # a gradient divided by how often a row occurs in the batch
    labels = [f"i{d}" for d in range(len(p.shape(index)))]
    values, chosen, partial = p.solve([(weight, [None, None]), (index, labels)])
    layout = p.result(p.shape(node), [*labels, "width"], chosen, partial)
    return p.emit(node, (*values, argument(node, 2, "padding_idx", -1)), {}, layout)


@rule("gather", "scatter", "scatter_add")
def _gather(p: Propagation, node: fx.Node) -> Any:
    operands = tensors(node)
    dim, shape = node.args[1], p.shape(node)
    dim = dim % len(shape) if shape else 0
    sizes = [p.shape(o) for o in operands]
    labels: list[Any] = [d if d != dim and len({s[d] for s in sizes}) == 1 else None for d in range(len(shape))]
    out = [d if d in labels else f"w{d}" for d in range(len(shape))]
    return p.labelled(node, [(o, labels) for o in operands], out)


@rule("index_select")
def _index_select(p: Propagation, node: fx.Node) -> Any:
    x, dim, index = node.args
    rank = len(p.shape(x))
    labels: list[Any] = [d if d != dim % rank else None for d in range(rank)]
    return p.labelled(node, [(x, labels), (index, ["i"])], [d if d is not None else "i" for d in labels])


@rule("index")
def _index(p: Propagation, node: fx.Node) -> Any:
    x, indices = node.args
    present = [(d, i) for d, i in enumerate(indices) if isinstance(i, fx.Node)]
    if any(i.meta["val"].dtype in (torch.bool, torch.uint8) for _, i in present):
        return None
    shape = torch.broadcast_shapes(*[p.shape(i) for _, i in present])
    indexed = {d for d, _ in present}
    rank = len(p.shape(x))
    own: list[Any] = [("x", d) if d not in indexed else None for d in range(rank)]
    found = aligned(p, [i for _, i in present], shape)
    operands = [(x, own), *((i, [("i", lab) if lab is not None else None for lab in labels]) for i, labels in found)]
    block = [("i", d) for d in range(len(shape))]
    first, last = min(indexed), max(indexed)
    at = first if last - first + 1 == len(indexed) else 0
    rest = [lab for lab in own if lab is not None]
    out = [*rest[:at], *block, *rest[at:]]
    return p.labelled(node, operands, out)


# ---- contractions --------------------------------------------------------------------------------------------------------


@rule("linear")
def _linear_layer(p: Propagation, node: fx.Node) -> Any:
    x, w = node.args[:2]
    bias = argument(node, 2, "bias")
    lead = list(range(len(p.shape(x)) - 1))
    has_n = len(p.shape(w)) == 2
    operands = [(x, [*lead, "k"]), (w, ["n", "k"] if has_n else ["k"])]
    if isinstance(bias, fx.Node):
        operands.append((bias, ["n"] if has_n else []))
    return p.labelled(node, operands, [*lead, "n"] if has_n else lead, () if isinstance(bias, fx.Node) else (0,))


@rule("matmul", "bmm", "mm", "mv", "dot")
def _matmul(p: Propagation, node: fx.Node) -> Any:
    a, b = node.args
    ranks = len(p.shape(a)), len(p.shape(b))
    batch = max(*ranks, 2) - 2
    shape = p.shape(node)[:batch]
    mine, theirs = (
        [batch - (r - 2) + d if p.shape(x)[d] == shape[batch - (r - 2) + d] else None for d in range(r - 2)]
        for x, r in ((a, ranks[0]), (b, ranks[1]))
    )
    rows, columns = (["m"] if ranks[0] > 1 else []), (["n"] if ranks[1] > 1 else [])
    out = [*range(batch), *rows, *columns]
    return p.labelled(node, [(a, [*mine, *rows, "k"]), (b, [*theirs, "k", *columns])], out, (0, 1))


@rule("addmm", "baddbmm")
def _addmm(p: Propagation, node: fx.Node) -> Any:
    bias, a, b = node.args
    lead = list(range(len(p.shape(a)) - 2))
    out = [*lead, "m", "n"]
    ((_, labels),) = aligned(p, [bias], p.shape(node))
    names = [out[d] if d is not None else None for d in labels]
    return p.labelled(node, [(bias, names), (a, [*lead, "m", "k"]), (b, [*lead, "k", "n"])], out)


@rule("einsum")
def _einsum(p: Propagation, node: fx.Node) -> Any:
    equation, operands = node.args[0].replace(" ", ""), node.args[1]
    if "." in equation or "->" not in equation or any(len(set(t)) != len(t) for t in equation.split("->")[0].split(",")):
        return None
    left, right = equation.split("->")
    pairs = [(o, list(t)) for o, t in zip(operands, left.split(","), strict=True)]
    return p.labelled(node, pairs, list(right), range(len(pairs)))


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv(p: Propagation, node: fx.Node) -> Any:
    operands = tensors(node)
    spatial = len(p.shape(operands[1])) - 2
    lead = ["b"] if len(p.shape(operands[0])) == spatial + 2 else []
    inner: list[Any] = [None] * (spatial + 1)
    pairs = [(operands[0], [*lead, *inner]), (operands[1], [None] * (spatial + 2))]
    pairs += [(o, [None]) for o in operands[2:]]
    return p.labelled(node, pairs, [*lead, *[f"s{i}" for i in range(spatial + 1)]])


@rule("scaled_dot_product_attention")
def _attention(p: Propagation, node: fx.Node) -> Any:
    q, k, v = node.args[:3]
    mask = argument(node, 3, "attn_mask")
    lead = len(p.shape(q)) - 2
    heads = {p.shape(x)[lead - 1] for x in (q, k, v)} if lead > 1 else {1}
    names: list[Any] = [d if d < lead - 1 or len(heads) == 1 else None for d in range(lead)]
    operands = [(x, [*names, None, None]) for x in (q, k, v)]
    if isinstance(mask, fx.Node):
        full = (*p.shape(q)[:-1], p.shape(k)[-2])
        ((_, labels),) = aligned(p, [mask], full)
        operands.append((mask, [names[d] if d is not None and d < lead else None for d in labels]))
    out = [*[d if d is not None else f"w{i}" for i, d in enumerate(names)], "q", "e"]
    if "ordinal" not in node.meta or p.dropout == "fast":
        return p.labelled(node, operands, out)
    values, chosen, partial = p.solve(operands)
    layout = p.result(p.shape(node), out, chosen, partial)
    scores = p.at((*p.shape(q)[:-1], p.shape(k)[-2]), (out.index(chosen[0]), *chosen[1:]) if chosen else None)
    sizes = [*q.meta["val"].shape[:-1], k.meta["val"].shape[-2]]
    batch, whole = sample_dim(p, sizes, scores)
    given = values[3] if len(values) > 3 else None
    args = (p.env, *values[:3], given, argument(node, 4, "dropout_p", 0.0), argument(node, 5, "is_causal", False), node.meta["ordinal"])
    kwargs = {k: node.kwargs[k] for k in ("scale", "enable_gqa") if k in node.kwargs}
    return p.emit(node, (*args, batch, whole), kwargs, layout, ops.attention)


# ---- reductions ------------------------------------------------------------------------------------------------------------


def _reduced(p: Propagation, node: fx.Node, at: int = 1) -> tuple[fx.Node, list[int], bool]:
    x = node.args[0]
    rank = len(p.shape(x))
    dims = argument(node, at, "dim")
    dims = list(range(rank)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else list(dims)
    return x, [d % rank for d in dims] if rank else [], bool(argument(node, at + 1, "keepdim", False))


def _kept(rank: int, dims: Sequence[int], keep: bool) -> list[Any]:
    return [f"r{d}" if d in dims else d for d in range(rank) if keep or d not in dims]


@rule("sum", "mean")
def _sum(p: Propagation, node: fx.Node) -> Any:
    x, dims, keep = _reduced(p, node)
    labels = list(range(len(p.shape(x))))
    place = p.place(p.layout(p.value[x]))
    out = _kept(len(labels), dims, keep)
    if node.target._schema.name == "aten::sum" or place is None or place[0] not in dims:
        return p.labelled(node, [(x, labels)], out, (0,))
    (value,), chosen, partial = p.solve([(x, labels)])
    layout = p.result(p.shape(node), out, chosen, partial)
    kwargs = {k: v for k, v in node.kwargs.items() if k == "dtype"}
    total = p.emit(node, (value, dims, keep), kwargs, layout, aten.sum.dim_IntList)
    return p.emit(node, (total, count(p, [x.meta["val"].shape[d] for d in dims])), {}, layout, aten.div.Scalar)


def count(p: Propagation, sizes: Sequence[Any]) -> Any:
    """The product of sizes of the whole batch, as a number or as a node."""
    number, rows = 1, 0
    for s in sizes:
        if p.is_rows(s):
            rows += 1
        elif isinstance(s, torch.SymInt):
            node = p.symbolic(s)
            return _product(p, [count(p, [t]) if t is not s else node for t in sizes])
        else:
            number *= int(s)
    return _product(p, [number, *[p.rows] * rows])


def _product(p: Propagation, factors: Sequence[Any]) -> Any:
    out: Any = 1
    for f in factors:
        if isinstance(out, int) and isinstance(f, int):
            out = out * f
        else:
            out = p.graph.call_function(operator.mul, (out, f))
    return out


def whole_reduction(at: int = 1) -> Rule:
    """A rule for reductions that cannot be finished from partial results."""

    def apply(p: Propagation, node: fx.Node) -> Any:
        x, dims, keep = _reduced(p, node, at)
        rank = len(p.shape(x))
        labels: list[Any] = [d if d not in dims else None for d in range(rank)]
        out = _kept(rank, dims, keep)
        value = node.meta["val"]
        many = isinstance(value, tuple | list)
        return p.labelled(node, [(x, labels)], [out] * len(value) if many else out, several=many)

    return apply


RULES.update(dict.fromkeys(("amax", "amin", "argmax", "argmin", "logsumexp", "prod", "any", "all", "median"), whole_reduction()))
RULES["linalg_vector_norm"] = whole_reduction(2)
RULES["norm"] = whole_reduction(2)


def _max(p: Propagation, node: fx.Node) -> Any:
    return pointwise(p, node) if len(tensors(node)) == 2 else whole_reduction()(p, node)


RULES["max"] = RULES["min"] = _max


def _var(p: Propagation, node: fx.Node) -> Any:
    if "dim" in [a.name for a in node.target._schema.arguments]:
        return whole_reduction()(p, node)
    return None


RULES.update(dict.fromkeys(("var", "std", "var_mean", "std_mean"), _var))


# ---- norms ---------------------------------------------------------------------------------------------------------------


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def _layer_norm(p: Propagation, node: fx.Node) -> Any:
    x, shape = node.args[:2]
    rank = len(p.shape(x))
    labels: list[Any] = [d if d < rank - len(shape) else None for d in range(rank)]
    operands = [(x, labels), *((o, [None] * len(p.shape(o))) for o in tensors(node)[1:])]
    return p.labelled(node, operands, [d if d is not None else "w" for d in labels])


@rule("group_norm", "instance_norm", "batch_norm")
def _per_sample_norm(p: Propagation, node: fx.Node) -> Any:
    """Norms whose statistics are per sample or fixed: only dim 0 passes.  (BatchNorm in training is ``ops.batch_norm``.)"""
    if node.target is aten.batch_norm.default and node.args[5]:
        return None  # batch statistics and no running ones: every rank computes them for the whole batch
    operands = tensors(node)
    rank = len(p.shape(node))
    pairs = [(operands[0], ["b", *[None] * (rank - 1)]), *((o, [None]) for o in operands[1:])]
    return p.labelled(node, pairs, ["b", *[f"w{d}" for d in range(1, rank)]])


def _batch_norm(p: Propagation, node: fx.Node) -> Any:
    operands = tensors(node)
    x = operands[0]
    place = p.place(p.layout(p.value[x]))
    if place != (0, 1, 1):
        return p.replicate(node)
    value = p.value[x]
    rest = [p.convert(p.value[o], p.layout(p.value[o]), "R") for o in operands[1:]]
    feed = iter(rest)
    others = [next(feed) if isinstance(a, fx.Node) else a for a in node.args[1:]]
    layouts = [p.at(p.shapes(node)[0], (0, 1, 1)), *(p.at(s, None) for s in p.shapes(node)[1:])]
    p.sharded.collectives[("all_gather", "batch_norm", module_path(node))] += 1
    p.sharded.collectives[("all_reduce in backward", "batch_norm", module_path(node))] += 1
    return p.emit(node, (p.env, value, *others), {}, layouts, ops.sync_batch_norm)





# ---- losses ---------------------------------------------------------------------------------------------------------------


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def _cross_entropy(p: Propagation, node: fx.Node) -> Any:
    x, target = node.args[:2]
    weight, reduction = argument(node, 2, "weight"), argument(node, 3, "reduction", 1)
    plain = node.target._schema.name == "aten::cross_entropy_loss"
    rank = len(p.shape(x))
    if rank < 2:
        return None
    labels: list[Any] = ["b", None, *range(2, rank)]
    theirs = labels if len(p.shape(target)) == rank else ["b", *range(2, rank)]
    operands = [(x, labels), (target, theirs)]
    if isinstance(weight, fx.Node):
        operands.append((weight, [None]))
    out = ["b", *range(2, rank)] if reduction == 0 else []
    values, chosen, partial = p.solve(operands)
    layout = p.result(p.shape(node), out, chosen, partial)
    given = values[2] if len(values) > 2 else None
    ignore = argument(node, 4, "ignore_index", -100)
    smoothing = argument(node, 5, "label_smoothing", 0.0) if plain else 0.0
    if chosen is None or reduction != 1:
        tail = (given, reduction, ignore, smoothing) if plain else (given, reduction, ignore)
        return p.emit(node, (*values[:2], *tail), {}, layout)
    counted = node is p.counted
    if not counted and not target.meta["val"].is_floating_point():
        p.sharded.collectives[("all_reduce", "count of targets", module_path(node))] += 1
    return p.emit(node, (p.env, *values[:2], given, ignore, smoothing, counted, not plain), {}, layout, ops.cross_entropy)


_REDUCTION_AT = {"mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "kl_div": 2, "soft_margin_loss": 2,
                 "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4, "poisson_nll_loss": 5}  # fmt: skip


@rule(*_REDUCTION_AT)
def _pointwise_loss(p: Propagation, node: fx.Node) -> Any:
    at = _REDUCTION_AT[node.target._schema.name.removeprefix("aten::")]
    reduction = argument(node, at, "reduction", 1)
    operands = tensors(node)
    shape = torch.broadcast_shapes(*[p.shape(o) for o in operands])
    values, chosen, partial = p.solve(aligned(p, operands, shape))
    layout = p.result(p.shape(node), range(len(shape)) if reduction == 0 else [], chosen, partial)
    feed = iter(values)
    mapped = fx.map_arg((node.args, node.kwargs), lambda a: next(feed) if _is_tensor(a) else p.value[a])
    args, kwargs = list(mapped[0]), dict(mapped[1])
    if chosen is None or reduction != 1:
        return p.emit(node, args, kwargs, layout)
    if len(args) > at:
        args[at] = 2
    else:
        kwargs["reduction"] = 2
    total = p.emit(node, args, kwargs, layout)
    largest = max(operands, key=lambda o: math.prod(p.shape(o)))
    return p.emit(node, (total, count(p, largest.meta["val"].shape)), {}, layout, aten.div.Scalar)


# ---- random ops ----------------------------------------------------------------------------------------------------------


def sample_dim(p: Propagation, sizes: Sequence[Any], layout: Any) -> tuple[tuple[int, int] | None, bool]:
    """Where the samples are in a random tensor, as (dim, minor), and whether it holds those of all ranks."""
    place = p.place(layout)
    for dim, size in enumerate(sizes):
        if isinstance(size, torch.SymInt):
            minor = size.node.expr / p.symbol
            if minor.is_Integer and (place is None or place[0] == dim and place[1] == 1):
                return (dim, int(minor)), place is None
    if place is not None and place[1] == 1:
        return (place[0], place[2]), False
    return None, place is None


def _keyed(p: Propagation, node: fx.Node, sizes: Sequence[Any], layout: Any) -> tuple[Any, ...]:
    batch, whole = sample_dim(p, sizes, layout)
    return node.meta["ordinal"], batch, whole


@rule("dropout", "feature_dropout")
def _dropout(p: Propagation, node: fx.Node) -> Any:
    if p.dropout == "fast":
        return pointwise(p, node)
    x = node.args[0]
    (value,), chosen, partial = p.solve([(x, list(range(len(p.shape(x)))))])
    layout = p.result(p.shape(node), range(len(p.shape(x))), chosen, partial)
    target = ops.dropout if node.target is aten.dropout.default else ops.feature_dropout
    key = _keyed(p, node, node.meta["val"].shape, layout)
    return p.emit(node, (p.env, value, node.args[1], *key), {}, layout, target)


@rule("rand_like", "randn_like", "uniform", "normal_functional", "bernoulli")
def _random_like(p: Propagation, node: fx.Node) -> Any:
    x = node.args[0]
    name = node.target._schema.name.removeprefix("aten::")
    (value,), chosen, partial = p.solve([(x, list(range(len(p.shape(x)))))])
    layout = p.result(p.shape(node), range(len(p.shape(x))), chosen, partial)
    key = _keyed(p, node, node.meta["val"].shape, layout)
    if name == "bernoulli":
        if node.target is aten.bernoulli.p:
            value = p.emit(node, (value, node.args[1]), {}, layout, aten.full_like.default)
        return p.emit(node, (p.env, value, *key), {}, layout, ops.bernoulli)
    kind = "normal" if "n" in name.removeprefix("rand").removeprefix("uniform") else "uniform"
    a, b = (*node.args[1:3], *(0.0, 1.0)[len(node.args[1:3]) :])
    if node.meta["val"].dtype != x.meta["val"].dtype:
        value = p.emit(node, (value, node.meta["val"].dtype), {}, layout, aten.to.dtype)
    return p.emit(node, (p.env, kind, *key, value, a, b), {}, layout, ops.random_like)


@rule("rand", "randn", "randint")
def _random(p: Propagation, node: fx.Node) -> Any:
    name = node.target._schema.name.removeprefix("aten::")
    sizes = node.meta["val"].shape
    fresh = [d for d, s in enumerate(sizes) if p.is_rows(s)]
    layout = p.at(p.shape(node), (fresh[0], 1, 1) if fresh and p.axes else None)
    local = p.local_sizes([p.symbolic(s) for s in sizes], layout)
    low, high = (0, 1)
    if name == "randint":
        low, high = (0, node.args[0]) if node.target is aten.randint.default else node.args[:2]
    kind = {"rand": "uniform", "randn": "normal"}.get(name, name)
    key = _keyed(p, node, sizes, layout)
    args = (p.env, kind, *key, local, node.meta["val"].dtype, p.device, low, high)
    return p.emit(node, args, {}, layout, ops.random_of)
