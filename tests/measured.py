"""What units of a trace cost when they run: memory as saved-tensor hooks see it, FLOPs as torch's own counter does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from shardwise.capture.casts import cast_field, shadow_dtype
from shardwise.core.layout import shard_range
from shardwise.graph.torch_private import storage_key
from shardwise.measure.unit_cost import UnitCost
from shardwise.ops.env import Env
from shardwise.runtime.threads import ThreadCommunicator
from shardwise.units.batch_sums import stand_ins
from shardwise.units.trace import Trace

Fields = Mapping[str, Tensor]


class Keeping(saved_tensors_hooks):
    """Records what the graphs made under it keep, for as long as they do."""

    def __init__(self) -> None:
        self.kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        super().__init__(self._pack, lambda one: one.tensor)

    def _pack(self, tensor: Tensor) -> _Kept:
        one = _Kept(tensor)
        self.kept.add(one)
        return one

    def storages(self) -> dict[int, int]:
        """Bytes of what is kept now."""
        return storages(one.tensor for one in self.kept)


class _Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of storages by identity."""
    return {storage_key(t): t.untyped_storage().nbytes() for t in tensors}


def flops_of_flash(*shapes: Sequence[int], out_shape: Any = None, **_: Any) -> int:
    """For torch's counter, which does not know the CPU's kernel; given q, k, v, or the gradient before them."""
    backward = len(shapes[3:]) > 3 and isinstance(shapes[3], Sequence)
    (b, h, q, d), k = shapes[1 if backward else 0], shapes[2 if backward else 1][2]
    return (10 if backward else 4) * b * h * q * k * d


def counter() -> FlopCounterMode:
    ops = torch.ops.aten
    kernels = (
        ops._scaled_dot_product_flash_attention_for_cpu,
        ops._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    return FlopCounterMode(display=False, custom_mapping=dict.fromkeys(kernels, flops_of_flash))


def real_costs(
    module: nn.Module, found: Trace, batch: Fields, rows: int, comm: ThreadCommunicator | None = None
) -> list[UnitCost]:
    """Run the units of ``found`` on real tensors, as a rank of ``comm`` would; measure all but ``forward_bytes``."""
    parts, index = (1, 0) if comm is None else (comm.mesh.size, comm.rank)
    env = Env(comm, ("dp",), parts, index, rows)
    env.counts = [torch.full_like(one, 7, device="cpu") for one in stand_ins(found.sums, env)]
    low, high = shard_range(rows, parts, index)
    fields = {n: cast_field(v[low:high], found.precision).clone() for n, v in batch.items()}
    own = dict(module.named_parameters(remove_duplicate=False))
    leaves = {}
    for name in {n for u in found.units for n in u.parameters}:
        leaf = own[name].detach().to(shadow_dtype(module, name, own[name], found.precision), copy=True)
        leaves[name] = leaf.requires_grad_(name not in found.frozen)
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    weights = {
        id(m.weight) for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d) or type(m).__name__ == "Conv1D"
    }
    splits = {n for n, p in own.items() if id(p) in weights}
    live: dict[str, Tensor] = {}
    costs = []
    for unit in found.units:
        parameters = [leaves[n] for n in unit.parameters]
        given = [*parameters, *(buffers[n] for n in unit.buffers), *unit.constants]
        data, inputs = [fields[n] for n in unit.fields], [live[n] for n in unit.inputs]
        forward, inner, every, keeping = counter(), counter(), counter(), Keeping()
        with forward, torch.set_grad_enabled(unit.differentiable), keeping:
            outputs = unit.function(env, *given, *data, *inputs)[: len(unit.outputs)]
        live.update(
            {n: o.detach().requires_grad_(g) for n, o, g in zip(unit.outputs, outputs, unit.output_grads, strict=True)}
        )
        made = storages(outputs)
        good = [o for o, g in zip(outputs, unit.output_grads, strict=True) if g]
        del outputs
        saved = keeping.storages()
        seeds = [torch.ones_like(o) for o in good]
        sources = zip((*unit.parameters, *unit.inputs), (*parameters, *inputs), strict=True)
        wanted = {n: t for n, t in sources if t.requires_grad}
        others = [t for n, t in wanted.items() if n not in splits]
        with inner:
            if good and others:
                torch.autograd.grad(good, others, seeds, retain_graph=True, allow_unused=True)
        with every:
            if good:
                torch.autograd.grad(good, list(wanted.values()), seeds, allow_unused=True)
        outside = storages([*leaves.values(), *buffers.values(), *fields.values(), *unit.constants, *inputs])
        costs.append(UnitCost(
            unit.index, unit.name, sum(p.numel() for p in parameters),
            forward.get_total_flops(), inner.get_total_flops(), every.get_total_flops() - inner.get_total_flops(), 0,
            sum(v for k, v in made.items() if k not in outside), sum(v for k, v in saved.items() if k not in outside),
        ))  # fmt: skip
    return costs
