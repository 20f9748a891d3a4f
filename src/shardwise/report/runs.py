"""What runs have written into their folders is read to be drawn: numbers of steps and of evaluations, and in words what
was trained.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.core.errors import ConfigError

from . import speed
from .files import ABOUT, EVALUATIONS, MEMORY, METRICS, measured
from .memory import MemoryProfile, read_memory
from .tables import count, plural

Metrics = dict[str, Any]
Floats = NDArray[np.float64]

VALIDATION = "validation_loss"
NO_METRIC = ("step", VALIDATION, "rows", "seconds")
"""The keys of an evaluation that are no metric of their own."""
CHECKED = ("loss", "grad_norm", "lr", "step_seconds", *speed.UNITS, "peak_memory_bytes")
"""The keys of a step that have to be numbers, or null."""


@dataclass(frozen=True)
class PlottedRun:
    """What a run has written so far, by rising step.

    ``headline`` says what was trained on what (model, parameters, ranks, plan), and is empty where the run has not
    written it.  ``predicted`` and ``measured`` are the memory of rank 0 in a step, where they are known, and ``device``
    is "cpu" or "gpu".
    """

    folder: Path
    metrics: list[Metrics]
    evaluations: list[Metrics]
    headline: str = ""
    device: str = ""
    predicted: MemoryProfile | None = None
    measured: MemoryProfile | None = None

    @property
    def speed(self) -> str:
        """The key of the run's speed: that of tokens, or of samples where the data is no text."""
        return speed.key_of(self.metrics[-1] if self.metrics else {})

    @property
    def workers(self) -> list[int]:
        """The workers that have trained, where they do not wait for each other (parameter servers); else empty."""
        return sorted({one["worker"] for one in self.metrics if "worker" in one})

    @property
    def seconds(self) -> float:
        """The seconds that training has taken so far."""
        ended = self._ended()
        return float(np.nanmax(ended)) if len(ended) else 0.0

    def _ended(self) -> Floats:
        """Return the seconds that training has taken by the end of each step."""
        each = self._numbers("step_seconds", self.metrics)
        return covered(self._numbers("time", self.metrics), each) if self.workers else np.nancumsum(each)

    def values(self, key: str) -> tuple[Floats, Floats]:
        """Return the steps and values of ``key``, each of shape (n,); NaN stands for what is missing or not finite.
        A speed is that of all workers together."""
        source = self.evaluations if key == VALIDATION or key in self.evaluation_keys else self.metrics
        if key == "peak_memory_bytes" and self.workers:
            source = [one for one in source if one["worker"] == 0]
        steps, values = np.array([one["step"] for one in source], dtype=np.float64), self._numbers(key, source)
        if key in speed.UNITS and self.workers and self.seconds:  # times how many work at a time
            values = values * (np.nansum(self._numbers("step_seconds", self.metrics)) / self.seconds)
        return steps, values

    def _numbers(self, key: str, source: Sequence[Metrics]) -> Floats:
        values = np.array([_number(one.get(key)) for one in source], dtype=np.float64)
        values[~np.isfinite(values)] = math.nan
        return values

    @property
    def evaluation_keys(self) -> list[str]:
        """The metrics of evaluations beside the loss, in the order in which they were written first."""
        keys = dict.fromkeys(key for one in self.evaluations for key in one if key not in NO_METRIC)
        return [key for key in keys if any(math.isfinite(_number(one.get(key))) for one in self.evaluations)]

    def along(self, key: str, over: str) -> tuple[Floats, Floats]:
        """Return the same, over steps or over the seconds that training has taken by the end of each."""
        steps, values = self.values(key)
        if over == "steps":
            return steps, values
        known = self.values("step_seconds")[0]
        places = np.concatenate([np.zeros(1), self._ended()])[np.searchsorted(known, steps, side="right")]
        order = np.argsort(places, kind="stable")  # steps of workers do not end in the order of their numbers
        return places[order], values[order]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def covered(ends: Floats, seconds: Floats) -> Floats:
    """Return, for each step that ended at a time and took some seconds, for how long any step had been under way."""
    edges, taken = list[float](), list[float]()
    for start, end in sorted(zip(np.nan_to_num(ends - seconds, nan=0.0), np.nan_to_num(ends), strict=True)):
        if not edges or start > edges[-1]:
            edges += [start, start]
            taken += [taken[-1] if taken else 0.0] * 2
        taken[-1] += max(0.0, end - edges[-1])
        edges[-1] = max(edges[-1], end)
    return np.interp(ends, edges, taken) if edges else np.zeros(0)


