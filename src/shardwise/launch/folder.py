"""Find out whether the run in a folder has finished or goes on, and read and cut its files of JSON lines."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shardwise.checkpoint.reader import Checkpoint, checkpoints, latest
from shardwise.config import Config
from shardwise.config.sections import SECTIONS, moved
from shardwise.config.toml import shown
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.report.files import CONFIG, PLAN, RESULT, begins_anew, parsed_line, write_whole

CHECKPOINTS = "checkpoints"
MUST_MATCH = (
    "model",
    "data.source",
    "data.mix",
    "data.sft",
    "data.factory",
    "data.arguments",
    "optimizer.name",
    "train.seed",
)
START_ONLY = ("model.weights",)  # read only at the start of a run
NOT_REPORTED = ("train.run_dir", "train.devices", "train.threads", "train.resume", "data.cache_dir")
MAY_CHANGE_WHEN_FINISHED = (
    "train.", "validation.", "checkpoint.", "parallel.", "optimizer.warmup_steps", "data.cache_dir", *START_ONLY,
)  # fmt: skip
OF_NO_RESULT = (
    *NOT_REPORTED, *START_ONLY, "train.callbacks", "train.loggers", "train.hang_timeout", "train.max_restarts",
    "train.memory_gib",
)  # fmt: skip
"""Keys that change neither what a run computes nor what it writes down of that."""
FROM_DEVICES = ("parallel.dp",)  # its default follows from the devices that there are
ANOTHER = 'another train.run_dir, or train.resume = "never", which sets that run aside once this one has begun'
SHOWN = 4  # the most changed keys that a message names


@dataclass(frozen=True)
class FoundRun:
    """This is the checkpoint to go on from, if any, its step, and what to tell the user; ``finished`` says that there
    is nothing to do, as the run with this configuration has finished."""

    checkpoint: Path | None = None
    step: int = 0
    notices: list[str] = field(default_factory=list)
    finished: bool = False


def plan_of(folder: Path) -> Plan | None:
    """Return the plan that a run in ``folder`` has trained with so far; None if there is none, or it cannot be read."""
    try:
        return Plan.from_toml((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ConfigError):
        return None


def plan_to_keep(folder: Path) -> Plan | None:
    """Return the plan that the run that is starting in ``folder`` has trained with so far; None if it begins anew."""
    return None if begins_anew(folder) else plan_of(folder)


def look(config: Config) -> FoundRun:
    """Look for an earlier run in ``train.run_dir``; nothing is changed there.

    An unfinished run with a checkpoint goes on (``train.resume = "auto"``), and so does a finished run that only gets
    more steps.  Raise :class:`ConfigError`, naming the keys, if a run of another configuration is there, or if an
    unfinished one has taken more than ``train.steps``.
    """
    folder = Path(config.train.run_dir)
    if config.train.resume == "never" and (_first_start() or begins_anew(folder)):
        return FoundRun()
    path = latest(folder / CHECKPOINTS)
    if (folder / RESULT).exists():
        return _after_finished(config, folder, path)
    if path is None:
        return FoundRun()
    checkpoint = _opened(path)
    changes = dict(_changes(checkpoint.meta.get("config"), config))
    if checkpoint.step > config.train.steps:
        there = f"the unfinished run in {folder} is at step {checkpoint.step} already"
        raise ConfigError.on(f"train.steps = {config.train.steps}", there, f"at least {checkpoint.step}, {ANOTHER}")
    wrong = {key: changes[key] for key in changes if key.startswith(MUST_MATCH) and key not in START_ONLY}
    if wrong:
        there = (
            f"an unfinished run of another configuration is there, at step {checkpoint.step} ({_listed(config, wrong)})"
        )
        raise ConfigError.on(f"train.run_dir = {shown(str(folder))}", there, f"the same configuration, {ANOTHER}")
    return _going_on(path, checkpoint.step, changes)


def _first_start() -> bool:
    """Return whether this is no restart by torchrun."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _after_finished(config: Config, folder: Path, path: Path | None) -> FoundRun:
    """Return what to do where a finished run is: nothing, or to go on with more steps, if there are more."""
    try:
        before = (folder / CONFIG).read_text(encoding="utf-8")
        changes = dict(_changes(before, config))
    except (OSError, ValueError):  # also TOML that cannot be read
        before, changes = "", {}
    if not before:
        return FoundRun()  # no run that anybody could ask for again
    differ = {
        key: change
        for key, change in changes.items()
        if key not in OF_NO_RESULT and (key not in FROM_DEVICES or key in config.origins)
    }
    if not differ:
        return FoundRun(finished=True)
    if path is not None and all(key.startswith(MAY_CHANGE_WHEN_FINISHED) for key in changes):
        step = _opened(path).step
        if step < config.train.steps:
            return _going_on(path, step, changes)
    there = f"a finished run of another configuration is there ({_listed(config, differ)})"
    legal = f"the same configuration, which shows its result, the same with more train.steps, {ANOTHER}"
    raise ConfigError.on(f"train.run_dir = {shown(str(folder))}", there, legal)


def _going_on(path: Path, step: int, changes: Mapping[str, str]) -> FoundRun:
    told = [f"{key}: {change}" for key, change in changes.items() if key not in NOT_REPORTED and key not in START_ONLY]
    notices = [f"going on from step {step} ({path})"]
    return FoundRun(path, step, notices + ([f"changed since: {'; '.join(told)}"] if told else []))


def _listed(config: Config, changes: Mapping[str, str]) -> str:
    """Return the changes in words: those that the user asked for, or else all, as defaults follow from others."""
    asked = {key: change for key, change in changes.items() if key in config.origins} or changes
    words = [f"{key}: {change}" for key, change in asked.items()]
    more = len(words) - SHOWN
    return "; ".join(words[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _opened(path: Path) -> Checkpoint:
    try:
        return Checkpoint.open(path)
    except ConfigError as error:
        before = [one.name for one in checkpoints(path.parent) if one != path]
        words = (
            f"without it the run goes on from {before[-1]}" if before else 'train.resume = "never" sets the run aside'
        )
        raise ConfigError(f"{error}; legal: to move {path} away: {words}") from error


def changed_keys(before: str, config: Config) -> list[str]:
    """Return the keys that change what a run computes, of which ``before``, a config as TOML, has other values."""
    return [key for key, _ in _changes(before, config) if key not in OF_NO_RESULT]


def _changes(before: Any, config: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values differ between the checkpoint's configuration and this one, with both values.

    A key that did not exist when the checkpoint was written counts as having today's default, and one that no longer
    exists does not count.
    """
    old = moved(tomllib.loads(before)) if isinstance(before, str) else {}
    new = tomllib.loads(config.resolved())
    for section in new:
        default = {
            one.name: list(one.default) if isinstance(one.default, tuple) else one.default
            for one in fields(SECTIONS[section])
        }
        for key in sorted(default.keys() & {**old.get(section, {}), **new[section]}):
            values = [tables.get(section, {}).get(key, default.get(key)) for tables in (old, new)]
            if old and values[0] != values[1]:
                yield f"{section}.{key}", " → ".join("none" if value is None else shown(value) for value in values)


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
