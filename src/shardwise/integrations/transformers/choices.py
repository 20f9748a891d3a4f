"""What an optimizer and a ``compute_loss`` of a user compute, for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from shardwise.core.errors import ConfigError
from shardwise.core.optim import OptimizerChoice
from shardwise.train.optimizers import choice_of


def choice_of_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerChoice:
    """Return what an optimizer computes whose groups may differ in whether they have weight decay; raise
    :class:`ConfigError` where they differ in something else."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    decays = {float(group.get("weight_decay", 0.0)) for group in groups}
    for key in groups[0].keys() - {"params", "weight_decay", "initial_lr"}:
        if any(group.get(key) != groups[0][key] for group in groups):
            wrong = f"groups of parameters with different {key} are not legal"
            raise ConfigError.on("optimizer", wrong, "groups that differ in having weight decay")
    if len(decays - {0.0}) > 1:
        wrong = f"groups with weight decays of {', '.join(map(str, sorted(decays)))} are not legal"
        raise ConfigError.on("optimizer", wrong, "one weight decay, and 0")
    single = {**groups[0], "params": [p for group in groups for p in group["params"]]}
    if "weight_decay" in single:
        single["weight_decay"] = max(decays)
    choice = choice_of(type(optimizer)([single]), model)  # type: ignore[call-arg]  # its own class has defaults
    plain = {id(p) for group in groups if not group.get("weight_decay", 0.0) for p in group["params"]}
    names = [name for name, p in model.named_parameters() if id(p) in plain]
    return replace(choice, undecayed=tuple(names) if max(decays) else ())


class ComputedLoss:
    """``compute_loss`` of a trainer, for the output that the captured forward has made."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, output: Any, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the loss; raise :class:`ConfigError` where it asks for the output of something else."""
        trainer = self._trainer
        loss: Tensor = trainer.compute_loss(_Called(trainer.model, output, fields), dict(fields))
        return loss


class _Called:
    """This stands for the model in ``compute_loss``: its output for the batch is there already."""

    def __init__(self, model: nn.Module, output: Any, fields: Mapping[str, Tensor]) -> None:
        self._model, self._output, self._fields = model, output, fields

    def __call__(self, **given: Any) -> Any:
        if other := [name for name, value in given.items() if value is not self._fields.get(name)]:
            wrong = f"it calls the model with {other[0]} other than in the batch"
            raise ConfigError.on("compute_loss", wrong, "model(**inputs), and all else in the model's forward")
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
