"""What one of torch's optimizers computes, as the choice of an optimizer that the engine runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.optim import APPLIES, CHOICES, OptimizerChoice

HOW = ("foreach", "capturable", "differentiable", "fused")  # settings of torch's optimizers that change no number
SCHEDULED = (
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "lr",
)  # what torch's schedules note there, and what they change
CYCLED = ("max_momentum", "base_momentum")  # what those note that change momentum or betas as well


def choice_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerChoice:
    """Return what one of torch's optimizers computes.

    Raises :class:`ConfigError` where an :class:`OptimizerChoice` cannot say it."""
    name = type(optimizer).__name__.lower()
    if not type(optimizer).__module__.startswith("torch.optim") or name not in CHOICES["name"]:
        legal = f"{', '.join(CHOICES['name'])} of torch.optim."
        raise ConfigError.on("optimizer", f"{type(optimizer).__name__} is not legal", legal)
    if len(optimizer.param_groups) != 1:
        wrong = f"{len(optimizer.param_groups)} groups of parameters are not legal"
        legal = 'one, or an OptimizerChoice (its decay = "matrices" keeps weight decay off norms and biases).'
        raise ConfigError.on("optimizer", wrong, legal)
    group = dict(optimizer.param_groups[0])
    given, own = {id(p) for p in group.pop("params")}, {id(p): p.requires_grad for p in model.parameters()}
    if not given <= own.keys() or any(learns and at not in given for at, learns in own.items()):
        raise ConfigError("optimizer: it must have the parameters of the model that require gradients, and no others.")
    group["lr"] = float(group["lr"])
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):  # Adagrad's begins with step 0
        raise ConfigError("optimizer: it has taken steps already, and its state would be lost; legal: a new one.")
    known = {field.name for field in fields(OptimizerChoice)}
    numbers = {key: value for key, value in group.items() if key in known and name in APPLIES.get(key, (name,))}
    for key in group.keys() - numbers.keys() - {*HOW, *SCHEDULED, *CYCLED}:
        decoupled = key == "decoupled_weight_decay" and (name == "adamw" or not group["weight_decay"])
        if group[key] and not decoupled:
            raise ConfigError(f"optimizer: {key} = {group[key]!r} is not legal; legal: {key} off, as by default.")
    return OptimizerChoice(name=name, decay="all", **numbers)  # type: ignore[arg-type]


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the hyperparameters but for the learning rate; raise :class:`ConfigError` if a schedule changes them."""
    group = optimizer.param_groups[0]
    if any(key in group for key in CYCLED):
        wrong = "a schedule that changes momentum or betas is not legal"
        raise ConfigError.on("optimizer", wrong, "one that changes lr alone, such as OneCycleLR(cycle_momentum=False).")
    return {key: value for key, value in group.items() if key not in ("params", *HOW, *SCHEDULED)}
