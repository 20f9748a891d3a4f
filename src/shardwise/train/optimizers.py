"""What one of torch's optimizers computes, as the choice of an optimizer that the engine runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.optimizers import MOVES_ROWS, OF_MOMENTUM, OF_STATE, OPTIMIZERS, OWN
from shardwise.core.parameter_groups import ParameterGroup
from shardwise.graph.torch_private import note_step
from shardwise.runtime.optimizer import CLASSES, Settings
from shardwise.runtime.own_optimizer import own_optimizers
from shardwise.units.trace import Bucket

MAY_CHANGE = (
    "the same groups of the same parameters, whose options such as lr may change, but not those that add to the state; "
    "all may change before the first step, groups by add_param_group(), and before another distribute() after "
    "model.trainer.close()"
)
"""What a loop may do to its optimizer, in words."""

HOW = ("foreach", "capturable", "differentiable", "fused")  # settings of torch's optimizers that change no number
KINDS = ("adamw", *(name for name in CLASSES if name != "adamw"))  # AdamW is a subclass of Adam


class Several(torch.optim.Optimizer):
    """Several optimizers of parameters of their own, such as Muon for some and AdamW for all others, as one.  Its
    groups and its state are theirs."""

    def __init__(self, each: Sequence[torch.optim.Optimizer]) -> None:
        self.each = tuple(each)
        super().__init__([{"params": [torch.zeros(())]}], {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.each for group in one.param_groups]

    @param_groups.setter
    def param_groups(self, value: object) -> None:
        pass  # what torch's own constructor makes

    @property
    def state(self) -> Any:
        return {parameter: state for one in self.each for parameter, state in one.state.items()}

    @state.setter
    def state(self, value: object) -> None:
        pass  # what torch's own constructor makes

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for one in self.each:
            one.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        raise ConfigError.on("optimizer", "load_state_dict() of several optimizers as one", "that of each")


def optimizers_in(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that this one stands for; by itself it is the only one."""
    return optimizer.each if isinstance(optimizer, Several) else (optimizer,)


class _Group(NamedTuple):
    """A group of parameters, the name of its optimizer, its hyperparameters, and its place in the optimizer."""

    name: str
    params: list[Any]
    numbers: dict[str, Any]
    optimizer: torch.optim.Optimizer
    number: int


def choice_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerChoice:
    """Return what one of torch's optimizers computes, or one of a subclass that changes no step of it, or several of
    them as :class:`Several`.

    Raises :class:`ConfigError` where an :class:`OptimizerChoice` cannot say it."""
    groups = _groups(optimizer)
    every = [id(p) for group in groups for p in group.params]
    given, own = set(every), {id(p): p.requires_grad for p in model.parameters()}
    if not given <= own.keys() or any(learns and at not in given for at, learns in own.items()):
        raise ConfigError("optimizer: it must have the parameters of the model that require gradients, and no others.")
    if len(given) < len(every):
        raise ConfigError("optimizer: a parameter is in two of its groups, or in two optimizers; legal: in one.")
    if any(float(state.get("step", 1)) for state in optimizer.state.values()):  # Adagrad's begins with step 0
        raise ConfigError("optimizer: it has taken steps already, and its state would be lost; legal: a new one.")
    theirs = {
        one: own_optimizers(one) for one in dict.fromkeys(group.optimizer for group in groups if group.name == OWN)
    }
    groups = [
        group._replace(numbers={"own": theirs[group.optimizer][group.number]} if group.name == OWN else _begun(group))
        for group in groups
    ]
    names, first = {id(p): n for n, p in model.named_parameters()}, groups[0]
    different = [
        ParameterGroup(tuple(names[id(p)] for p in group.params), tuple(_changes(group, first).items()))
        for group in groups[_shared(groups) :]
    ]
    return OptimizerChoice(name=first.name, decay="all", groups=tuple(different), **first.numbers)  # type: ignore[arg-type]


