"""Model states are the parameters, gradients and optimizer state that a rank holds from step to step, in bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardwise.core.optim import OptimizerChoice
from shardwise.core.optimizers import OPTIMIZERS
from shardwise.units.share import Share, Span

SCALAR = 4
"""The bytes of a scalar: the number of steps, or the clipping factor."""


@dataclass(frozen=True)
class States:
    """The bytes by category; masters of parameters in lower precision are part of the optimizer's."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: States) -> States:
        return States(
            self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer
        )


@dataclass(frozen=True)
class Widths:
    """The bytes per element of the parameter that computes, its gradient, its master (0 if it is its own), the
    optimizer's state and the average of the master, and the bytes per segment of the optimizer's scalars; and, for an
    optimizer of whole tensors, the bytes of its state of a tensor by its shape."""

    parameter: int
    gradient: int
    master: int
    state: int
    scalars: int = 0
    average: int = 0
    whole: Callable[[tuple[int, ...]], int] | None = None


def widths(choice: OptimizerChoice, itemsize: int, wide: int) -> Widths:
    """Return the widths of parameters of ``itemsize`` bytes whose gradients, masters and state have ``wide`` bytes."""
    scalars = SCALAR * len(choice.scalars)
    average = 0 if choice.ema is None else wide
    master = 0 if wide == itemsize else wide
    whole = partial(_whole, choice, wide) if choice.whole else None
    return Widths(itemsize, wide, master, len(choice.state) * wide, scalars, average, whole)


def _whole(choice: OptimizerChoice, wide: int, shape: tuple[int, ...]) -> int:
    shapes = choice.whole_state(shape).values()
    return sum(math.prod(one) * wide if one else SCALAR for one in shapes)


def bucket_states(
    share: Share, parts: Sequence[Widths], *, learns: bool = True, offload: bool = False, common: bool = False
) -> tuple[States, States]:  # fmt: skip
    """Return what a rank holds of one bucket on its device and on the host, where ``offload`` puts masters, state and a
    copy of the gradient. ``parts`` are the widths of each part of the choice of optimizers.

    With ``common``, ranks have memory in common, where the parameters of sharded buckets lie once for all of them.
    Buffers have the layout's padding; optimizer state does not.  The rows of a table's gradient are not among it.
    """
    whole, held, each = share.layout.numel, share.held.numel, parts[0]
    parameters = (held if share.rule.rest == "S" or common and share.rule.state != "O" else whole) * each.parameter
    if not learns:
        return States(parameters), States()
    gradients = 0 if share.table else (held if share.rule.grad == "S" else whole) * each.gradient
    state = sum(state_bytes(one.spans, parts[one.part]) for one in share.updates)
    state += sum(own(one.shape) for one in share.owned if (own := parts[one.part].whole) is not None)
    state += average_bytes(held, each)
    if offload:
        return States(parameters, gradients), States(0, held * each.gradient, held * each.gradient + state)
    return States(parameters, gradients, held * each.master + state), States()


def average_bytes(numel: int, each: Widths) -> int:
    """Return the bytes of the average of ``numel`` elements that a rank holds, with the number of steps in it."""
    return numel * each.average + SCALAR if numel and each.average else 0


def average_peak(numel: int, each: Widths) -> int:
    """Return the bytes that a step of this average takes: the new one, its weight, and whether the step is skipped."""
    return (numel + 1) * each.average + 1 if numel and each.average else 0


def changed(spans: Sequence[Span], each: Widths, wide: int) -> int:
    """Return the bytes that an update changes: the parameters and state of ``spans``."""
    return sum(span.numel for span in spans) * wide + state_bytes(spans, each)


def state_bytes(spans: Sequence[Span], each: Widths) -> int:
    """Return the bytes of the optimizer's state of ``spans``."""
    return sum(span.numel * each.state + each.scalars for span in spans)


def whole_peak(share: Share, choice: OptimizerChoice, wide: int) -> tuple[int, int]:
    """Return the bytes that a step by whole tensors takes beside the states where the optimizer is, and those of what
    ranks send each other at the same time.

    A rank whose tensors are in parts puts all that it owns together, with gradients: what has come and what is made of
    it are there at once.  Then it updates one tensor after the other, and sends them back.
    """
    owned = sum(one.numel for one in share.owned) * wide
    update = max((choice.parts[one.part].whole_elements(one.shape) for one in share.owned), default=0) * wide
    if not share.parted:
        return update, 0
    held = share.held_of_whole * wide
    return max(4 * owned, 2 * owned + update, 2 * owned + held), 2 * held + 2 * owned


def step_peak(
    choice: OptimizerChoice, spans: Sequence[Span], each: Widths, wide: int, device: str, part: int = 0
) -> int:  # fmt: skip
    """Return the bytes that the update of ``spans`` by a ``part`` of the choice takes beside their states.

    A fused kernel takes the clipping factor alone.  Any other first copies what it may have to undo: parameters and
    state.
    """
    own = choice.parts[part]
    if own.fused_on(device):
        return SCALAR if spans else 0
    undo = changed(spans, each, wide)
    plain, decayed = OPTIMIZERS[own.name].temporaries[device]
    # A gradient whose sign changes is a new tensor, as one with weight decay is; of both together they are two.
    new = [choice.with_weight_decay(one.group) + choice.parts[one.group // 2].maximize for one in spans]
    numbers = [max(decayed if made else plain, made) * one.numel for one, made in zip(spans, new, strict=True)]
    return undo + max(numbers, default=0) * wide