def read_run(folder: Path) -> PlottedRun:
    """Return the run in ``folder``; raise :class:`ConfigError` if there is none, or one of its files is damaged."""
    legal = "legal: the folder of a run (train.run_dir)"
    if not folder.is_dir():
        raise ConfigError(f"{folder}: {'is a file' if folder.exists() else 'there is no such folder'}; {legal}")
    if not (folder / METRICS).is_file():
        raise ConfigError(f"{folder}: there is no metrics.jsonl in this folder; {legal}")
    metrics = _read(folder / METRICS, CHECKED)
    run = PlottedRun(folder, metrics, read_evaluations(folder), **_described(folder))
    if all(np.isnan(run.values(key)[1]).all() for key in (*CHECKED, VALIDATION)):
        steps = f"none of its {len(metrics)} steps has a number" if metrics else "no step yet"
        raise ConfigError(f"{folder / METRICS}: nothing to draw, {steps}; legal: a run of at least one step")
    return run


def read_evaluations(folder: Path) -> list[Metrics]:
    """Return the evaluations of a run, whose tables of numbers are flat: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    path = folder / EVALUATIONS
    return [_flat(one) for one in _read(path, (VALIDATION, "perplexity"))] if path.is_file() else []


def _flat(values: Mapping[str, Any]) -> Metrics:
    found: Metrics = {}
    for key, value in values.items():
        found |= {f"{key}.{k}": v for k, v in _flat(value).items()} if isinstance(value, dict) else {key: value}
    return found


def _described(folder: Path) -> dict[str, Any]:
    """Return in words what a run trains, and its memory, from ``memory.json`` or else ``about.json``."""
    if (folder / MEMORY).is_file():
        values = read_memory(folder)
        return {
            "headline": values["title"].replace("\n", ", "), "device": values["device"]["kind"],
            "predicted": values["predicted"], "measured": values["measured"],
        }  # fmt: skip
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        ranks = f"{plural(about['ranks'], 'rank')} on {about['device']}"
        return {"headline": f"{count(about['parameters'])} parameters, {ranks}"}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # a run that has not come to its first step has described nothing


def _read(path: Path, keys: Sequence[str]) -> list[Metrics]:
    """Return the objects of a file of JSON lines, by rising step.  A line of a step that was there already is where a
    restart from a checkpoint began: what was noted of that step and of all after it no longer counts.  Workers that do
    not wait for each other end steps in any order, and of one that was done again the last line counts."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; legal: the metrics of a run") from None
    found: list[Metrics] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = _checked(line, keys)
        except ValueError as error:
            if number == len(lines):  # the run is writing this line right now
                break
            raise ConfigError(
                f'{path}:{number}: {error}; legal: a JSON object with "step" and numbers, or null'
            ) from None
        while found and found[-1]["step"] >= one["step"] and "worker" not in one:
            found.pop()
        found.append(one)
    return sorted({one["step"]: one for one in found}.values(), key=lambda one: one["step"])


def _checked(line: bytes, keys: Sequence[str]) -> Metrics:
    try:
        one = json.loads(line.decode())
    except ValueError:
        shown = line.decode(errors="replace")
        raise ValueError(f"damaged line: {shown[:60]}{'...' if len(shown) > 60 else ''}") from None
    if not isinstance(one, dict):
        raise ValueError(f"{str(one)[:60]} is no JSON object")
    if type(one.get("step")) is not int or one["step"] < 0:
        raise ValueError(f"step {one.get('step')!r} is not an integer of at least 0")
    for key in keys:
        if type(one.get(key)) not in (int, float, type(None)):
            raise ValueError(f"{key} {one[key]!r} is not a number")
    return one


def names(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each folder, with as many of its parents as tell it from the others."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    depth = [1] * len(parts)
    while True:
        short = [os.path.join(*p[-d:]) for p, d in zip(parts, depth, strict=True)]
        grown = [min(d + (short.count(s) > 1), len(p)) for d, s, p in zip(depth, short, parts, strict=True)]
        if grown == depth:
            return short
        depth = grown


def summary(run: PlottedRun) -> Metrics:
    """Return numbers of a run as in its ``result.json``: speed is the median of all steps but the first, a warm-up."""

    def finite(key: str) -> list[float]:
        values = run.values(key)[1]
        return [float(value) for value in values[np.isfinite(values)]]

    speeds = run.values(run.speed)[1]
    steady = [float(s) for s in (speeds[1:] if len(speeds) > 1 else speeds) if math.isfinite(s)]
    evaluation = run.evaluations[-1] if run.evaluations else {}
    return {
        "run_dir": str(run.folder),
        "steps": len(run.metrics),
        "loss_first": run.metrics[0].get("loss") if run.metrics else None,
        "loss_last": run.metrics[-1].get("loss") if run.metrics else None,
        run.speed: statistics.median(steady) if steady else None,
        "peak_memory_bytes": max((int(value) for value in finite("peak_memory_bytes")), default=None),
        "validation_loss": evaluation.get("validation_loss"),
        "perplexity": evaluation.get("perplexity"),
        **measured(evaluation),
    }
