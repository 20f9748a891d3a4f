"""Model states: the bytes of parameters, gradients and optimizer state that a rank holds from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.core.flat import FlatBuffer, FlatShard
from shardwise.core.optim import FUSED, OptimizerChoice
from shardwise.core.plan import ParameterRule, Plan
from shardwise.parallel.data import SHARDS, ZERO, held_range, placement
from shardwise.units.trace import DECAY, Bucket

STATE_TENSORS: Mapping[str, int] = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adagrad": 1, "rmsprop": 1, "sgd": 0}
"""Tensors of a parameter's size that an optimizer keeps, without momentum where that is an option."""

SCALARS: Mapping[str, int] = {"nadam": 2, "sgd": 0}
"""Scalars that an optimizer keeps for each segment, where it is not one (the number of its steps)."""

UPDATE_TENSORS: Mapping[tuple[str, str], tuple[int, int]] = {
    ("rmsprop", "cpu"): (1, 2), ("nadam", "cpu"): (2, 3), ("radam", "cpu"): (5, 6),
    ("adagrad", "gpu"): (1, 2), ("rmsprop", "gpu"): (1, 2), ("nadam", "gpu"): (3, 3), ("radam", "gpu"): (4, 5),
}  # fmt: skip
"""Temporaries of a segment's size in the update of an optimizer that is not fused: (without weight decay, with it)."""


SCALAR = 4
"""Bytes of the clipping factor."""


@dataclass(frozen=True)
class States:
    """Bytes by category; masters of parameters in lower precision are part of the optimizer's."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Widths:
    """Bytes an element: of the parameter that computes, its gradient, its master (0 where it is its own), the optimizer's state;
    and bytes a segment of the optimizer's scalars."""

    parameter: int
    gradient: int
    master: int
    state: int
    scalars: int = 0


def widths(choice: OptimizerChoice, itemsize: int, wide: int, *, doubles: bool = False) -> Widths:
    """For parameters of ``itemsize`` bytes whose gradients, masters and state have ``wide``.

    ``doubles`` says that the optimizer counts its steps in fp64: one that is not fused, where that is torch's default dtype.
    """
    tensors = STATE_TENSORS[choice.name] + (1 if choice.momentum else 0)
    scalar = 8 if doubles else 4
    return Widths(itemsize, wide, 0 if wide == itemsize else wide, tensors * wide, scalar * SCALARS.get(choice.name, 1))


@dataclass(frozen=True)
class Share:
    """What a rank has of a bucket: its rule as :func:`placement` gives it, the range ``held`` of masters and state, and the segments of
    each of its optimizers as (whether they decay, elements)."""

    layout: FlatBuffer
    rule: ParameterRule
    held: FlatShard
    updates: tuple[tuple[tuple[bool, int], ...], ...] = ()

    @staticmethod
    def of(bucket: Bucket, plan: Plan, choice: OptimizerChoice, rank: int, per_parameter: bool = False) -> Share:
        """Of ``rank``; ``per_parameter``: an optimizer for each parameter."""
        parts, index = plan.mesh.axis_size(SHARDS), plan.mesh.index(rank, SHARDS)
        rule, layout = placement(plan, bucket.parameters[0].name), bucket.layout(choice, plan.mesh, rank)
        held = held_range(rule, layout, parts, index, bucket.learns)
        return Share(layout, rule, held, _updates(layout, held, choice, per_parameter) if bucket.learns else ())


def _updates(
    layout: FlatBuffer, held: FlatShard, choice: OptimizerChoice, per_parameter: bool
) -> tuple[tuple[tuple[bool, int], ...], ...]:
    if not per_parameter:
        return (tuple((group == DECAY, stop - start) for group, start, stop in held.segments(layout)),)
    cut = ((e, min(held.stop, e.stop) - max(held.start, e.offset)) for e in layout.entries)
    return tuple(((choice.decays(e.name, e.shape), numel),) for e, numel in cut if numel > 0)


def bucket_states(
    share: Share, each: Widths, *, learns: bool = True, offload: bool = False, common: bool = False
) -> tuple[States, States]:  # fmt: skip
    """What a rank holds of one bucket on its device and on the host, where masters, state and a copy of the gradient are offloaded.

    ``common``: ranks have memory in common, where the parameters of sharded buckets lie once for all of them.  Buffers have the layout's padding; optimizer state is only of the segments between.
    """
    whole, held = share.layout.numel, share.held.numel
    parameters = (held if share.rule.rest == "S" or common else whole) * each.parameter
    if not learns:
        return States(parameters), States()
    gradients = (held if share.rule.grad == "S" else whole) * each.gradient
    segments = [numel for one in share.updates for _, numel in one]
    state = sum(segments) * each.state + len(segments) * each.scalars
    if offload:
        return States(parameters, gradients), States(0, held * each.gradient, held * each.gradient + state)
    return States(parameters, gradients, held * each.master + state), States()


def changed(segments: Sequence[tuple[bool, int]], each: Widths, wide: int) -> int:
    """Bytes that an update changes: parameters and state of ``segments`` of (whether they decay, elements)."""
    return sum(numel * (wide + each.state) + each.scalars for _, numel in segments)


def step_peak(choice: OptimizerChoice, segments: Sequence[tuple[bool, int]], each: Widths, wide: int, device: str) -> int:
    """Bytes that the update of a bucket takes beside its states, for ``segments`` of (whether they decay, elements).

    A fused kernel takes the clipping factor alone.  Any other first copies what it may have to undo: parameters and state.
    """
    if choice.name in FUSED[device]:
        return SCALAR if segments else 0
    undo = changed(segments, each, wide)
    decays = bool(choice.weight_decay)
    return undo + max((UPDATE_TENSORS[choice.name, device][decays and own] * numel * wide for own, numel in segments), default=0)


def model_states(
    parameters: int, zero: int, dp: int, param_bytes: int = 2, grad_bytes: int = 2, state_bytes: int = 12
) -> States:  # fmt: skip
    """What the first of ``dp`` ranks holds of ``parameters`` elements in one bucket under ZeRO's stage ``zero``, 0 to 3.

    By default of mixed-precision Adam as Rajbhandari et al. (2019, arXiv 1910.02054) count it: 2 + 2 + 12 bytes an element.
    """
    layout = FlatBuffer.pack([("all", (parameters,), "all")], dp, param_bytes)
    held = held_range(ZERO[zero], layout, dp, 0)
    updates = _updates(layout, held, OptimizerChoice(), False)
    return bucket_states(Share(layout, ZERO[zero], held, updates), Widths(param_bytes, grad_bytes, 0, state_bytes))[0]
