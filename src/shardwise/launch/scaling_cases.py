"""Which numbers of ranks ``shardwise bench scaling`` measures, and the config of each, checked before any rank
starts."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.backend import Backend
from shardwise.config import Config, Hardware, build_data, build_plan, given_values, load_config
from shardwise.core.errors import ConfigError
from shardwise.data.streams import samples_of
from shardwise.report.scaling import KINDS, Kind
from shardwise.report.tables import plural

from .devices import check_ranks
from .subject import check_plan

AXES = ("dp", "tp", "pp", "cp", "ep")
BOTH = "both"
OUTSIDE = ("checkpoint", "validation")
"""Sections that do not change a step."""
GROWING = ("data.batch_size", "train.devices", "train.steps", "optimizer.warmup_steps", "parallel.dp")
"""Keys that may differ over numbers of ranks, besides the axis."""
FOLDER = "train.run_dir"
NOBODY_LOOKS_ON = ("train.loggers=[]", "train.callbacks=[]", "train.trace_steps=[]")


@dataclass(frozen=True)
class Case:
    """This is a number of ranks with the rows of its batch, for one or several kinds of scaling."""

    ranks: int
    rows: int
    config: Config

    def __str__(self) -> str:
        return f"{plural(self.ranks, 'rank')} with {plural(self.rows, 'row')} a batch"


@dataclass(frozen=True)
class Subject:
    """This is what is measured: a config with its overrides, of which ``axis`` grows.

    ``kind`` is one of KINDS or :data:`BOTH`; ranks write into ``folder``.
    """

    path: Path | None
    overrides: Sequence[str]
    axis: str
    kind: str
    folder: Path

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in KINDS if self.kind in (kind, BOTH))

    @property
    def rows(self) -> int:
        """The rows of a batch of the first number of ranks."""
        return int(given_values(self.path, self.overrides, ["data.batch_size"])["data.batch_size"])

    def cases(self, ranks: int, first: int) -> list[Case]:
        """Return the cases of a number of ranks: one, or two where the kinds differ in the batch.

        ``first`` is the number of ranks that has the config's batch.  Raises :class:`ConfigError`, which names the
        number, if the config cannot have it.
        """
        found: dict[int, Case] = {}
        try:
            for kind in self.kinds:
                rows = self.rows if kind == "strong" else self._grown(ranks, first)
                if rows not in found:
                    found[rows] = Case(ranks, rows, self._config(ranks, rows))
        except ConfigError as error:
            raise ConfigError(f"--ranks {ranks}: {error}") from error
        return list(found.values())

    def _grown(self, ranks: int, first: int) -> int:
        """Return the rows of a batch with as many rows a rank as the first number of ranks has."""
        if self.rows * ranks % first:
            wrong = f"{self.rows} rows for {first} ranks, which cannot grow to {ranks} ranks"
            raise ConfigError.on("data.batch_size", wrong, f"a multiple of {first}, or --kind strong")
        return self.rows * ranks // first

    def _config(self, ranks: int, rows: int) -> Config:
        keys = {axis: f"parallel.{axis}" for axis in AXES}
        given = given_values(self.path, self.overrides, [*keys.values(), "train.threads"])
        others = {axis: given[key] or 1 for axis, key in keys.items() if axis != self.axis}
        each = math.prod(others.values())
        if ranks % each:
            sizes = {keys[axis]: size for axis, size in others.items() if size > 1}
            wrong = f"{ranks} ranks over {' x '.join(sizes)} = {' x '.join(map(str, sizes.values()))}"
            raise ConfigError.on(keys[self.axis], wrong, f"a multiple of {each} ranks")
        hardware = Hardware.here()
        # As many for each number of ranks, or what grows would not be the ranks alone.
        threads = given["train.threads"] or max(1, hardware.cores // (hardware.gpus or hardware.cores))
        return _checked(load_config(self.path, [
            *self.overrides, f"data.batch_size={rows}", f"train.devices={ranks}", f"train.threads={threads}",
            *(f"{key}={(others | {self.axis: ranks // each})[axis]}" for axis, key in keys.items()),
            f"{FOLDER}={json.dumps(str(self.folder))}", *NOBODY_LOOKS_ON,
        ]))  # fmt: skip


def cases_of(subject: Subject, ranks: Sequence[int], first: int | None) -> tuple[list[Case], list[str]]:
    """Return the cases of all numbers of ``ranks``, in ascending order, and notes for the user.

    Without any ``ranks`` they are 1, 2, 4, … up to the number of this machine's devices, or that of the ranks that
    torchrun has started; a note names those that the config cannot have.  ``first`` is the first number of ranks if it
    was measured earlier.  Raises :class:`ConfigError` if the config cannot have one of the given numbers, or none.
    """
    given_values(subject.path, subject.overrides, ())  # raises for what is wrong whatever the number of ranks
    numbers = sorted({*ranks} or _usual())
    if first is not None and numbers[0] < first:
        raise ConfigError.on(f"--ranks {numbers[0]}", f"the first of --with is {first}", f"at least {first}")
    found: list[Case] = []
    notes: list[str] = []
    for number in numbers:
        start = first or (found[0].ranks if found else number)
        try:
            found += subject.cases(number, start)
        except ConfigError as error:
            if ranks or (number == numbers[-1] and not found):
                raise
            notes.append(f"without {plural(number, 'rank')}: {str(error).removeprefix(f'--ranks {number}: ')}")
    notes += [notice for case in found for notice in case.config.notices]
    return found, list(dict.fromkeys(notes))


def _usual() -> set[int]:
    hardware = Hardware.here()
    powers = {2**power for power in range(hardware.devices.bit_length())}
    return {hardware.world} if hardware.world else powers | {hardware.devices}


def _checked(config: Config) -> Config:
    """Return the config with the number of its steps, which epochs leave to the data; raise :class:`ConfigError` if a
    plan cannot be made, does not suit the devices or the model, or the data is too little for a batch."""
    backend, hardware = Backend.here(), Hardware.here()
    with config.answering():
        build_plan(config).memory.check_device(backend.kind)
    check_ranks(config.train.devices, hardware.local or config.train.devices)
    samples = samples_of(build_data(config).train, config.data.batch_size)
    if samples < config.data.batch_size:
        wrong = f"{config.data.batch_size} rows, and the data has {samples}"
        raise ConfigError.on("data.batch_size", wrong, f"at most {samples}")
    check_plan(config, torch.device(backend.type))
    return config.for_samples(samples)


def in_common(config: Config, axis: str) -> dict[str, Any]:
    """Return the values of all keys that numbers of ranks have in common, and that a step depends on."""
    left_out = {*GROWING, FOLDER, f"parallel.{axis}"}
    return {
        f"{section}.{key}": value
        for section, keys in tomllib.loads(config.resolved()).items() if section not in OUTSIDE
        for key, value in keys.items() if f"{section}.{key}" not in left_out
    }  # fmt: skip
