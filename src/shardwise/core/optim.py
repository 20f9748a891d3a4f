"""This module defines the choice of an optimizer and its learning-rate schedule: frozen data, checked when made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from shardwise.core.errors import ConfigError, check_choice, check_count, check_value
from shardwise.core.options import check_number

OptimizerName = Literal["adamw", "sgd", "adam", "adagrad", "rmsprop", "nadam", "radam"]
Schedule = Literal["constant", "cosine", "wsd"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "name": ("adamw", "sgd", "adam", "adagrad", "rmsprop", "nadam", "radam"),
    "schedule": ("constant", "cosine", "wsd"),
    "decay": ("matrices", "all"),
}
"""These fields of an optimizer choice each take one of the listed words."""

APPLIES: Mapping[str, tuple[str, ...]] = {
    "betas": ("adamw", "adam", "nadam", "radam"),
    "eps": ("adamw", "adam", "adagrad", "rmsprop", "nadam", "radam"),
    "momentum": ("sgd", "rmsprop"),
    "nesterov": ("sgd",),
    "alpha": ("rmsprop",),
    "momentum_decay": ("nadam",),
}
"""These fields exist only for the listed optimizers."""

FUSED: Mapping[str, tuple[str, ...]] = {"cpu": ("adamw", "adam", "sgd", "adagrad"), "gpu": ("adamw", "adam", "sgd")}
"""For each type of device, these optimizers have fused kernels in the oldest torch that shardwise supports."""


BY_ROWS = '"adagrad", or "sgd" without momentum, neither with weight decay'
"""These optimizers leave a row without a gradient as it is, in words."""

DECAY_FRACTION = 0.2
"""By default ``wsd`` decays over this share of all steps."""


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """An optimizer choice has a name in :mod:`torch.optim`, hyperparameters and a learning rate for every step.

    The hyperparameters have the meaning, and ``eps`` and ``weight_decay`` the defaults, that they have in
    :mod:`torch.optim`; weight decay is decoupled for ``adamw`` and a term of the gradient for all others.
    ``decay = "matrices"`` applies weight decay only to parameters of two dims or more, so not to norms and biases;
    ``undecayed`` names further parameters without it.

    The learning rate rises linearly over ``warmup_steps`` to ``lr``.  Then it stays there (``constant``), falls as half
    a cosine until the last of ``total_steps`` (``cosine``), or stays and falls linearly over the last
    ``decay_fraction`` of all steps (``wsd``: warm-up, stable, decay; Hu et al. 2024, arXiv 2404.06395).  It falls to
    ``min_lr_ratio * lr``.

    :class:`ConfigError` names the field, its value and what is legal.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float | None = None
    weight_decay: float | None = None
    decay: Literal["matrices", "all"] = "matrices"
    undecayed: tuple[str, ...] = ()
    momentum: float = 0.0
    nesterov: bool = False
    alpha: float = 0.99
    momentum_decay: float = 4e-3
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.1
    decay_fraction: float = DECAY_FRACTION

    def __post_init__(self) -> None:
        for field, legal in CHOICES.items():
            check_choice(f"optimizer.{field}", getattr(self, field), legal)
        self._check_numbers()
        self._check_applies()
        for field in ("warmup_steps", "total_steps"):
            check_count(f"optimizer.{field}", getattr(self, field), least=0)
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            wrong = f'{self.total_steps} is not legal with schedule = "{self.schedule}"'
            raise ConfigError.on("optimizer.total_steps", wrong, f"more than warmup_steps = {self.warmup_steps}.")
        most = self.total_steps - decay_steps(self.schedule, self.total_steps, self.decay_fraction)
        if self.schedule == "wsd" and self.warmup_steps > most:
            wrong = f"{self.warmup_steps} is not legal with decay_fraction = {self.decay_fraction}"
            raise ConfigError.on("optimizer.warmup_steps", wrong, f"at most {most}, where the decay begins.")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of update ``step``, counted from 0.

        It is ``lr`` at step ``warmup_steps - 1``, and from step ``total_steps - 1`` on ``min_lr_ratio * lr``, unless
        the schedule is constant.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "cosine":
            last, span = self.total_steps - 1, self.total_steps - 1 - self.warmup_steps
            share = 0.0 if step >= last else (1 + math.cos(math.pi * (step - self.warmup_steps) / span)) / 2
        elif self.schedule == "wsd":
            falling = decay_steps(self.schedule, self.total_steps, self.decay_fraction)
            share = min(max((self.total_steps - 1 - step) / falling, 0.0), 1.0)
        else:
            return self.lr
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * share)

    @property
    def by_rows(self) -> bool:
        """Return whether a row without a gradient stays as it is in an update, with its state."""
        plain = self.name == "adagrad" or (self.name == "sgd" and not self.momentum)
        return plain and not self.weight_decay

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether weight decay applies to the parameter called ``name`` of this ``shape``."""
        return (self.decay == "all" or len(shape) >= 2) and name not in self.undecayed

    def _check_numbers(self) -> None:
        betas = self.betas
        is_pair = isinstance(betas, tuple | list) and len(betas) == 2
        check_value("optimizer.betas", betas, is_pair, "two numbers in [0, 1)")
        object.__setattr__(self, "betas", tuple(betas))
        for beta in betas:
            check_number("optimizer.betas", beta, below=1.0)
        for field in ("lr", "momentum_decay"):
            check_number(f"optimizer.{field}", getattr(self, field))
        for field in ("eps", "weight_decay"):
            if getattr(self, field) is not None:
                check_number(f"optimizer.{field}", getattr(self, field))
        for field in ("momentum", "alpha"):
            check_number(f"optimizer.{field}", getattr(self, field), below=1.0)
        for field in ("min_lr_ratio", "decay_fraction"):
            check_number(f"optimizer.{field}", getattr(self, field), most=1.0)

    def _check_applies(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for field, names in APPLIES.items():
            if self.name not in names and getattr(self, field) != defaults[field]:
                wrong = f'{getattr(self, field)!r} is not legal for "{self.name}", which has no {field}'
                raise ConfigError.on(f"optimizer.{field}", wrong, f"for {', '.join(names)}.")
        if not isinstance(self.nesterov, bool) or (self.nesterov and self.momentum == 0):
            wrong = f"{self.nesterov!r} is not legal with momentum = {self.momentum}"
            raise ConfigError.on("optimizer.nesterov", wrong, "true with a momentum above 0, or false.")


def decay_steps(schedule: Schedule, total_steps: int, fraction: float = DECAY_FRACTION) -> int:
    """Return the number of steps that the end of a schedule needs behind the warm-up."""
    if schedule == "wsd":
        return max(round(total_steps * fraction), 1)
    return 0 if schedule == "constant" else 1
