"""A rank that is ready to train, and what surrounds it."""

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
    """What surrounds a rank: ``asked`` says whether it shall stop, as its record can, ``warn`` reaches the user,
    ``on_step`` gets rank 0's metrics, ``failed`` the error that ends the rank, before anything is waited for."""

    progress: Progress
    asked: Callable[[], bool] | None = None
    warn: Callable[[str], object] | None = None
    on_step: OnStep | None = None
    failed: Callable[[Exception], object] | None = None

    @property
    def stop(self) -> bool:
        return self.progress.asked_to_stop or (self.asked is not None and self.asked())

    def tell(self, text: str) -> None:
        """Into the log, and to the user."""
        log.warning(text)
        (self.warn or self.progress.tell)(text)


@dataclass
class Ready:
    """The trainer of a rank, with its data, its config, and what is predicted of its memory."""

    config: Config
    trainer: Trainer
    data: Data
    matmul: MatmulChoice | None
    side: Surroundings
    forecast: Forecast

    @property
    def module(self) -> nn.Module:
        """The plain model, whose parameters may have no memory: for its names, shapes and config."""
        return self.trainer.compiled.module

    @property
    def folder(self) -> Path:
        return Path(self.config.train.run_dir)
