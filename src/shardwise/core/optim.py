"""This module defines the choice of an optimizer and its learning-rate schedule: frozen data, checked when made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from shardwise.core.averaging import Averaging
from shardwise.core.errors import ConfigError, ShardwiseError, check_choice, check_value
from shardwise.core.learning_rates import LearningRates
from shardwise.core.optimizers import APPLIES, FUSED, MORE_STATE, OPTIMIZERS, SAME_KIND
from shardwise.core.options import check_number
from shardwise.core.parameter_groups import GroupsByName, ParameterGroup, depths

OptimizerName = Literal[
    "adamw", "sgd", "adam", "adagrad", "rmsprop", "nadam", "radam", "adamax", "adadelta", "asgd", "rprop", "lion"
]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "name": tuple(OPTIMIZERS),
    "decay": ("matrices", "all"),
}
"""These fields of an optimizer choice each take one of the listed words."""

SWITCHES = ("nesterov", "amsgrad", "centered", "maximize", "decoupled_weight_decay")
"""These fields are true or false."""

BY_ROWS = '"adagrad", or "sgd" without momentum, neither with weight decay'
"""These optimizers leave a row without a gradient as it is, in words."""


@dataclass(frozen=True)
class OptimizerChoice(LearningRates, Averaging):
    """An optimizer choice has a name in :mod:`torch.optim`, hyperparameters and a learning rate for every step.

    The hyperparameters have the meaning that they have in :mod:`torch.optim`, and where they are None its defaults;
    weight decay is decoupled for ``adamw`` and ``lion``, and a term of the gradient for all others unless
    ``decoupled_weight_decay``.  ``lion`` is Chen et al. 2023, arXiv 2302.06675, algorithm 2.
    ``decay = "matrices"`` applies weight decay only to parameters of two dims or more, so not to norms and biases.

    ``groups`` are parameters that have hyperparameters of their own, such as another ``lr``: the schedule is the same
    for all.  With ``layer_decay`` learning rates are multiplied by it once for each layer that lies above a parameter
    (:func:`~shardwise.core.parameter_groups.depths`); :meth:`resolved` makes groups of that.

    The learning rate rises linearly over ``warmup_steps`` to ``lr``; what it does then, until the last of
    ``total_steps``, is ``schedule``.  ``docs/optimizers.md`` has a row for each schedule with the options that belong
    to it, and :class:`~shardwise.core.learning_rates.LearningRates` says what each computes.

    ``ema`` is the decay of a moving average of the weights, :class:`~shardwise.core.averaging.Averaging`.

    :class:`ConfigError` names the field, its value and what is legal.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float | None = None
    weight_decay: float | None = None
    decay: Literal["matrices", "all"] = "matrices"
    groups: tuple[ParameterGroup, ...] = ()
    layer_decay: float | None = None
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    amsgrad: bool = False
    centered: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
    alpha: float | None = None
    momentum_decay: float | None = None
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    rho: float | None = None
    lambd: float | None = None
    t0: float | None = None
    etas: tuple[float, float] | None = None
    step_sizes: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for field, legal in CHOICES.items():
            check_choice(f"optimizer.{field}", getattr(self, field), legal)
        self._check_numbers()
        self._check_applies()
        self._check_groups()
        self.check_schedule()
        self._check_cycle()
        self.check_averaging()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 0, for the parameters in no group; it is ``lr`` at
        step ``warmup_steps - 1``."""
        return self.scheduled(self.lr, step)

    @cached_property
    def parts(self) -> tuple[OptimizerChoice, ...]:
        """The optimizer of the parameters in no group, and that of each group."""
        alone = replace(self, groups=(), layer_decay=None)
        return (alone, *(replace(alone, **dict(group.changes)) for group in self.groups))

    def group_of(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the number of the settings (:meth:`settings`) of the parameter called ``name`` of this ``shape``."""
        if self.layer_decay is not None:
            raise ShardwiseError("layer_decay needs the names of all parameters: call resolved(names) first")
        group = self._by_name.of(name)
        own = group > 0 and self.groups[group - 1].decays
        return 2 * group + (not own and self.decay == "matrices" and len(shape) < 2)

    def settings(self, step: int) -> tuple[dict[str, Any], ...]:
        """Return the hyperparameters of update ``step``, counted from 0, by torch's names: for the parameters in no
        group with weight decay, for those without, and so on for each group."""
        found: list[dict[str, Any]] = []
        for part in self.parts:
            numbers = {**part.numbers, "lr": part.learning_rate(step)}
            if part.moves_momentum:
                momentum = part.momentum_of(step)
                numbers |= {"betas": (momentum, part.betas[1])} if "betas" in numbers else {"momentum": momentum}
            found += [numbers, {**numbers, "weight_decay": 0.0}]
        return tuple(found)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The hyperparameters of the parameters in no group, by torch's names; those left out are torch's defaults."""
        own = {name: getattr(self, name) for name in OPTIMIZERS[self.name].options}
        return {"lr": self.lr, **{name: value for name, value in own.items() if value is not None}}

    def with_weight_decay(self, group: int) -> bool:
        """Return whether parameters with the settings ``group`` have weight decay."""
        return group % 2 == 0 and bool(self.parts[group // 2].weight_decay)

    @property
    def state(self) -> tuple[str, ...]:
        """The tensors of a parameter's size that the optimizer keeps, by torch's names."""
        more = tuple(tensor for option, tensor in MORE_STATE.items() if getattr(self, option))
        return (*OPTIMIZERS[self.name].state, *more)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The scalars that the optimizer keeps, by torch's names.  With ``dampening`` steps are counted, for the first
        one has none."""
        return (*OPTIMIZERS[self.name].scalars, *(("step",) if self.dampening else ()))

    def fused_on(self, kind: str) -> bool:
        """Return whether there is a fused kernel on this kind of device."""
        return self.name in FUSED[kind] and not self.dampening

    def resolved(self, names: Iterable[str]) -> OptimizerChoice:
        """Return the same for a model with the parameters ``names``, in its order: its groups are checked, and
        ``layer_decay`` becomes groups.  :class:`ConfigError` names a pattern that no parameter has."""
        every = list(names)
        self._by_name.check(every)
        if self.layer_decay is None:
            return self
        found: dict[tuple[int, int], list[str]] = {}
        for name, depth in depths(every).items():
            found.setdefault((self._by_name.of(name), depth), []).append(name)
        most = max((depth for _, depth in found), default=0)
        groups = []
        for (group, depth), members in found.items():
            rate = self.parts[group].lr * self.layer_decay ** (most - depth)
            changes = self.groups[group - 1].changes if group else ()
            groups.append(ParameterGroup(tuple(members), tuple({**dict(changes), "lr": rate}.items())))
        return replace(self, groups=tuple(groups), layer_decay=None)

    def without_rates(self) -> OptimizerChoice:
        """Return the same with learning rates of 0, to compare all else."""
        groups = (
            ParameterGroup(g.match, (*((k, v) for k, v in g.changes if k != "lr"), ("lr", 0.0))) for g in self.groups
        )
        return replace(self, lr=0.0, groups=tuple(groups))

    @property
    def by_rows(self) -> bool:
        """Return whether a row without a gradient stays as it is in an update, with its state."""
        plain = self.name == "adagrad" or (self.name == "sgd" and not self.momentum)
        return plain and not self.maximize and not self.lr_decay and not any(part.weight_decay for part in self.parts)

    @cached_property
    def _by_name(self) -> GroupsByName:
        return GroupsByName(self.groups)

    def _check_numbers(self) -> None:
        for field, legal in (
            ("betas", "two numbers in [0, 1)"),
            ("etas", "two numbers"),
            ("step_sizes", "two numbers"),
        ):
            pair = getattr(self, field)
            if pair is None:
                continue
            check_value(f"optimizer.{field}", pair, isinstance(pair, tuple | list) and len(pair) == 2, legal)
            object.__setattr__(self, field, tuple(pair))
            for one in pair:
                check_number(f"optimizer.{field}", one, below=1.0 if field == "betas" else math.inf)
        if self.etas is not None:
            check_value("optimizer.etas", self.etas, 0 < self.etas[0] < 1 < self.etas[1], "one below 1, and one above")
        for field in (
            "lr",
            "eps",
            "weight_decay",
            "momentum_decay",
            "lr_decay",
            "initial_accumulator_value",
            "lambd",
            "t0",
        ):
            if getattr(self, field) is not None:
                check_number(f"optimizer.{field}", getattr(self, field))
        for field in ("momentum", "dampening"):
            check_number(f"optimizer.{field}", getattr(self, field), below=1.0)
        if self.alpha is not None:
            check_number("optimizer.alpha", self.alpha, below=1.0 if self.name == "rmsprop" else math.inf)
        for field in ("layer_decay", "rho"):
            if getattr(self, field) is not None:
                check_number(f"optimizer.{field}", getattr(self, field), most=1.0)

    def _check_applies(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for field, names in APPLIES.items():
            if self.name not in names and getattr(self, field) != defaults[field]:
                wrong = f'{getattr(self, field)!r} is not legal for "{self.name}", which has no {field}'
                raise ConfigError.on(f"optimizer.{field}", wrong, f"for {', '.join(names)}.")
        for field in SWITCHES:
            check_value(
                f"optimizer.{field}", getattr(self, field), isinstance(getattr(self, field), bool), "true or false"
            )
        if self.nesterov and (self.momentum == 0 or self.dampening):
            wrong = f"{self.nesterov!r} is not legal with momentum = {self.momentum}, dampening = {self.dampening}"
            raise ConfigError.on(
                "optimizer.nesterov", wrong, "true with a momentum above 0 and no dampening, or false."
            )
        if self.dampening and not self.momentum:
            wrong = f"{self.dampening} is not legal without momentum"
            raise ConfigError.on("optimizer.dampening", wrong, "0, or a momentum above 0.")

    def _check_cycle(self) -> None:
        """Check that there is a momentum for a schedule that moves it, which is nobody's own."""
        if not self.moves_momentum:
            return
        if "betas" not in OPTIMIZERS[self.name].options and not self.momentum:
            wrong = f'true, as by default, is not legal for "{self.name}" without momentum'
            raise ConfigError.on("optimizer.cycle_momentum", wrong, "false, or an optimizer with betas or a momentum.")
        for group in self.groups:
            if own := {name for name, _ in group.changes} & {"momentum", "betas"}:
                wrong = f"{min(own)} of {group} is not legal with cycle_momentum, which sets that of all groups"
                raise ConfigError.on("optimizer.groups", wrong, f"without {min(own)}, or cycle_momentum = false.")

    def _check_groups(self) -> None:
        for group in self.groups:
            group.check(self.name)
            try:
                part = replace(self, groups=(), layer_decay=None, **dict(group.changes))
            except ConfigError as error:
                raise ConfigError(f"{group}: {error}") from None
            for field in SAME_KIND:
                here, others = getattr(part, field), getattr(self, field)
                if bool(here) != bool(others):
                    wrong = f"{field} = {here} of {group} beside {others} of other parameters"
                    raise ConfigError.on("optimizer.groups", wrong, "more than 0 in all groups, or in none.")
