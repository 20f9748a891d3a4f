"""Decide whether the run in a folder goes on or moves aside, and read and cut its files of JSON lines."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shardwise.checkpoint.reader import Checkpoint, checkpoints, latest
from shardwise.config import Config
from shardwise.config.sections import SECTIONS, moved
from shardwise.config.toml import shown
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.report.files import METRICS, PLAN, RESULT, WEIGHTS, parsed_line, write_whole

from .monitor import RANKS_LOCK

CHECKPOINTS = "checkpoints"
LEFT = (METRICS, WEIGHTS)  # worth keeping even without a checkpoint
EARLIER = "earlier"
LOCKS = (".lock", RANKS_LOCK)
MUST_MATCH = ("model", "data.source", "data.mix", "data.factory", "data.arguments", "optimizer.name", "train.seed")
START_ONLY = ("model.weights",)  # read only at the start of a run
NOT_REPORTED = ("train.run_dir", "train.devices", "train.threads", "train.resume", "data.cache_dir")
MAY_CHANGE_WHEN_FINISHED = (
    "train.", "validation.", "checkpoint.", "parallel.", "optimizer.warmup_steps", "data.cache_dir", *START_ONLY,
)  # fmt: skip


@dataclass(frozen=True)
class FoundRun:
    """This is the checkpoint to go on from, if any, its step, and what to tell the user."""

    checkpoint: Path | None = None
    step: int = 0
    notices: list[str] = field(default_factory=list)


def plan_of(folder: Path) -> Plan | None:
    """Return the plan that a run in ``folder`` has trained with so far; None if there is none, or it cannot be read."""
    try:
        return Plan.from_toml((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ConfigError):
        return None


def prepare_folder(config: Config) -> FoundRun:
    """Look into ``train.run_dir``, whose lock this process holds, and make it ready.

    An unfinished run with a checkpoint goes on (``train.resume = "auto"``), and so does a finished run that only gets
    more steps; any other run moves to a folder of its own.  Raise :class:`ConfigError` if an unfinished run has another
    configuration, naming the keys, or has taken more than ``train.steps``.
    """
    folder = Path(config.train.run_dir)
    finished = (folder / RESULT).exists()
    path = latest(folder / CHECKPOINTS)
    if path is None:
        left = finished or any((folder / name).exists() and (folder / name).stat().st_size for name in LEFT)
        return FoundRun(notices=_set_aside(folder) if left else [])
    if config.train.resume == "never" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return FoundRun(notices=_set_aside(folder))
    checkpoint = _opened(path)
    changes = dict(_changes(checkpoint.meta.get("config"), config))
    longer = checkpoint.step < config.train.steps and all(key.startswith(MAY_CHANGE_WHEN_FINISHED) for key in changes)
    if finished and not (longer and (changes or not _stopped_early(folder))):
        return FoundRun(notices=_set_aside(folder))
    if checkpoint.step > config.train.steps:
        there = f"the unfinished run in {folder} is at step {checkpoint.step} already"
        legal = f'at least {checkpoint.step}, another folder, or train.resume = "never", which sets that run aside'
        raise ConfigError.on(f"train.steps = {config.train.steps}", there, legal)
    wrong = [key for key in changes if key.startswith(MUST_MATCH) and key not in START_ONLY]
    if wrong:
        words = "; ".join(f"{key}: {changes[key]}" for key in wrong)
        there = f"an unfinished run of another configuration is there, at step {checkpoint.step} ({words})"
        legal = 'the same configuration, another folder, or train.resume = "never", which sets that run aside'
        raise ConfigError.on(f"train.run_dir = {shown(str(folder))}", there, legal)
    told = [f"{key}: {change}" for key, change in changes.items() if key not in NOT_REPORTED and key not in START_ONLY]
    notices = [f"going on from step {checkpoint.step} ({path})"]
    return FoundRun(path, checkpoint.step, notices + ([f"changed since: {'; '.join(told)}"] if told else []))


def _stopped_early(folder: Path) -> bool:
    """Return whether the finished run in ``folder`` has ended before its last step."""
    try:
        return "stopped_early" in json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _opened(path: Path) -> Checkpoint:
    try:
        return Checkpoint.open(path)
    except ConfigError as error:
        before = [one.name for one in checkpoints(path.parent) if one != path]
        words = (
            f"without it the run goes on from {before[-1]}" if before else 'train.resume = "never" sets the run aside'
        )
        raise ConfigError(f"{error}; legal: to move {path} away: {words}") from error


def _changes(before: Any, config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values differ between the checkpoint's configuration and this one, with both values.

    A key that did not exist when the checkpoint was written counts as having today's default.
    """
    old = moved(tomllib.loads(before)) if isinstance(before, str) else {}
    new = tomllib.loads(config.resolved())
    for section in new:
        default = {
            one.name: list(one.default) if isinstance(one.default, tuple) else one.default
            for one in fields(SECTIONS[section])
        }
        for key in sorted({**old.get(section, {}), **new[section]}):
            values = [tables.get(section, {}).get(key, default.get(key)) for tables in (old, new)]
            if old and values[0] != values[1]:
                yield f"{section}.{key}", " → ".join("none" if value is None else shown(value) for value in values)


def _set_aside(folder: Path) -> list[str]:
    """Move what a run left into the first free ``FOLDER-N``, or ``FOLDER/earlier-N`` if the folder is a mount point."""
    folder = folder.resolve()
    own = folder.stat().st_dev == folder.parent.stat().st_dev
    base = folder if own and folder.name else folder / EARLIER
    number = 1
    while (aside := base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    entries = [
        entry
        for entry in sorted(folder.iterdir())
        if entry.name not in LOCKS and not entry.name.startswith(f"{EARLIER}-")
    ]
    aside.mkdir()
    for entry in entries:
        os.rename(entry, aside / entry.name)
    for name in ("logs", "monitor"):
        (folder / name).mkdir()
    return [f"the earlier run is now in {aside}"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects with a step in a file of JSON lines; a missing file, or a line that a killed run left
    incomplete, has none."""
    if not path.exists():
        return []
    found = (parsed_line(line) for line in path.read_bytes().splitlines())
    return [values for values in found if values is not None and isinstance(values.get("step"), int)]


def keep_lines(path: Path, before: int) -> list[dict[str, Any]]:
    """Cut a file of JSON lines down to the objects of steps before ``before``, and return these."""
    if not path.exists():
        return []
    kept = [values for values in read_lines(path) if values["step"] < before]
    write_whole(path, "".join(json.dumps(values) + "\n" for values in kept))
    return kept
