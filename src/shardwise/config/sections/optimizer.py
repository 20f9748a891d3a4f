"""The keys of the section ``[optimizer]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from dataclasses import dataclass

from shardwise.core import optim
from shardwise.core.optim import OptimizerName, Schedule

from ..rules import (
    choice,
    integer,
    key,
    number,
    pair,
)  # fmt: skip


@dataclass(frozen=True)
class OptimizerConfig:
    """``[optimizer]``: norms and biases have no weight decay."""

    name: OptimizerName = key(
        choice(*optim.CHOICES["name"]),
        "adamw",
        does="the optimizer of `torch.optim`",
    )
    lr: float = key(
        number(0),
        3e-3,
        does="the learning rate at its highest",
    )
    betas: tuple[float, float] | None = key(
        pair(number(0, below=1)),
        does=(
            "for adamw, adam, nadam and radam: how much of the averages of gradients and of their squares"
            " each step keeps"
        ),
        otherwise="`[0.9, 0.95]`",
        legal="two numbers from 0 to below 1",
    )
    weight_decay: float = key(
        number(0),
        does="the weight decay of all parameters but norms and biases",
        otherwise="0.1 with adamw, else 0",
    )
    schedule: Schedule = key(
        choice(*optim.CHOICES["schedule"]),
        "cosine",
        does=(
            "the learning rate after the warm-up: it stays, falls as half a cosine, or stays and falls "
            "linearly in the last fifth of the steps; where it falls it ends at `lr` / 10"
        ),
    )
    warmup_steps: int = key(
        integer(0),
        does="the number of steps in which the learning rate rises from 0",
        otherwise='a tenth of `train.steps`, 0 with `"constant"`',
        legal='less than `train.steps`, with `"constant"` at most that',
    )
