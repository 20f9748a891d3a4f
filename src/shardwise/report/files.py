"""The files of a run's folder have these names; some have a JSON object on each line, which may be cut short."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.metrics import PERPLEXITY, RESERVED

CONFIG, PLAN, ABOUT, RESULT = "config.toml", "plan.toml", "about.json", "result.json"
METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"
BEST, EVALUATION = "best.json", "evaluation.json"
MEMORY, SCHEDULE = "memory.json", "schedule.json"
WEIGHTS, SAMPLE = "weights.safetensors", "sample.txt"
LOGS = "logs"
STARTING = "starting"
"""The folder, in that of a run, with what a start writes before its first step, where an earlier run has left files."""


def current(run_dir: Path, name: str) -> Path:
    """Return the path of the file ``name`` of the run that is under way: in ``starting``, until its first step."""
    start = run_dir / STARTING
    return (start if start.is_dir() else run_dir) / name


def begins_anew(run_dir: Path) -> bool:
    """Return whether the run that is starting does not go on with the one in its folder, which is still there."""
    return (run_dir / STARTING / LOGS).is_dir()


def logs(run_dir: Path) -> Path:
    """Return the folder of the logs; those of a run that goes on are added to those that are there."""
    return (run_dir / STARTING if begins_anew(run_dir) else run_dir) / LOGS


MODEL, ADAPTER, PRETRAINED = "model", "adapter", "pretrained"  # folders, of a run with model.pretrained or model.lora


def measured(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of an evaluation by name, without its loss and perplexity."""
    return {name: value for name, value in evaluation.items() if name not in (*RESERVED, PERPLEXITY)}


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if it is no JSON object, as one that a killed run or a full disk cut."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def write_whole(path: Path, text: str) -> None:
    """Write a file such that its name has either all of the text or what it had before."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextmanager
def writing(out: Path, option: str) -> Iterator[None]:
    """Make the folder of the file ``out``, which ``option`` named; raise :class:`ConfigError` where that fails, or a
    write inside the context."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        words = f"cannot be written: {error.strerror or error}"
        raise ConfigError(f"{option} {out}: {words}; legal: a file in a writable folder") from None
