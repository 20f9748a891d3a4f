"""What each unit costs one rank: parameters, FLOPs, memory traffic, and the bytes that live between forward and
backward.

Units run one after the other on the meta device, forward and backward, as the interpreter runs them: nothing is
allocated, strides, views and shards are those of the real run, and autograd says what it keeps.  What depends on the
device is the table in ``device_kernels.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from shardwise.graph.torch_private import storage_key
from shardwise.measure.meta_run import MetaRun, Places, UnitRun, check_walk, failed_op, largest_sizes, storages, without
from shardwise.units.trace import Trace, Unit
from shardwise.units.weight_products import Product, find


@dataclass(frozen=True)
class UnitCost:
    """The cost of one unit for one rank and one microbatch.

    FLOPs are of matrix products, convolutions and attention, 2 a multiply-add; causal attention counts in full.  Memory
    is in bytes of whole storages, each counted once: a view counts as its base.  Between forward and backward a unit
    keeps its inputs and batch fields besides ``saved_bytes``; an input is also its maker's output.
    """

    index: int
    name: str
    parameters: int  # number of elements; a parameter that several units read counts in each
    forward_flops: int
    input_flops: int  # of backward, without what weight_flops counts: of BACKWARD_INPUT
    weight_flops: int  # of backward: weight gradients of products (`units/weight_products.py`), of BACKWARD_WEIGHT
    forward_bytes: int  # read and written by the kernels of forward, views excepted
    output_bytes: int  # live outputs that the unit made itself
    saved_bytes: int  # made by the unit and kept by autograd
    unknown: tuple[str, ...] = ()  # ops that these numbers guess (as composed on the meta device) or leave out

    @property
    def backward_flops(self) -> int:
        """All of backward."""
        return self.input_flops + self.weight_flops


def cost(
    trace: Trace, rows: int, parts: int = 1, device: str = "cpu", *, tensor: Places | None = None
) -> list[UnitCost]:
    """The cost of each unit of ``trace`` for a microbatch of ``rows`` rows over ``parts`` ranks, of which the last has
    the most.

    ``device`` is "cpu" or "gpu", whichever is present here; ``tensor`` is the rank's place on the axes of tensor
    parallelism, by default the last, too.  Raises :class:`ConfigError` on numbers that the trace cannot take.
    """
    places = check_walk("cost", trace, rows, parts, device, tensor)
    if trace.opaque is not None:
        return [_opaque(trace, unit) for unit in trace.units]
    walk = MetaRun.of(trace, rows, parts, device, tensor=places)
    with largest_sizes():
        return [_unit(walk, unit) for unit in trace.units]


def _opaque(trace: Trace, unit: Unit) -> UnitCost:
    """Only its parameters are known."""
    number = sum(p.numel for p in trace.parameters)
    rest = {f.name: 0 for f in fields(UnitCost)[3:-1]}
    return UnitCost(unit.index, unit.name, number, **rest, unknown=("the whole model: it was not captured",))


# ---- the walk --------------------------------------------------------------------------------------------------------


def _unit(walk: MetaRun, unit: Unit) -> UnitCost:
    assert unit.graph is not None
    parameters, buffers, constants, batch, inputs = walk.arguments(unit)
    run = _Measured(walk, find(unit.graph, [p.requires_grad for p in parameters]))
    with run.meter, saved_tensors_hooks(run.pack, _unpack), torch.set_grad_enabled(unit.differentiable):
        results = run.forward(unit.graph, [*parameters, *buffers, *constants, *batch, *inputs])
        good, out = walk.publish(unit, results), storages(results[: len(unit.outputs)])
        del results
    saved = storages(k.tensor for k in run.kept)
    forward_flops, forward_bytes = run.meter.flops, run.meter.bytes
    weight = run.backward(good, [t for t in (*parameters, *inputs) if t.requires_grad]) if good else 0
    given = storages([*walk.leaves.values(), *constants, *inputs])
    return UnitCost(
        unit.index, unit.name, sum(p.numel() for p in parameters),
        forward_flops, run.meter.flops - forward_flops - weight, weight, forward_bytes,
        sum(without(out, given).values()), sum(without(saved, given).values()), tuple(sorted(run.unknown)),
    )  # fmt: skip


class _Measured(UnitRun):
    """One unit: what autograd keeps of forward, and backward."""

    def __init__(self, walk: MetaRun, products: Mapping[fx.Node, Product]) -> None:
        super().__init__(walk, products)
        self.kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self.kept.add(kept)  # lives as long as the graph that needs it
        return kept

    def backward(self, outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
        """Run backward; returns the FLOPs of weight gradients, each as many as its op's in forward."""
        seeds = [torch.empty_like(o) for o in outputs]
        try:
            with self.meter:
                grads = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        except (NotImplementedError, RuntimeError) as error:
            self.unknown.add(f"backward of {failed_op(error)}")
            return 0
        return sum(
            self.weight_flops.get(storage_key(t), 0) for t, g in zip(wanted, grads, strict=True) if g is not None
        )


class _Kept:
    """A tensor that autograd keeps, for as long as it does."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor
