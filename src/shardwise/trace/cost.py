"""What each unit costs one rank: parameters, FLOPs, memory traffic, and the bytes that live between forward and backward.

Units run one after the other on the meta device, forward and backward, as the interpreter runs them: nothing is allocated,
strides, views and shards are those of the real run, and autograd says what it keeps.  What depends on the device is the table
in ``saved.py``.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental import _config as fx_config

from shardwise.core.errors import ConfigError
from shardwise.trace.meter import Meter, base_name, storage, tensors_in
from shardwise.trace.ops import Env, local_rows
from shardwise.trace.saved import COMPOSED, DEVICES, is_known
from shardwise.trace.trace import Trace
from shardwise.trace.units import Unit

META = torch.device("meta")

SPLIT = frozenset(
    ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
     "_grouped_mm", "grouped_mm_fallback")
)  # fmt: skip
"""Ops whose weight gradient can be put off: computed apart from the gradient of their input."""


@dataclass(frozen=True)
class UnitCost:
    """The cost of one unit for one rank and one microbatch.

    FLOPs are of matrix products, convolutions and attention, 2 a multiply-add; causal attention counts in full.  Memory is in
    bytes of whole storages, each counted once: a view counts as its base.  What a unit keeps between forward and backward is
    ``input_bytes + field_bytes + saved_bytes``, parameters and buffers apart; an input is also its maker's output.
    """

    index: int
    name: str
    parameters: int  # number of elements; a parameter that several units read counts in each
    parameter_bytes: int  # in the dtype that computes
    forward_flops: int
    input_flops: int  # of backward, without what weight_flops counts
    weight_flops: int  # of backward: weight gradients of the ops in SPLIT
    forward_bytes: int  # read and written by the kernels of forward, views excepted
    field_bytes: int  # batch fields that the unit reads
    input_bytes: int  # live inputs, without what is a view of a parameter, buffer or field
    saved_input_bytes: int  # the part of input_bytes that autograd needs
    output_bytes: int  # live outputs that the unit made itself
    saved_bytes: int  # made by the unit and kept by autograd
    saved_output_bytes: int  # the part of saved_bytes that output_bytes counts too
    unknown: tuple[str, ...] = ()  # ops that these numbers guess (as composed on the meta device) or leave out

    @property
    def backward_flops(self) -> int:
        """All of backward."""
        return self.input_flops + self.weight_flops


def cost(trace: Trace, rows: int, parts: int = 1, device: str = "cpu") -> list[UnitCost]:
    """The cost of each unit of ``trace`` for a microbatch of ``rows`` rows over ``parts`` ranks, of which the last has the most.

    ``device`` is "cpu" or "cuda", whichever is present here.  Raises :class:`ConfigError` on numbers that the trace cannot take.
    """
    if device not in DEVICES:
        raise ConfigError(f"cost: device {device!r} is not known; legal: {', '.join(DEVICES)}")
    if rows < 1 or parts < 1:
        raise ConfigError(f"cost: rows {rows} over parts {parts} is not legal; legal: 1 or more of each")
    if trace.rows not in (None, rows):
        raise ConfigError(f"cost: rows {rows} is not legal: the model's batch dim is static; legal: {trace.rows}")
    if trace.opaque is not None:
        return [_opaque(trace, unit) for unit in trace.units]
    walk, config = _Walk(trace, rows, parts, device), cast(Any, fx_config)
    with config.patch(meta_nonzero_assume_all_nonzero=True):  # the largest result, where the size depends on data
        return [walk.unit(unit) for unit in trace.units]


def _opaque(trace: Trace, unit: Unit) -> UnitCost:
    """Only its parameters are known."""
    number = sum(p.numel for p in trace.parameters)
    size = sum(p.numel * p.dtype.itemsize for p in trace.parameters)
    rest = {f.name: 0 for f in fields(UnitCost)[4:-1]}
    return UnitCost(unit.index, unit.name, number, size, **rest, unknown=("the whole model: it was not captured",))


# ---- the walk --------------------------------------------------------------------------------------------------------


class _Walk:
    """Runs units on meta tensors; values keep their identity from unit to unit."""

    def __init__(self, trace: Trace, rows: int, parts: int, device: str) -> None:
        counted = torch.empty((), dtype=torch.int64, device=META) if trace.targets is not None else None
        self.env = Env(_Silent(), ("dp",), parts, parts - 1, rows, targets=counted)
        self.device, self.frozen = device, set(trace.frozen)
        self.captured = _captured(trace)
        self.leaves: dict[tuple[str, str], Tensor] = {}
        self.live: dict[str, Tensor] = {}

    def unit(self, unit: Unit) -> UnitCost:
        parameters, buffers, constants, batch, inputs = self.arguments(unit)
        run = _Run(self, _storages(parameters))
        with run.meter, saved_tensors_hooks(run.pack, _unpack), torch.set_grad_enabled(unit.differentiable):
            good, out = self.publish(unit, run.forward(unit, [*parameters, *buffers, *constants, *batch, *inputs]))
        saved = _storages(k.tensor for k in run.kept)
        forward_flops, forward_bytes = run.meter.flops, run.meter.bytes
        weight = run.backward(good, [t for t in (*parameters, *inputs) if t.requires_grad]) if good else 0
        given = _storages([*self.leaves.values(), *constants])
        input_sizes = _without(_storages(inputs), given)
        out, inside = (_without(s, given, input_sizes) for s in (out, saved))
        return UnitCost(
            unit.index, unit.name, sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters),
            forward_flops, run.meter.flops - forward_flops - weight, weight, forward_bytes,
            sum(_storages(batch).values()), sum(input_sizes.values()), sum(s for k, s in input_sizes.items() if k in saved),
            sum(out.values()), sum(inside.values()), sum(s for k, s in inside.items() if k in out),
            tuple(sorted(run.unknown)),
        )  # fmt: skip

    def publish(self, unit: Unit, results: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, int]]:
        """Make a unit's outputs live; returns those through which gradients come back, and the storages of all."""
        outputs = results[: len(unit.outputs)]
        for name, value, grad in zip(unit.outputs, outputs, unit.output_grads, strict=True):
            self.live[name] = value.detach().requires_grad_(grad)
        return [o for o, g in zip(outputs, unit.output_grads, strict=True) if g], _storages(outputs)

    def arguments(self, unit: Unit) -> tuple[list[Tensor], ...]:
        """Parameters, buffers, constants, batch fields and live inputs."""
        parameters, buffers, batch = (
            [self.leaf(kind, name) for name in names]
            for kind, names in (("p", unit.parameters), ("b", unit.buffers), ("f", unit.fields))
        )
        constants = [torch.empty_like(c, device=META) for c in unit.constants]
        return parameters, buffers, constants, batch, [self.live[n] for n in unit.inputs]

    def leaf(self, kind: str, name: str) -> Tensor:
        """A parameter, a buffer, or this rank's rows of a batch field."""
        if (kind, name) not in self.leaves:
            value = self.captured[kind, name]
            shape = [local_rows(self.env) if kind == "f" and d == 0 else int(s) for d, s in enumerate(value.shape)]
            grad = kind == "p" and name not in self.frozen
            self.leaves[kind, name] = torch.empty(shape, dtype=value.dtype, device=META, requires_grad=grad)
        return self.leaves[kind, name]

    def size(self, size: Any, most: int) -> int:
        """A size in the captured graph, for the rows at hand; ``most`` where it depends on data."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        if not size.node.has_hint():
            return most
        return int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, self.env.rows)))


class _Run:
    """One unit: forward op by op, then backward."""

    def __init__(self, walk: _Walk, parameters: Mapping[int, int]) -> None:
        self.walk, self.parameters = walk, parameters
        self.meter = Meter(walk.device)
        self.kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.unknown: set[str] = set()
        self.weight_flops: Counter[int] = Counter()  # of forward, by the storage of the weight

    def pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self.kept.add(kept)  # lives as long as the graph that needs it
        return kept

    def forward(self, unit: Unit, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        assert unit.graph is not None
        values: dict[fx.Node, Any] = {}
        feed = iter([self.walk.env, *arguments])
        for node in unit.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(feed)
            elif node.op == "output":
                return tuple(values[n] for n in node.args[0])
            else:
                values[node] = self.call(node, _filled(node.args, values), _filled(node.kwargs, values))
        raise AssertionError("a graph without output")

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        before = self.meter.flops
        try:
            if target in COMPOSED:
                result = COMPOSED[target](self.walk.device, *args, **kwargs)
            else:
                result = target(*args, **kwargs)
        except (NotImplementedError, RuntimeError):  # no kernel for meta tensors, or one that needs to see values
            self.unknown.add(str(target))
            return self.stand_in(node, args)
        kept = not is_known(target) and any(r.requires_grad for r in tensors_in(result))
        if kept or _depends_on_data(node):
            self.unknown.add(str(target))
        if base_name(target) in SPLIT and (key := storage(args[1])) in self.parameters:
            self.weight_flops[key] += self.meter.flops - before
        return result

    def stand_in(self, node: fx.Node, args: Any) -> Any:
        """Results of the shape that capture saw, from an op that cannot run here; a size that depends on data is the largest."""
        several = isinstance(node.meta["val"], tuple | list)
        values, layouts = ([m] if not several else m for m in (node.meta["val"], node.meta["layout"]))
        operands = tensors_in(args)
        most = max((o.numel() for o in operands), default=1)
        made: list[Any] = []
        for one, placed in zip(values, layouts, strict=True):
            if not isinstance(one, Tensor):
                made.append(self.walk.size(one, most))
                continue
            shape = [self.walk.size(s, most) for s in one.shape]
            for d, factors in enumerate(placed.dims):
                if any(f.axes for f in factors):
                    shape[d] = shape[d] * local_rows(self.walk.env) // self.walk.env.rows
            made.append(_StandIn.apply(shape, one.dtype, *operands))  # type: ignore[no-untyped-call]
        return made if several else made[0]

    def backward(self, outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
        """Run backward; returns the FLOPs of weight gradients, each as many as its op's in forward."""
        seeds = [torch.empty_like(o) for o in outputs]
        try:
            with self.meter:
                grads = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        except (NotImplementedError, RuntimeError) as error:
            culprit = re.search(r"\w+::\w+", str(error))
            self.unknown.add(f"backward of {culprit[0] if culprit else 'the unit'}")
            return 0
        return sum(self.weight_flops[storage(t)] for t, g in zip(wanted, grads, strict=True) if g is not None)


