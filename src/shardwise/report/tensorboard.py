"""Metrics are written for TensorBoard by torch's SummaryWriter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loggers import missing, numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"  # in that of the run
FLUSH_SECONDS = 10  # the seconds until what was added is in the file, even if the run is killed


class TensorBoard:
    """Writes event files into the folder ``tensorboard`` of a run.

    A run that goes on from a checkpoint uses the same folder again: TensorBoard then forgets what the earlier process
    wrote of the first step that is added, and of all after it.  Raises :class:`ConfigError` where TensorBoard is not
    installed.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("tensorboard", str(error)) from None
        self._make = SummaryWriter
        self._folder = run_dir / FOLDER
        self._writer: SummaryWriter | None = None
        self._texts: list[tuple[int, str, str]] = []  # they wait for metrics, whose step says what to forget

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self.add(metrics)

    def on_evaluation(self, values: Mapping[str, Any]) -> None:
        self.add(values)

    def on_sample(self, values: Mapping[str, Any]) -> None:
        self.text(values["step"], "sample", values["text"])

    def on_end(self, values: Mapping[str, Any]) -> None:
        self.close()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Write every curve among ``metrics`` under its key, at the step ``metrics["step"]``."""
        step = int(metrics["step"])
        writer = self._open(step)
        for name, value in numbers(metrics).items():
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