def _begun(group: _Group) -> dict[str, Any]:
    """Return the numbers of a group with what its state begins with, which Adagrad has made already."""
    made = [group.optimizer.state[p]["sum"] for p in group.params if "sum" in group.optimizer.state.get(p, ())]
    first = [float(one.flatten()[0].real) for one in made if one.numel() and not one.is_meta]
    return group.numbers if not first else {**group.numbers, "initial_accumulator_value": first[0]}


def _shared(groups: Sequence[_Group]) -> int:
    """Return the number of groups that need no pattern: the first, unless its optimizer takes only what groups say."""
    return 0 if groups[0].name == "muon" else 1


def _changes(group: _Group, first: _Group) -> dict[str, Any]:
    if group.name != first.name:
        return {"name": group.name, **group.numbers}
    return {"name": "muon", **group.numbers} if group.name == "muon" else group.numbers


def _groups(optimizer: torch.optim.Optimizer) -> list[_Group]:
    """Return the groups that have parameters, as they are now."""
    found = []
    for one in optimizers_in(optimizer):
        for number, group in enumerate(one.param_groups):
            if group["params"]:
                name = _name(one, group)
                found.append(_Group(name, group["params"], _numbers(name, group), one, number))
    return found


def _name(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return the name of what an optimizer computes for a group; AdamW is Adam with decoupled weight decay."""
    kind = type(optimizer)
    name = next((name for name in KINDS if isinstance(optimizer, CLASSES[name])), OWN)
    for part in ("step", "_init_group") if name != OWN else ():
        ours, theirs = (inspect.unwrap(getattr(one, part, None) or len) for one in (CLASSES[name], kind))
        if ours is not theirs:
            return OWN
    if name not in ("adam", "adamw"):
        return name
    return "adamw" if group.get("decoupled_weight_decay", name == "adamw") else "adam"


def _numbers(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a group that an :class:`OptimizerChoice` has, or all of a user's own optimizer."""
    if name == OWN:
        return {key: value for key, value in group.items() if key != "params"}
    found = {key: group[key] for key in ("lr", *OPTIMIZERS[name].options) if key in group}
    if not group.get("momentum", True):  # then torch ignores what goes with it
        found |= {key: value for key, value in OF_MOMENTUM.items() if key in found}
    return {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in found.items()}


class Followed:
    """The optimizer of a loop once its model is captured: each step takes its hyperparameters as they are then.

    What a loop may not change is whose step it is, what state there is, and which parameters are in which group; beside
    tables whose gradients have rows (``buckets``), also what moves all other rows."""

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket]) -> None:
        self._optimizer = optimizer
        self._options = (*OF_STATE, *(MOVES_ROWS if any(bucket.table for bucket in buckets) else ()))
        self._fixed = self._fixed_now(_groups(optimizer))

    def settings(self) -> Settings:
        """Return the hyperparameters for the next step; raise :class:`ShardwiseError` where others have changed."""
        groups = _groups(self._optimizer)
        now = self._fixed_now(groups)
        if changed := [key for key in {**now, **self._fixed} if now.get(key) != self._fixed.get(key)]:
            raise ShardwiseError(f"optimizer: {', '.join(changed)} changed after the first step; legal: {MAY_CHANGE}")
        every = groups if _shared(groups) else [groups[0], *groups]
        return tuple(group.numbers for group in every for _ in range(2))

    def _fixed_now(self, groups: Sequence[_Group]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, group in enumerate(groups):
            place, numbers = f" of group {number}" if number else "", {} if group.name == OWN else group.numbers
            found |= {f"{key}{place}": bool(numbers[key]) for key in self._options if key in numbers}
            found[f"decoupled_weight_decay{place}"] = group.name == "adamw"
            found[f"the parameters{place}"] = [id(p) for p in group.params]
        return found


def note_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's schedules know that a step was taken."""
    for one in (optimizer, *optimizers_in(optimizer)):
        note_step(one)
