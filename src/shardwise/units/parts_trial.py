"""Whether the parts of a batch compute what one device does of all rows, found by trial.

Where forward decides in Python by values of a batch, as by the numbers of patches of its pictures, a part of the batch
decides by its own.  What it decides says which ops run; that these then compute the same for a row shows a forward of
the whole batch and of its parts, as they are and with noise, in which the parameters differ from each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from shardwise.capture.example import shaken_value
from shardwise.capture.state import kept_tensors
from shardwise.capture.wrapped import LossFunction, rows_in
from shardwise.core.errors import ConfigError
from shardwise.initial.copies import copied
from shardwise.units.loss_weight import Probe, fitting
from shardwise.units.trials import CPU, Trials
from shardwise.units.varied_batches import Fields


def parts_agree(
    module: nn.Module, batch: Fields, sizes: Sequence[int], loss: LossFunction | None, precision: str, training: bool,
    drawing: Callable[[int, int], AbstractContextManager[None]] | None = None,
) -> bool:  # fmt: skip
    """Return whether the loss of a batch is that of its parts, of these ``sizes`` in rows; parameters of ``module``
    without values get random ones.  Forward of so many rows, from one on, runs in ``drawing``."""
    trials = Trials(_filled(module), batch, loss, precision, CPU, training)

    def loss_of(part: Fields, first: int) -> float:
        with nullcontext() if drawing is None else drawing(rows_in(part), first):
            return trials.on_cpu(part, first).loss

    probe = Probe(loss_of, trials.elsewhere.precision)
    try:
        found = [fitting(probe, one, sizes) for one in (batch, _noised(batch))]
    except ConfigError:  # forward takes no such part
        return False
    return bool((found[0] or set()) & (found[1] or set()))


def _noised(batch: Fields) -> Fields:
    own = torch.Generator().manual_seed(0)

    def of(value: Tensor) -> Tensor:
        noise = torch.randn(value.shape, generator=own)
        return value + (0.1 * noise).to(value) if value.is_floating_point() else value

    return {name: of(value) for name, value in batch.items()}


def _filled(module: nn.Module) -> nn.Module:
    """Return the module, or a copy of one on the meta device with random parameters."""
    if not any(one.is_meta for one in module.parameters()):
        return module
    memo = {**kept_tensors(module), **{id(one): one for one in module.buffers()}}
    for index, one in enumerate(module.parameters()):
        value = shaken_value(torch.zeros(one.shape, dtype=one.dtype), index)
        memo[id(one)] = nn.Parameter(value, one.requires_grad)
    return copied(module, memo)


__all__ = ["parts_agree"]
