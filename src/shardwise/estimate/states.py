"""Model states are the parameters, gradients and optimizer state that a rank holds from step to step, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    optimizer's state and the average of the master, and the bytes per segment of the optimizer's scalars."""

    parameter: int
    gradient: int
    master: int
    state: int
    scalars: int = 0
    average: int = 0


def widths(choice: OptimizerChoice, itemsize: int, wide: int) -> Widths:
    """Return the widths of parameters of ``itemsize`` bytes whose gradients, masters and state have ``wide`` bytes."""
    scalars = SCALAR * len(choice.scalars)
    average = 0 if choice.ema is None else wide
    return Widths(itemsize, wide, 0 if wide == itemsize else wide, len(choice.state) * wide, scalars, average)


def bucket_states(
    share: Share, each: Widths, *, learns: bool = True, offload: bool = False, common: bool = False
) -> tuple[States, States]:  # fmt: skip
    """Return what a rank holds of one bucket on its device and on the host, where ``offload`` puts masters, state and a
    copy of the gradient.

    With ``common``, ranks have memory in common, where the parameters of sharded buckets lie once for all of them.
    Buffers have the layout's padding; optimizer state does not.  The rows of a table's gradient are not among it.
    """
    whole, held = share.layout.numel, share.held.numel
    parameters = (held if share.rule.rest == "S" or common and share.rule.state != "O" else whole) * each.parameter
    if not learns:
        return States(parameters), States()
    gradients = 0 if share.table else (held if share.rule.grad == "S" else whole) * each.gradient
    spans = [span for one in share.updates for span in one.spans]
    state = sum(span.numel for span in spans) * each.state + len(spans) * each.scalars
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
    return sum(span.numel * (wide + each.state) + each.scalars for span in spans)


def step_peak(choice: OptimizerChoice, spans: Sequence[Span], each: Widths, wide: int, device: str) -> int:
    """Return the bytes that the update of ``spans`` takes beside their states.

    A fused kernel takes the clipping factor alone.  Any other first copies what it may have to undo: parameters and
    state.
    """
    if choice.fused_on(device):
        return SCALAR if spans else 0
    undo = changed(spans, each, wide)
    plain, decayed = OPTIMIZERS[choice.name].temporaries[device]
    numbers = [(decayed if choice.with_weight_decay(one.group) else plain) * one.numel for one in spans]
    return undo + max(numbers, default=0) * wide
