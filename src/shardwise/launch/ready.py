"""Describe a rank that is ready to train, and what surrounds it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from shardwise.config import Config
from shardwise.config.build import Data
from shardwise.runtime.progress import Progress
from shardwise.train.trainer import Trainer

from .forecast import Forecast
from .matmul import MatmulChoice
from .results import OnStep

log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Surroundings:
    """This is what surrounds a rank: ``asked`` returns whether it has to stop, as its record can say too; ``warn``
    reaches the user; ``on_step`` gets rank 0's metrics, and ``failed`` the error that ends the rank before it waits."""

    progress: Progress
    asked: Callable[[], bool] | None = None
    warn: Callable[[str], object] | None = None
    on_step: OnStep | None = None
    failed: Callable[[Exception], object] | None = None

    @property
    def stop(self) -> bool:
        return self.progress.asked_to_stop or (self.asked is not None and self.asked())

    def tell(self, text: str) -> None:
        """Write ``text`` into the log, and tell it to the user."""
        log.warning(text)
        (self.warn or self.progress.notify)(text)


@dataclass
class Ready:
    """This holds the trainer of a rank with its config, its data, and the forecast of its memory."""

    config: Config
    trainer: Trainer
    data: Data
    matmul: MatmulChoice | None
    side: Surroundings
    forecast: Forecast

    @property
    def module(self) -> nn.Module:
        """Return the plain model for its names, shapes and config; its parameters may have no memory."""
        return self.trainer.compiled.module

    @property
    def folder(self) -> Path:
        return Path(self.config.train.run_dir)
