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
NAMED = ("param_names", "name", "group_name")  # what only names a group, or its parameters
CYCLED = ("max_momentum", "base_momentum")  # what those note that change momentum or betas as well


def choice_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerChoice:
    """Return what one of torch's optimizers computes.

    Raises :class:`ConfigError` where an :class:`OptimizerChoice` cannot say it."""
    name = type(optimizer).__name__.lower()
    if not type(optimizer).__module__.startswith("torch.optim") or name not in CHOICES["name"]:
        legal = f"{', '.join(CHOICES['name'])} of torch.optim."
        raise ConfigError.on("optimizer", f"{type(optimizer).__name__} is not legal", legal)
    group, decay = _one_group(optimizer)
    every = [p for one in optimizer.param_groups for p in one["params"]]
    given, own = {id(p) for p in every}, {id(p): p.requires_grad for p in model.parameters()}
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
    return OptimizerChoice(name=name, decay=decay, **numbers)  # type: ignore[arg-type]


def _one_group(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], str]:
    """Return the hyperparameters of all groups, and which parameters decay: groups without weight decay have all
    parameters of fewer than two dims, and no others, or there is no such group."""
    groups = [{k: v for k, v in one.items() if k not in ("params", *NAMED)} for one in optimizer.param_groups]
    alike = all({**one, "weight_decay": 0} == {**groups[0], "weight_decay": 0} for one in groups)
    decays = [[bool(one["weight_decay"])] * len(one["params"]) for one in optimizer.param_groups]
    flat = [p for one in optimizer.param_groups for p in one["params"]]
    values = {one["weight_decay"] for one in groups}
    if alike and len(values) == 1:
        return groups[0], "all"
    pairs = zip(flat, (d for one in decays for d in one), strict=True)
    by_dims = all((p.dim() >= 2) == decay for p, decay in pairs)
    if alike and by_dims and len(values - {0}) == 1:
        return next(one for one in groups if one["weight_decay"]), "matrices"
    wrong = f"{len(groups)} groups of parameters are not legal"
    legal = "one, or a second one without weight decay, of the parameters of fewer than two dims (norms and biases)."
    raise ConfigError.on("optimizer", wrong, legal)


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the hyperparameters of all groups but for the learning rate; raise :class:`ConfigError` if a schedule
    changes them."""
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        if any(key in group for key in CYCLED):
            wrong, legal = (
                "a schedule that changes momentum or betas is not legal",
                "one that changes lr alone, such as",
            )
            raise ConfigError.on("optimizer", wrong, f"{legal} OneCycleLR(cycle_momentum=False).")
        place = f" of group {number}" if number else ""
        skipped = ("params", *HOW, *SCHEDULED, *NAMED)
        found |= {f"{key}{place}": value for key, value in group.items() if key not in skipped}
    return found


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate; raise :class:`ConfigError` where groups have different ones."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise ConfigError.on("optimizer", f"learning rates {sorted(rates)} of its groups", "one for all groups.")
    return rates.pop()
