"""The keys of the section ``[optimizer]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.core import optim
from shardwise.core.optim import OptimizerName, Schedule

from ..rules import (
    any_keys,
    choice,
    integer,
    key,
    number,
    pair,
    some_keys,
    switch,
    texts,
)  # fmt: skip

OF_GROUPS = {
    "lr": number(0), "weight_decay": number(0), "betas": pair(number(0, below=1)), "eps": number(0),
    "momentum": number(0, below=1), "name": choice(*optim.CHOICES["name"]),
}  # fmt: skip
"""What a group of parameters may have of its own."""

GROUPS = some_keys(
    f"a list of tables, each with match, and any of {', '.join(OF_GROUPS)}",
    {"match": texts("a name of parameters, or a pattern of names")}, OF_GROUPS,
)  # fmt: skip


@dataclass(frozen=True)
class OptimizerConfig:
    """``[optimizer]``: norms and biases have no weight decay, unless a group says so."""

    name: OptimizerName = key(
        choice(*optim.CHOICES["name"]),
        "adamw",
        does="the optimizer: of `torch.optim`, or lion, lamb or shampoo",
    )
    lr: float = key(
        number(0),
        3e-3,
        does="the learning rate at its highest",
    )
    betas: tuple[float, float] | None = key(
        pair(number(0, below=1)),
        does=(
            "for adamw, adam, nadam, radam, adamax, lamb and lion: how much of the averages of gradients and of their"
            " squares each step keeps"
        ),
        otherwise="`[0.9, 0.95]`, with lion `[0.9, 0.99]`",
        legal="two numbers from 0 to below 1",
    )
    weight_decay: float | None = key(
        number(0),
        does="the weight decay of all parameters but norms and biases",
        otherwise="0.1 with adamw and muon, else 0; rprop has none",
    )
    eps: float | None = key(
        number(0),
        does="what is added to the divisor of an update",
        otherwise="that of torch",
        legal="0 or more, with an optimizer that has it",
    )
    momentum: float | None = key(
        number(0, below=1),
        does="for sgd, rmsprop and muon: how much of its last move a parameter repeats",
        otherwise="0, with muon 0.95",
        legal="from 0 to below 1",
    )
    nesterov: bool | None = key(
        switch(),
        does="for muon, and sgd with `momentum`: whether that is Nesterov's",
        otherwise="`false`, with muon `true`",
    )
    amsgrad: bool | None = key(
        switch(),
        does="for adamw and adam: whether an update is divided by the largest average of squares so far",
        otherwise="`false`",
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = key(
        choice("original", "match_rms_adamw"),
        does=(
            "for muon: what the rate of a matrix of A × B is multiplied by, √max(1, A/B) or 0.2 √max(A, B), by which it"
            " suits adamw too"
        ),
        otherwise='`"original"`',
    )
    beside: Mapping[str, Any] | None = key(
        any_keys(f"a table with any of {', '.join(OF_GROUPS)}", OF_GROUPS),
        does="the optimizer of what muon does not take: all but matrices in numbered modules (`blocks.0`)",
        otherwise="adamw with the same `lr`, `weight_decay` and schedule",
        legal='a table such as `{name = "adamw", lr = 0.001}`, with ' + ", ".join(f"`{name}`" for name in OF_GROUPS),
    )
    groups: tuple[Mapping[str, Any], ...] | None = key(
        GROUPS,
        does="parameters that have hyperparameters of their own; the first group that matches a name has it",
        otherwise="none",
        legal=(
            'tables such as `{match = ["head.*"], lr = 0.01, weight_decay = 0.0}`, with '
            + ", ".join(f"`{name}`" for name in OF_GROUPS)
        ),
    )
    layer_decay: float | None = key(
        number(0, most=1, open_=True),
        does="what learning rates are multiplied by for each layer that lies above a parameter, as in BEiT",
        otherwise="no such factor",
        legal="above 0 and at most 1",
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