class _StandIn(torch.autograd.Function):
    """An empty tensor that depends on ``operands`` and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], dtype: torch.dtype, *operands: Tensor) -> Tensor:
        ctx.like = [(o.shape, o.dtype) if o.is_floating_point() else None for o in operands]
        return torch.empty(tuple(shape), dtype=dtype, device=META)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *(None if o is None else torch.empty(o[0], dtype=o[1], device=META) for o in ctx.like)


class _Kept:
    """A tensor that autograd keeps, for as long as it does."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor


class _Silent:
    """A communicator, and the handle of all its operations: what peers would send never matters."""

    def all_reduce(self, *args: Any, **kwargs: Any) -> _Silent:
        return self

    all_gather = reduce_scatter = all_reduce

    def wait(self) -> None:
        """At once."""


# ---- values of the capture -------------------------------------------------------------------------------------------


def _captured(trace: Trace) -> dict[tuple[str, str], Any]:
    """The captured (fake) tensors of the batch fields ("f", name), parameters ("p", name) and buffers ("b", name).

    A unit's placeholders carry none: each graph is walked beside the whole one that it was cut from, whose placeholders do and
    end with the fields.  A buffer of which only updates are read is like its update.
    """
    whole = next(node.graph for unit in trace.units for node in unit.values.values())
    places = [n for n in whole.nodes if n.op == "placeholder"]
    found: dict[tuple[str, str], Any] = {
        ("f", name): place.meta["val"] for name, place in zip(trace.fields, places[-len(trace.fields) :], strict=True)
    }
    for unit in trace.units:
        assert unit.graph is not None
        names = {f"{k}{i}": (k, n) for k, own in (("p", unit.parameters), ("b", unit.buffers)) for i, n in enumerate(own)}
        mine = _outputs(unit.graph)
        updates = zip(unit.updates, mine[len(unit.outputs) :], strict=True)
        found.update((("b", n), u.meta["val"]) for n, u in updates if "val" in u.meta)
        origins = (_outputs(whole)[0] if n == "loss" else unit.values[n] for n in unit.outputs)
        pairs = list(zip(mine, origins, strict=False))
        seen: set[fx.Node] = set()
        while pairs:
            here, there = pairs.pop()
            if here.op == "placeholder":
                if here.name in names:
                    found[names[here.name]] = there.meta["val"]
            elif here not in seen:
                pairs.extend(zip(here.all_input_nodes, there.all_input_nodes, strict=True))
            seen.add(here)
    return found


def _depends_on_data(node: fx.Node) -> bool:
    """Whether the result's size does."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    return any(isinstance(s, torch.SymInt) and not s.node.has_hint() for v in tensors_in(node.meta["val"]) for s in v.shape)


def _outputs(graph: fx.Graph) -> Sequence[fx.Node]:
    nodes: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    return tuple(nodes)


def _filled(arguments: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Arguments of a node with values in place of nodes, and the meta device in place of any other."""

    def fill(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return values[a]
        return META if isinstance(a, torch.device) else a

    return fx.node.map_aggregate(arguments, fill)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each storage."""
    return {storage(t): t.untyped_storage().nbytes() for t in tensors}


def _without(these: Mapping[int, int], *others: Mapping[int, int]) -> dict[int, int]:
    return {k: v for k, v in these.items() if not any(k in o for o in others)}
