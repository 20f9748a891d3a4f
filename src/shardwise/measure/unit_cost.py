"""Measure what each unit costs one rank: parameters, FLOPs, memory traffic, and bytes kept from forward to backward.

Units run one after the other on the meta device, forward and backward, as the interpreter runs them: nothing is
allocated, strides, views and shards are those of the real run, and autograd says what it keeps.  The tables in
``device_kernels.py`` say what depends on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from shardwise.graph.torch_private import storage_key
from shardwise.kernels.flop_counter import Meter
from shardwise.measure.meta_run import (
    MetaRun,
    Places,
    UnitRun,
    check_numbers,
    failed_op,
    largest_sizes,
    storages,
    without,
)
from shardwise.units.trace import NOT_CAPTURED, Trace, Unit
from shardwise.units.weight_products import Product, find


@dataclass(frozen=True)
class UnitCost:
    """This is the cost of one unit for one rank and one microbatch.

    FLOPs are those of matrix products, convolutions and attention, 2 per multiply-add; causal attention counts in full.
    Memory is in bytes of whole storages, each counted once: a view counts as its base.  Between forward and backward a
    unit keeps its inputs and batch fields besides ``saved_bytes``; an input is also an output of the unit that made it.
    """

    index: int
    name: str
    parameters: int  # the number of elements; a parameter that several units read counts in each
    forward_flops: int
    input_flops: int  # of backward without weight_flops: those of BACKWARD_INPUT
    weight_flops: int  # of the weight gradients of products (`units/weight_products.py`): those of BACKWARD_WEIGHT
    forward_bytes: int  # bytes that the kernels of forward read and write, views excepted
    output_bytes: int  # bytes of live outputs that the unit made itself
    saved_bytes: int  # bytes that the unit made and autograd keeps
    unknown: tuple[str, ...] = ()  # ops that these numbers guess (as composed on the meta device) or leave out

    @property
    def backward_flops(self) -> int:
        """Return the FLOPs of all of backward."""
        return self.input_flops + self.weight_flops


def cost(
    trace: Trace, rows: int, parts: int = 1, device: str = "cpu", *, tensor: Places | None = None
) -> list[UnitCost]:
    """Return the cost of each unit of ``trace`` for a microbatch of ``rows`` rows on the last of ``parts`` ranks.

    The last rank has the most rows.  ``device`` is "cpu" or "gpu", whichever is present here; ``tensor`` is the rank's
    place on the axes of tensor parallelism, by default the last.  Raises :class:`ConfigError` for numbers that the
    trace cannot take.
    """
    places = check_numbers("cost", trace, rows, parts, device, tensor)
    if trace.opaque is not None:
        return [_opaque(trace, unit) for unit in trace.units]
    run = MetaRun(trace, rows, parts, device, tensor=places)
    with largest_sizes():
        return [_unit(run, unit) for unit in trace.units]


def _opaque(trace: Trace, unit: Unit) -> UnitCost:
    """Return the cost of a unit that was not captured: only its parameters are known."""
    number = sum(p.numel for p in trace.parameters)
    rest = {f.name: 0 for f in fields(UnitCost)[3:-1]}
    return UnitCost(unit.index, unit.name, number, **rest, unknown=(NOT_CAPTURED,))


# ---- the run ---------------------------------------------------------------------------------------------------------


def _unit(run: MetaRun, unit: Unit) -> UnitCost:
    assert unit.graph is not None
    parameters, buffers, constants, batch, inputs = run.arguments(unit)
    measured = _Measured(run, unit, find(unit.graph, [p.requires_grad for p in parameters]))
    with measured.meter, saved_tensors_hooks(measured.pack, _unpack), torch.set_grad_enabled(unit.differentiable):
        results = measured.forward(unit.graph, unit.merged([*parameters, *buffers, *constants, *batch, *inputs]))
        good, out = run.publish(unit, results), storages(results[: len(unit.outputs)])
        del results
    saved = storages(k.tensor for k in measured.kept)
    forward_flops, forward_bytes = measured.meter.flops, measured.meter.bytes
    weight = measured.backward(good, [t for t in (*parameters, *inputs) if t.requires_grad]) if good else 0
    given = storages([*run.leaves.values(), *constants, *inputs])
    return UnitCost(
        unit.index, unit.name, sum(p.numel() for p in parameters),
        forward_flops, measured.meter.flops - forward_flops - weight, weight, forward_bytes,
        sum(without(out, given).values()), sum(without(saved, given).values()), tuple(sorted(measured.unknown)),
    )  # fmt: skip


class _Measured(UnitRun):
    """Run one unit, forward and backward, and see what its kernels do and what autograd keeps of its forward.

    ``weight_flops`` maps the storage of each weight to the FLOPs of its ``products``.
    """

    def __init__(self, run: MetaRun, unit: Unit, products: Mapping[fx.Node, Product]) -> None:
        super().__init__(run, unit)
        self.products, self.meter = products, Meter(run.device)
        self.weight_flops: dict[int, int] = {}
        self.kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        before = self.meter.flops
        result = super().call(node, args, kwargs)
        if node in self.products:
            key = storage_key(args[self.products[node].at])
            self.weight_flops[key] = self.weight_flops.get(key, 0) + self.meter.flops - before
        return result

    def pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self.kept.add(kept)  # lives as long as the graph that needs it
        return kept

    def backward(self, outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
        """Run backward; return the FLOPs of weight gradients, each as many as those of its product in forward."""
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
    """This holds a tensor that autograd keeps, for as long as autograd does."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor
