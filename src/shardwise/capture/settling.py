"""Buffers that a first forward makes larger or smaller, as tables of positions are: a model that has run once has them.

A captured step writes to buffers of fixed shapes.  So a copy of the model runs before it is captured, and the module
gets the buffers that come of that, if they follow from nothing but the shapes of the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.example import shaken_value
from shardwise.capture.state import generators_kept, kept_tensors
from shardwise.capture.wrapped import LossFunction, WithLoss, set_mode
from shardwise.core.fields import has_rows


def settle(module: nn.Module, batch: Mapping[str, Tensor], loss: LossFunction | None, training: bool) -> list[str]:
    """Give a module the buffers of other shapes that a forward of ``batch`` assigns, and the numbers and words that
    their modules keep beside them; return the names of these buffers.

    Nothing is changed, and none returned, if a forward with other parameters and the first row in place of all leaves
    something else, or fails."""
    try:
        one, two = (_run(module, batch, loss, training, again) for again in (False, True))
    except Exception:  # the user's code may raise anything
        return []
    found, other = _resized(module, one), _resized(module, two)
    if found.keys() != other.keys() or not all(torch.equal(found[name], other[name]) for name in found):
        return []
    own, after, again = (dict(each.named_modules()) for each in (module, one, two))
    owners = {name.rpartition(".")[0] for name in found}
    if any(_plain(after[path]) != _plain(again[path]) for path in owners):
        return []
    for path in owners:
        for attribute, number in _plain(after[path]).items():
            setattr(own[path], attribute, number)
    for name, value in found.items():
        path, _, attribute = name.rpartition(".")
        setattr(own[path], attribute, value)
    return list(found)


def _resized(module: nn.Module, after: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that have another shape ``after`` a forward."""
    before = {name: value.shape for name, value in module.named_buffers()}
    return {name: value.detach() for name, value in after.named_buffers() if value.shape != before.get(name)}


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers and words."""
    own = ((name, value) for name, value in vars(module).items() if name != "training")
    return {name: value for name, value in own if isinstance(value, (int, float, str, torch.Size))}


def _run(
    module: nn.Module, batch: Mapping[str, Tensor], loss: LossFunction | None, training: bool, again: bool
) -> nn.Module:  # fmt: skip
    """Return a copy after a forward, which has other parameters and nothing but the first row if it runs ``again``."""
    own = copy.deepcopy(module, kept_tensors(module))
    fields = {name: value.detach().clone() for name, value in batch.items()}
    if again:
        fields = {
            name: value[:1].expand_as(value).clone() if has_rows(name) else value for name, value in fields.items()
        }
        for number, parameter in enumerate(own.parameters()):
            parameter.data = shaken_value(parameter.data, number)
    with generators_kept(), torch.random.fork_rng(devices=[]), torch.no_grad():
        set_mode(WithLoss(own, loss), training)(fields)
    return own
