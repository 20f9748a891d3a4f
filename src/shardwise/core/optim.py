"""This module defines the choice of an optimizer and its learning-rate schedule: frozen data, checked when made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from shardwise.core.averaging import Averaging
from shardwise.core.errors import ConfigError, ShardwiseError, check_choice, check_count, check_value
from shardwise.core.learning_rates import LearningRates
from shardwise.core.optimizers import APPLIES, FUSED, MORE_STATE, MOVES_ROWS, OF_MOMENTUM, OF_STATE, OPTIMIZERS, OWN
from shardwise.core.options import check_number
from shardwise.core.parameter_groups import GroupsByName, ParameterGroup, depths, in_a_block

OptimizerName = Literal[
    "adamw",
    "sgd",
    "adam",
    "adagrad",
    "rmsprop",
    "nadam",
    "radam",
    "adamax",
    "adadelta",
    "asgd",
    "rprop",
    "lion",
    "sparse_adam",
    "muon",
    "adafactor",
    "lamb",
    "shampoo",
]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "name": tuple(OPTIMIZERS),
    "decay": ("matrices", "all"),
}
"""These fields of an optimizer choice each take one of the listed words."""

SHARED = ("lr", "decay", *(field.name for field in fields(LearningRates)))
"""What all optimizers of a choice have in common, unless a group says otherwise."""

SWITCHES = ("nesterov", "amsgrad", "centered", "maximize", "decoupled_weight_decay")
"""These fields are true or false."""

BY_ROWS = '"sparse_adam", "adagrad", or "sgd" without momentum, without weight decay'
"""These optimizers leave a row without a gradient as it is, in words."""


@dataclass(frozen=True)
class OptimizerChoice(LearningRates, Averaging):
    """An optimizer choice has a name in :mod:`torch.optim`, hyperparameters and a learning rate for every step.

    The hyperparameters have the meaning that they have in :mod:`torch.optim`, and where they are None its defaults;
    weight decay is decoupled for ``adamw`` and ``lion``, and a term of the gradient for all others unless
    ``decoupled_weight_decay``.  ``lion`` is Chen et al. 2023, arXiv 2302.06675, algorithm 2.
    ``decay = "matrices"`` applies weight decay only to parameters of two dims or more, so not to norms and biases.

    ``muon``, ``adafactor``, ``lamb`` (You et al. 2020, arXiv 1904.00962, algorithm 2) and ``shampoo`` (Gupta et al.
    2018, arXiv 1802.09568) need whole tensors.  ``muon`` updates parameters of two dims that are inside a numbered
    module (``blocks.0``) or in a group that has ``name = "muon"``; the optimizer ``beside`` it, by default AdamW with
    the same learning rate, updates all other parameters.

    ``groups`` are parameters that have hyperparameters of their own, such as another ``lr``, or with ``name`` another
    optimizer, whose hyperparameters are then all its own: the schedule is the same for all.
    With ``layer_decay`` learning rates are multiplied by it once for each layer that lies above a parameter
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
    eps: float | tuple[float | None, float] | None = None
    weight_decay: float | None = None
    decay: Literal["matrices", "all"] = "matrices"
    groups: tuple[ParameterGroup, ...] = ()
    layer_decay: float | None = None
    beside: tuple[tuple[str, Any], ...] = ()
    momentum: float | None = None
    dampening: float = 0.0
    nesterov: bool | None = None
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
    ns_coefficients: tuple[float, float, float] | None = None
    ns_steps: int | None = None
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    beta2_decay: float | None = None
    d: float | None = None
    own: Any = None

    def __post_init__(self) -> None:
        for field, legal in CHOICES.items():
            if field == "name" and self.name == OWN and self.own is not None:
                continue
            check_choice(f"optimizer.{field}", getattr(self, field), legal)
        self._check_numbers()
        self._check_of_whole_tensors()
        self._check_applies()
        self._check_groups()
        self._check_beside()
        self.check_schedule()
        self._check_cycle()
        self.check_averaging()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 0, for the parameters in no group; it is ``lr`` at
        step ``warmup_steps - 1``."""
        return self.scheduled(self.lr, step)

    @cached_property
    def parts(self) -> tuple[OptimizerChoice, ...]:
        """The optimizer of the parameters in no group, that of each group, and the one beside ``muon``."""
        alone = replace(self, groups=(), layer_decay=None, beside=())
        found = (alone, *(alone._changed(dict(group.changes)) for group in self.groups))
        if not self._has_muon:
            return found
        return (*found, alone._changed({"name": "adamw", **dict(self.beside)}))

    def _changed(self, changes: Mapping[str, Any]) -> OptimizerChoice:
        """Return the same with other hyperparameters; another optimizer has the rate and the schedule alone."""
        if changes.get("name", self.name) == self.name:
            if not changes.get("momentum", True):  # then torch ignores what goes with it
                changes = {**{k: v for k, v in OF_MOMENTUM.items() if self.name in APPLIES[k]}, **changes}
            return replace(self, **changes)
        return OptimizerChoice(**{**{name: getattr(self, name) for name in SHARED}, **changes})

    def group_of(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the number of the settings (:meth:`settings`) of the parameter called ``name`` of this ``shape``."""
        if self.layer_decay is not None:
            raise ShardwiseError("layer_decay needs the names of all parameters: call resolved(names) first")
        group = self._by_name.of(name)
        own = group > 0 and self.groups[group - 1].decays
        if self.parts[group].name == "muon" and not (len(shape) == 2 and self._is_hidden(name, group)):
            group, own = len(self.parts) - 1, False
        return 2 * group + (not own and self.decay == "matrices" and len(shape) < 2)

    def part_of(self, name: str, shape: tuple[int, ...]) -> OptimizerChoice:
        """Return the one of :attr:`parts` that updates this parameter."""
        return self.parts[self.group_of(name, shape) // 2]

    def _is_hidden(self, name: str, group: int) -> bool:
        """Return whether a matrix is in a numbered module, or in a group that says so."""
        return in_a_block(name) or (group > 0 and self.groups[group - 1].named)

    def kind(self, part: int) -> int:
        """Return the first of :attr:`parts` that has the same state as ``part``: one optimizer updates these."""
        return next(i for i, one in enumerate(self.parts) if one._kind == self.parts[part]._kind)

    @cached_property
    def _kind(self) -> tuple[Any, ...]:
        options = (bool(getattr(self, one)) for one in OF_STATE)
        return (self.name, self.own, self.initial_accumulator_value, *options)

    @property
    def whole(self) -> bool:
        """Return whether the parameters in no group are updated by whole tensors."""
        return self.own is not None or OPTIMIZERS[self.name].whole is not None

    def whole_elements(self, shape: tuple[int, ...]) -> int:
        """Return the elements of all temporaries of an update of a whole parameter of this ``shape``."""
        if self.own is not None:
            return int(self.own.elements(shape))
        found = OPTIMIZERS[self.name].whole
        assert found is not None
        return found.elements(shape)

    @property
    def any_whole(self) -> bool:
        """Return whether any parameters are updated by whole tensors."""
        return any(part.whole for part in self.parts)

    def whole_state(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the state of a whole parameter of this ``shape``."""
        if self.own is not None:
            return {key: one.shape for key, one in self.own.kept(shape).items()}
        found = OPTIMIZERS[self.name].whole
        assert found is not None
        return found.state(shape)

    def settings(self, step: int) -> tuple[dict[str, Any], ...]:
        """Return the hyperparameters of update ``step``, counted from 0, by torch's names: for the parameters in no
        group with weight decay, for those without, and so on for each group."""
        found: list[dict[str, Any]] = []
        for part in self.parts:
            numbers = part.numbers if part.own is not None else {**part.numbers, "lr": part.learning_rate(step)}
            if part.moves_momentum and part.own is None:
                momentum = part.momentum_of(step)
                numbers |= {"betas": (momentum, part.betas[1])} if "betas" in numbers else {"momentum": momentum}
            found += [numbers, {**numbers, "weight_decay": 0.0}]
        return tuple(found)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The hyperparameters of the parameters in no group, by torch's names; those left out are torch's defaults."""
        if self.own is not None:
            return dict(self.own.numbers)
        own = {name: getattr(self, name) for name in OPTIMIZERS[self.name].options}
        return {"lr": self.lr, **{name: value for name, value in own.items() if value is not None}}

    def with_weight_decay(self, group: int) -> bool:
        """Return whether parameters with the settings ``group`` have weight decay."""
        return group % 2 == 0 and bool(self.parts[group // 2].weight_decay)

    @property
    def state(self) -> tuple[str, ...]:
        """The tensors of a parameter's size that the optimizer keeps, by torch's names."""
        more = tuple(tensor for option, tensor in MORE_STATE.items() if getattr(self, option))
        return (*(() if self.own is not None else OPTIMIZERS[self.name].state), *more)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The scalars that the optimizer keeps, by torch's names.  With ``dampening`` steps are counted, for the first
        one has none."""
        return (
            *(() if self.own is not None else OPTIMIZERS[self.name].scalars),
            *(("step",) if self.dampening else ()),
        )

    def fused_on(self, kind: str) -> bool:
        """Return whether there is a fused kernel on this kind of device."""
        return self.name in FUSED[kind] and not self.dampening

    def resolved(self, names: Iterable[str]) -> OptimizerChoice:
        """Return the same for a model with the parameters ``names``, in its order: its groups are checked, and
        ``layer_decay`` becomes groups.  :class:`ConfigError` names a pattern that no parameter has."""
        every = list(names)
        self._by_name.check(every)
        if self.name == "muon" and not any(self._is_hidden(one, self._by_name.of(one)) for one in every):
            wrong = '"muon" has nothing to update: no parameter is in a numbered module such as blocks.0'
            raise ConfigError.on("optimizer.name", wrong, 'groups of matrices with name = "muon", or another optimizer')
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
        beside = (*((k, v) for k, v in self.beside if k != "lr"), ("lr", 0.0)) if self.beside else ()
        return replace(self, lr=0.0, groups=tuple(groups), beside=beside)

    @property
    def by_rows(self) -> bool:
        """Return whether a row without a gradient stays as it is in an update, with its state."""
        return all(
            (part.name in ("sparse_adam", "adagrad") or (part.name == "sgd" and not part.momentum))
            and not any(getattr(part, one) for one in MOVES_ROWS)
            for part in self.parts
        )

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
            *(("eps",) if self.name != "adafactor" else ()),
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
            if getattr(self, field) is not None:
                check_number(f"optimizer.{field}", getattr(self, field), below=1.0)
        if self.alpha is not None:
            check_number("optimizer.alpha", self.alpha, below=1.0 if self.name == "rmsprop" else math.inf)
        for field in ("layer_decay", "rho"):
            if getattr(self, field) is not None:
                check_number(f"optimizer.{field}", getattr(self, field), most=1.0)

    def _check_of_whole_tensors(self) -> None:
        if self.adjust_lr_fn is not None:
            check_choice("optimizer.adjust_lr_fn", self.adjust_lr_fn, ("original", "match_rms_adamw"))
        if self.ns_steps is not None:
            check_count("optimizer.ns_steps", self.ns_steps)
            check_value("optimizer.ns_steps", self.ns_steps, self.ns_steps < 100, "1 to 99")
        if self.ns_coefficients is not None:
            object.__setattr__(self, "ns_coefficients", tuple(self.ns_coefficients))
            check_value("optimizer.ns_coefficients", self.ns_coefficients, len(self.ns_coefficients) == 3, "3 numbers")
        if self.beta2_decay is not None:
            check_number("optimizer.beta2_decay", -self.beta2_decay)
        if self.d is not None:
            check_number("optimizer.d", self.d)
            check_value("optimizer.d", self.d, self.d >= 1, "a number of at least 1")
        if self.name == "adafactor" and self.eps is not None:
            pair = isinstance(self.eps, tuple | list) and len(self.eps) == 2 and self.eps[1] is not None
            check_value("optimizer.eps", self.eps, pair, "two numbers with adafactor")
            assert not isinstance(self.eps, float | int)
            for one in self.eps:
                if one is not None:
                    check_number("optimizer.eps", one)
            object.__setattr__(self, "eps", tuple(self.eps))

    def _check_beside(self) -> None:
        object.__setattr__(self, "beside", tuple(dict(self.beside).items()))
        given = dict(self.beside)
        if not self._has_muon:
            check_value("optimizer.beside", given, not given, f'none with "{self.name}", which takes all parameters')
            return
        check_value("optimizer.layer_decay", self.layer_decay, self.layer_decay is None, 'none with "muon"')
        legal = ["lr", "name", *APPLIES]
        for name in given:
            check_choice("optimizer.beside", name, legal)
        name = given.get("name", "adamw")
        check_choice("optimizer.beside.name", name, [one for one in OPTIMIZERS if one != "muon"])
        try:
            OptimizerChoice(**{"name": name, **given})
        except ConfigError as error:
            raise ConfigError(f"beside muon: {error}") from None

    @property
    def _has_muon(self) -> bool:
        return "muon" in (self.name, *(dict(group.changes).get("name") for group in self.groups))

    def _check_applies(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for field, names in APPLIES.items():
            if self.name not in names and getattr(self, field) != defaults[field]:
                wrong = f'{getattr(self, field)!r} is not legal for "{self.name}", which has no {field}'
                raise ConfigError.on(f"optimizer.{field}", wrong, f"for {', '.join(names)}.")
        for field in SWITCHES:
            value = getattr(self, field)
            check_value(
                f"optimizer.{field}", value, value is defaults[field] or isinstance(value, bool), "true or false"
            )
        if self.nesterov and self.name != "muon" and (not self.momentum or self.dampening):
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
                replace(self, groups=(), layer_decay=None, beside=())._changed(dict(group.changes))
            except ConfigError as error:
                raise ConfigError(f"{group}: {error}") from None
