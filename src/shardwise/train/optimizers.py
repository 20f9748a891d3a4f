"""What one of torch's optimizers computes, as the choice of an optimizer that the engine runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.optimizers import NOT_BY_GROUP, OPTIMIZERS, SAME_KIND
from shardwise.core.parameter_groups import ParameterGroup
from shardwise.runtime.optimizer import CLASSES, Settings

HOW = ("foreach", "capturable", "differentiable", "fused")  # settings of torch's optimizers that change no number
KINDS = ("adamw", *(name for name in CLASSES if name != "adamw"))  # AdamW is a subclass of Adam


def choice_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerChoice:
    """Return what one of torch's optimizers computes, or one of a subclass that changes no step of it.

    Raises :class:`ConfigError` where an :class:`OptimizerChoice` cannot say it."""
    name = _name(optimizer)
    every = [p for one in optimizer.param_groups for p in one["params"]]
    given, own = {id(p) for p in every}, {id(p): p.requires_grad for p in model.parameters()}
    if not given <= own.keys() or any(learns and at not in given for at, learns in own.items()):
        raise ConfigError("optimizer: it must have the parameters of the model that require gradients, and no others.")
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):  # Adagrad's begins with step 0
        raise ConfigError("optimizer: it has taken steps already, and its state would be lost; legal: a new one.")
    groups = [one for one in optimizer.param_groups if one["params"]]
    numbers = [_numbers(name, one) for one in groups]
    names = {id(p): n for n, p in model.named_parameters()}
    for group, other in zip(groups[1:], numbers[1:], strict=True):
        if differ := [key for key in NOT_BY_GROUP if other.get(key) != numbers[0].get(key)]:
            first = names[id(group["params"][0])]
            wrong = f"{differ[0]} = {other[differ[0]]!r} in the group of {first}"
            raise ConfigError.on("optimizer", wrong, f"{numbers[0][differ[0]]!r}, as in the first group")
    different = [
        ParameterGroup(tuple(names[id(p)] for p in group["params"]),
                       tuple((key, value) for key, value in other.items() if key not in NOT_BY_GROUP))
        for group, other in zip(groups[1:], numbers[1:], strict=True)
    ]  # fmt: skip
    return OptimizerChoice(name=name, decay="all", groups=tuple(different), **numbers[0])  # type: ignore[arg-type]


def _name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of what an optimizer computes; AdamW is Adam with decoupled weight decay."""
    kind, groups = type(optimizer), optimizer.param_groups
    name = next((name for name in KINDS if isinstance(optimizer, CLASSES[name])), None)
    if name is None:
        legal = f"{', '.join(CLASSES[one].__name__ for one in CLASSES)}, and subclasses of them."
        raise ConfigError.on("optimizer", f"{kind.__name__} is not legal", legal)
    for part in ("step", "_init_group"):
        ours, theirs = (inspect.unwrap(getattr(one, part, None) or len) for one in (CLASSES[name], kind))
        if ours is not theirs:
            wrong = f"{kind.__name__} is not legal, whose {part} is not that of {CLASSES[name].__name__}"
            raise ConfigError.on("optimizer", wrong, "a subclass that computes what its base computes")
    if name not in ("adam", "adamw"):
        return name
    decoupled = {bool(group.get("decoupled_weight_decay", name == "adamw")) for group in groups if group["params"]}
    if len(decoupled) > 1:
        raise ConfigError.on("optimizer", "decoupled_weight_decay in some groups of parameters", "in all, or in none")
    return "adamw" if decoupled == {True} else "adam"


def _numbers(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group that an :class:`OptimizerChoice` has."""
    found = {key: group[key] for key in ("lr", *OPTIMIZERS[name].options) if key in group}
    return {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def fixed_numbers(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a loop may not change of an optimizer of this ``name`` once it is captured: what state there is, and
    which parameters are in which group."""
    found: dict[str, Any] = {}
    for number, group in enumerate(_filled(optimizer)):
        place = f" of group {number}" if number else ""
        numbers = _numbers(name, group)
        found |= {f"{key}{place}": numbers[key] for key in NOT_BY_GROUP if key in numbers}
        found |= {f"{key}{place}": bool(numbers[key]) for key in SAME_KIND if key in numbers}
        found[f"the parameters{place}"] = [id(p) for p in group["params"]]
    return found


def settings_of(name: str, optimizer: torch.optim.Optimizer) -> Settings:
    """Return the hyperparameters of the groups as they are now, for the next step of an optimizer of this
    ``name``."""
    return tuple(numbers for group in _filled(optimizer) for numbers in [_numbers(name, group)] * 2)


def _filled(optimizer: torch.optim.Optimizer) -> Iterable[dict[str, Any]]:
    return (group for group in optimizer.param_groups if group["params"])
