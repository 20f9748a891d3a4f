"""What a ``compute_loss`` of a user computes, for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from shardwise.core.errors import ConfigError


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
