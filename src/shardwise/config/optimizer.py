"""Defaults and checks of ``[optimizer]``, and the optimizer that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.learning_rates import DECAY_FRACTION, LR_SCHEDULES, decay_steps
from shardwise.core.optim import OptimizerChoice
from shardwise.core.optimizers import APPLIES
from shardwise.core.parameter_groups import ParameterGroup
from shardwise.core.server_options import APART

from .draft import ConfigDraft, reworded
from .sections import rules


def complete_optimizer(draft: ConfigDraft) -> None:
    """Fill in the defaults of ``[optimizer]``, and check what its keys say together."""
    if draft.sound("optimizer.name"):
        name = draft["optimizer.name"]
        if name in APPLIES["weight_decay"]:
            draft.default("optimizer.weight_decay", 0.1 if name in ("adamw", "muon") else 0.0)
        if name == "adafactor" and draft.given("optimizer.eps"):
            draft.refuse("optimizer.eps", 'left out, for "adafactor" has two, which OptimizerChoice takes')
        for option in ("weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "amsgrad", "adjust_lr_fn"):
            if name not in APPLIES[option] and draft.given(f"optimizer.{option}"):
                draft.refuse(
                    f"optimizer.{option}", f'left out, for "{name}" has none; {", ".join(APPLIES[option])} have'
                )
        if name in APPLIES["betas"]:
            draft.default("optimizer.betas", (0.9, 0.99) if name == "lion" else (0.9, 0.95))
    _average(draft)
    schedule, steps = draft["optimizer.schedule"], draft["train.steps"]
    draft.default("optimizer.warmup_steps", steps // 10 if LR_SCHEDULES[schedule].warms else 0)
    if draft["train.epochs"]:
        return  # the number of steps is not known yet
    if draft.sound("optimizer.warmup_steps", "optimizer.schedule", "train.steps"):
        fraction = draft["optimizer.decay_fraction"] if draft.sound("optimizer.decay_fraction") else None
        most = steps - decay_steps(schedule, steps, DECAY_FRACTION if fraction is None else fraction)
        if draft["optimizer.warmup_steps"] > most:
            draft.refuse("optimizer.warmup_steps", f"at most {most}, with train.steps = {steps}")
    names = rules("optimizer")
    if draft.sound("train.steps", *(f"optimizer.{name}" for name in names)):
        try:
            optimizer_choice({name: draft[f"optimizer.{name}"] for name in names}, steps)
        except ConfigError as error:
            if error.field.removeprefix("optimizer.") in names:
                draft.refuse(error.field, *reworded(error))
            else:
                draft.problems.append(("", str(error)))


def _average(draft: ConfigDraft) -> None:
    """Refuse an average of weights where there is no step of all."""
    if draft["optimizer.ema"] is None or not draft.sound("optimizer.ema"):
        return
    if draft.sound("parallel.server") and draft["parallel.server"] in APART:
        draft.refuse("optimizer.ema", 'left out, or parallel.server = "sync"', "Workers apart have no steps together")
    elif draft.sound("parallel.local_steps") and draft["parallel.local_steps"]:
        draft.refuse("optimizer.ema", "left out, or parallel.local_steps = 0", "Islands have weights each")


def optimizer_choice(given: Mapping[str, Any], steps: int) -> OptimizerChoice:
    """Return the optimizer of the keys ``given`` of ``[optimizer]``, None where one is left out, over ``steps``."""
    numbers = {name: value for name, value in given.items() if value is not None}
    groups = tuple(ParameterGroup.of(**group) for group in numbers.pop("groups", ()))
    beside = _beside(numbers, numbers.pop("beside", {}))
    return OptimizerChoice(**numbers, groups=groups, beside=beside, total_steps=steps)


def _beside(numbers: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the optimizer beside muon; adamw has the defaults that it would have alone."""
    if numbers["name"] == "muon" and given.get("name", "adamw") == "adamw":
        given = {"betas": (0.9, 0.95), "weight_decay": numbers.get("weight_decay", 0.1), **given}
    return tuple(given.items())
