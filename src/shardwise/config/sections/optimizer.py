"""The keys of the section ``[optimizer]``."""

# ruff: noqa: RUF009 - each call of `key` makes a new field
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.core import optim
from shardwise.core.learning_rates import LR_SCHEDULES, Annealing, CycleMode, Schedule
from shardwise.core.optim import OptimizerName

from ..rules import (
    any_keys,
    choice,
    integer,
    key,
    number,
    pair,
    several,
    some_keys,
    switch,
    texts,
)  # fmt: skip

OF_GROUPS = {
    "lr": number(0), "weight_decay": number(0), "betas": pair(number(0, below=1)), "eps": number(0),
    "momentum": number(0, below=1), "dampening": number(0, below=1), "nesterov": switch(), "amsgrad": switch(),
    "name": choice(*optim.CHOICES["name"]),
}  # fmt: skip
"""What a group of parameters may have of its own."""

GROUPS = some_keys(
    f"a list of tables, each with match, and any of {', '.join(OF_GROUPS)}",
    {"match": texts("a name of parameters, or a pattern of names")}, OF_GROUPS,
)  # fmt: skip


def _having(option: str) -> str:
    """Return the schedules that read an option, in words."""
    return ", ".join(f'`"{name}"`' for name, one in LR_SCHEDULES.items() if option in one.options)


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
    dampening: float | None = key(
        number(0, below=1),
        does="for sgd with `momentum`: how much less of a gradient than all goes into it",
        otherwise="0",
        legal="from 0 to below 1, 0 with `nesterov`",
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
    ema: float | None = key(
        number(0, below=1),
        does="how much of a [moving average](optimizers.md#averages-of-the-weights) of the weights a step keeps",
        otherwise="no average",
        legal="from 0 to below 1, such as 0.999; not with servers apart or `parallel.local_steps`",
    )
    ema_start: int | None = key(
        integer(0),
        does="the number of steps before the average begins; until then it is the weights",
        otherwise="0",
        legal="0 or more, with `ema`",
    )
    ema_every: int | None = key(
        integer(1),
        does="the number of steps from one weights that the average takes up to the next",
        otherwise="1",
        legal="1 or more, with `ema`",
    )
    ema_warmup: bool | None = key(
        switch(),
        does="whether the decay is at most (1 + n) / (10 + n), with n the number of steps in the average",
        otherwise="`false`",
        legal="with `ema`",
    )
    schedule: Schedule = key(
        choice(*LR_SCHEDULES),
        "cosine",
        does=(
            "what the learning rate does after the warm-up: [Schedules](optimizers.md#schedules) has a row for each of"
            " these words, and what it reads of the keys below"
        ),
    )
    warmup_steps: int = key(
        integer(0),
        does="the number of steps in which the learning rate rises from 0",
        otherwise=(
            "a tenth of `train.steps`; 0 with "
            + ", ".join(f'`"{name}"`' for name, one in LR_SCHEDULES.items() if not one.warms)
        ),
        legal='less than `train.steps`; with `"cyclic"` and `"one_cycle"` 0',
    )
    min_lr_ratio: float | None = key(
        number(0, most=1),
        does="what share of `lr` a schedule falls to",
        otherwise="0.1",
        legal="from 0 to 1, with " + _having("min_lr_ratio"),
    )
    decay_fraction: float | None = key(
        number(0, most=1),
        does="the share of all steps in which the learning rate falls, at their end",
        otherwise="0.2",
        legal="from 0 to 1, with " + _having("decay_fraction"),
    )
    power: float | None = key(
        number(0),
        does="the power of the share of steps that are left",
        otherwise="1",
        legal="0 or more, with " + _having("power"),
    )
    cycle_steps: int | None = key(
        integer(1),
        does="the number of steps until the learning rate first restarts",
        otherwise='none; `"cosine_with_restarts"` needs it',
        legal="1 or more, with " + _having("cycle_steps"),
    )
    cycle_mult: int | None = key(
        integer(1),
        does="how many times as long each cycle is as the one before",
        otherwise="1",
        legal="1 or more, with " + _having("cycle_mult"),
    )
    step_size: int | None = key(
        integer(1),
        does="the number of steps from one multiplication by `gamma` to the next",
        otherwise='none; `"step"` needs it',
        legal="1 or more, with " + _having("step_size"),
    )
    milestones: tuple[int, ...] | None = key(
        several(integer(1)),
        does="the steps of the run at which the learning rate is multiplied by `gamma`",
        otherwise='none; `"multistep"` needs it',
        legal="rising, each 1 or more and behind the warm-up, with " + _having("milestones"),
    )
    gamma: float | None = key(
        number(0),
        does="what the learning rate is multiplied by",
        otherwise='0.1, with `"cyclic"` 1; `"exponential"` needs it',
        legal="0 or more, with " + _having("gamma"),
    )
    timescale: float | None = key(
        number(0, open_=True),
        does="the learning rate is divided by the root of 1 + the steps after the warm-up over this number",
        otherwise="`warmup_steps`; 10,000 without a warm-up",
        legal="above 0, with " + _having("timescale"),
    )
    step_size_up: int | None = key(
        integer(1),
        does="the number of steps in which the learning rate rises from `min_lr_ratio` x `lr` to `lr`",
        otherwise='none; `"cyclic"` needs it',
        legal="1 or more, with " + _having("step_size_up"),
    )
    step_size_down: int | None = key(
        integer(1),
        does="the number of steps in which it falls back",
        otherwise="`step_size_up`",
        legal="1 or more, with " + _having("step_size_down"),
    )
    mode: CycleMode | None = key(
        choice("triangular", "triangular2", "exp_range"),
        does="how far it rises in each cycle: the same, half as far each time, or `gamma` to the power of the step",
        otherwise='`"triangular"`',
        legal='`"triangular"`, `"triangular2"` or `"exp_range"`, with ' + _having("mode"),
    )
    pct_start: float | None = key(
        number(0, most=1),
        does="the share of all steps in which the learning rate rises",
        otherwise="0.3",
        legal="from 0 to 1, with " + _having("pct_start"),
    )
    anneal_strategy: Annealing | None = key(
        choice("cos", "linear"),
        does="how it rises and falls",
        otherwise='`"cos"`',
        legal='`"cos"` or `"linear"`, with ' + _having("anneal_strategy"),
    )
    div_factor: float | None = key(
        number(0, open_=True),
        does="`lr` over the learning rate of the first step",
        otherwise="25",
        legal="above 0, with " + _having("div_factor"),
    )
    final_div_factor: float | None = key(
        number(0, open_=True),
        does="the learning rate of the first step over that of the last",
        otherwise="10,000",
        legal="above 0, with " + _having("final_div_factor"),
    )
    three_phase: bool | None = key(
        switch(),
        does="whether it falls to where it began in as many steps as it has risen, and further in the rest",
        otherwise="`false`",
        legal="with " + _having("three_phase"),
    )
    cycle_momentum: bool | None = key(
        switch(),
        does="whether momentum, or the first of `betas`, falls while the learning rate rises, and the reverse",
        otherwise="`true`",
        legal="with " + _having("cycle_momentum"),
    )
    base_momentum: float | None = key(
        number(0, below=1),
        does="that momentum where the learning rate is highest",
        otherwise="0.85",
        legal="from 0 to below 1, with " + _having("base_momentum"),
    )
    max_momentum: float | None = key(
        number(0, below=1),
        does="that momentum in the first step and the last",
        otherwise="0.95",
        legal="from 0 to below 1, with " + _having("max_momentum"),
    )
