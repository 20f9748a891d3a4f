"""Write what a run leaves in its folder: the metrics of each step, the weights, a sample, and the result."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.checkpoint.container import write_as_they_come
from shardwise.core.optim import OptimizerChoice
from shardwise.report import speed
from shardwise.report.files import METRICS, write_whole
from shardwise.report.observers import Observers
from shardwise.runtime.batch import StepResult
from shardwise.runtime.whole_state import WholeState

Metrics = dict[str, Any]
OnStep = Callable[[Metrics], object]


@dataclass
class MetricsWriter:
    """This appends one JSON object per step to ``file``, a step late: on a GPU, reading a value waits for its step.

    Without a file, and until :meth:`begin` gives one, the objects wait: nobody is told of them.  ``tokens_per_row`` is
    the number of tokens of a sample; if it is None the data is no text, and samples count.  ``step_seconds`` is the
    time from the beginning of a step, where its batch is read, to the beginning of the next, or to the end of the
    window for its last step.  ``utilisation(rows, seconds)`` gives a step's TFLOP/s and MFU, if they are known, and
    ``observers`` look on.  ``history`` begins with what earlier parts of the run have written.
    """

    file: TextIO | None
    optimizer: OptimizerChoice
    tokens_per_row: int | None
    device: torch.device
    on_step: OnStep | None = None
    history: list[Metrics] = field(default_factory=list)
    warn: Callable[[str], object] = print
    utilisation: Callable[[int, float], Metrics] | None = None
    observers: Observers = field(default_factory=Observers)
    _pending: tuple[int, int, StepResult, float, Metrics] | None = None
    _failed: bool = False
    _earlier: int = 0
    _waiting: list[Metrics] = field(default_factory=list)
    _peak: int = 0

    def __post_init__(self) -> None:
        self._earlier = len(self.history)

    @property
    def speed_key(self) -> str:
        """Return the key of the speed: that of tokens, or of samples if the data is no text."""
        return speed.SAMPLES if self.tokens_per_row is None else speed.TOKENS

    def add(self, step: int, rows: int, result: StepResult, seconds: float, more: Metrics | None = None) -> None:
        """Take a step of ``rows`` rows that has been issued and took ``seconds``, with ``more`` numbers of its own, and
        write the step before it."""
        before, self._pending = self._pending, (step, rows, result, seconds, more or {})
        self._write(before)

    def flush(self) -> None:
        """Write the last step."""
        before, self._pending = self._pending, None
        self._write(before)

    def close(self, *, flush: bool = True) -> None:
        """Close the file, and before that write the last step unless ``flush`` is false, as when its numbers may never
        come; what a full disk has refused is lost, and a warning has said so."""
        if flush:
            self.flush()
        if self.file is not None:
            with suppress(OSError):
                self.file.close()

    def _write(self, item: tuple[int, int, StepResult, float, Metrics] | None) -> None:
        if item is None:
            return
        step, rows, result, seconds, more = item
        self._peak = max(self._peak, peak_memory(self.device))
        found = result.on_host()
        if found.skipped and found.scale is None:
            return  # the run ends here
        values: Metrics = {
            "step": step,
            "loss": _number(found.loss),
            "grad_norm": _number(found.grad_norm),
            "lr": self.optimizer.learning_rate(step),
            "step_seconds": seconds,
            self.speed_key: rows * (self.tokens_per_row or 1) / seconds,
            "peak_memory_bytes": self._peak,
        }
        if found.scale is not None:
            values |= {"loss_scale": found.scale, "skipped": int(found.skipped)}
        if result.repeated is not None:
            values["repeated"] = int(result.repeated)
        if self.utilisation is not None:
            values |= self.utilisation(rows, seconds)
        values |= more
        self.history.append(values)
        self._waiting.append(values)
        self._tell()

    def begin(self, file: TextIO) -> None:
        """From now on write into ``file``; what has waited goes first."""
        self.file = file
        self._tell()

    def _tell(self) -> None:
        if self.file is None:
            return
        waiting, self._waiting = self._waiting, []
        for values in waiting:
            self._append(values, self.file)
            self.observers.tell("on_step", values)
            if self.on_step is not None:
                self.on_step(values)

    def _append(self, values: Metrics, file: TextIO) -> None:
        """Write a line; a full disk loses metrics, but does not end the run."""
        try:
            file.write(json.dumps(values) + "\n")
            file.flush()
            self._failed = False
        except OSError as error:
            if not self._failed:
                self.warn(f"step {values['step']}: {METRICS} cannot be written: {error.strerror}; the run goes on")
            self._failed = True

    def summary(self) -> Metrics:
        """Return the first and last loss, totals, and medians over all steps but the first, which warms up."""
        steady = self.history[1:] or self.history
        return {
            "steps": len(self.history),
            "loss_first": self.history[0]["loss"] if self.history else None,
            "loss_last": self.history[-1]["loss"] if self.history else None,
            self.speed_key: _median(steady, self.speed_key),
            "step_seconds": _median(steady, "step_seconds"),
            **{key: _median(steady, key) for key in ("tflops_per_second", "mfu") if steady and key in steady[-1]},
            **(
                {"repeated": sum(repeated)}
                if (repeated := [one["repeated"] for one in self.history if "repeated" in one])
                else {}
            ),
            "training_seconds": sum(one["step_seconds"] for one in self.history[self._earlier :]),
            "peak_memory_bytes": max((one["peak_memory_bytes"] for one in self.history), default=None),
        }


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this rank has used: of its GPU since the last reset, else of resident memory."""
    backend = Backend.of(device)
    if backend.asynchronous:
        return backend.most_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def save_weights(
    whole: WholeState, path: Path, *, key: Callable[[str], str | None] = str, dtype: torch.dtype | None = None
) -> None:
    """Write the single-device state as safetensors, tensor by tensor; all ranks call it together, and rank 0 writes.

    A tied tensor is written once, under the first of its names; the file's metadata maps its other names to it, as
    ``safetensors.torch.load_model`` expects.  ``key`` returns the name in the file, or None for what is left out, and
    floating tensors become ``dtype``.
    """
    if whole.comm.rank != 0:
        for _ in whole.collect(0):
            continue
        return
    names = {name: first for name, first in whole.first_names.items() if key(first) is not None}
    described = whole.describe()

    def as_written(found: torch.dtype) -> torch.dtype:
        return dtype if dtype is not None and found.is_floating_point else found

    tensors = [
        (str(key(name)), described[name].shape, as_written(described[name].dtype))
        for name, first in names.items()
        if name == first
    ]
    values = ((str(key(name)), value.to(as_written(value.dtype))) for name, value in whole.collect(0) if name in names)
    part = path.with_suffix(".part")
    tied = {name: str(key(first)) for name, first in names.items() if name != first}
    write_as_they_come(part, tensors, values, {"format": "pt", **tied})
    part.replace(path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object atomically."""
    write_whole(path, json.dumps(values, indent=2) + "\n")


def tokens_per_row(example: Mapping[str, Tensor]) -> int | None:
    """Return the number of tokens in a row of ``input_ids`` (rows, tokens); None for data that is no text."""
    ids = example.get("input_ids")
    return ids.shape[1] if ids is not None and ids.dim() == 2 else None


def append_line(path: Path, values: Mapping[str, Any], warn: Callable[[str], object]) -> None:
    """Append an object as a line, or nothing and warn if the disk is full: the run goes on without it."""
    try:
        with path.open("ab", buffering=0) as file:
            size, line = file.tell(), json.dumps(values).encode() + b"\n"
            if file.write(line) < len(line):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        warn(f"{path} cannot be written: {error.strerror}; the run goes on")


def _number(value: float) -> float | None:
    """Return the number, or None if JSON has none for it."""
    return value if math.isfinite(value) else None


def _median(history: list[Metrics], key: str) -> float | None:
    return statistics.median(one[key] for one in history if key in one) if history else None
