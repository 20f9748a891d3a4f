"""Metrics are written for TensorBoard by torch's SummaryWriter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10  # the seconds until what was added is in the file, even if the run is killed


class TensorBoard:
    """Writes event files into ``folder``.

    A run that goes on from a checkpoint uses the same folder again: TensorBoard then forgets what the earlier process
    wrote of the first step that is added, and of all after it.  Raises :class:`ConfigError` where TensorBoard is not
    installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"train.tensorboard = true: {error}; legal: pip install shardwise[tensorboard], or false"
            ) from None
        self._make = SummaryWriter
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._texts: list[tuple[int, str, str]] = []  # they wait for metrics, whose step says what to forget

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Write every finite number among ``metrics`` under its key, at the step ``metrics["step"]``."""
        step = int(metrics["step"])
        writer = self._open(step)
        for name, value in metrics.items():
            if (
                name != "step"
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and math.isfinite(value)
            ):
                writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Write ``text`` (Markdown) under ``name``, at ``step``."""
        if self._writer is None:
            self._texts.append((step, name, text))
        else:
            self._writer.add_text(name, text, step)

    def close(self) -> None:
        """Write what is left, and close the file; nothing can be added after that."""
        if self._writer is None and self._texts:
            self._open(None)
        if self._writer is not None:
            self._writer.close()

    def _open(self, purge: int | None) -> SummaryWriter:
        if self._writer is None:
            earlier = any(self._folder.glob("events.out.tfevents.*"))
            self._writer = self._make(
                str(self._folder), purge_step=purge if earlier else None, flush_secs=FLUSH_SECONDS
            )
            for step, name, text in self._texts:
                self._writer.add_text(name, text, step)
            self._texts.clear()
        return self._writer
