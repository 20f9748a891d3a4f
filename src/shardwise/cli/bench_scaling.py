"""``shardwise bench scaling`` starts ranks that take steps of a config, or is one of them under torchrun."""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from shardwise.backend import Backend
from shardwise.core.errors import ConfigError
from shardwise.launch.devices import check_torch
from shardwise.launch.local import run_folder, under_torchrun
from shardwise.launch.ready import Surroundings
from shardwise.launch.scaling import ABOUT, JOB, ROWS, Job, measure
from shardwise.launch.scaling_cases import Case, Subject, cases_of, in_common
from shardwise.launch.slurm import adopt
from shardwise.launch.subject import compare_weights
from shardwise.report.figures import check_format
from shardwise.report.files import CONFIG, write_whole, writing
from shardwise.report.scaling import MeasuredStep, Scaling
from shardwise.report.scaling_shown import draw, tables
from shardwise.report.tables import make_console, print_json, show
from shardwise.runtime.progress import Progress, record_path

from .counted import launch_counted


@dataclass(frozen=True)
class Files:
    """These are the files that the command reads and writes, each None where it is not wanted."""

    earlier: Path | None = None
    out: Path | None = None
    picture: Path | None = None

    def check(self) -> Scaling | None:
        """Return what was measured earlier; raise :class:`ConfigError` for a file that cannot be read or written."""
        if self.picture is not None:
            check_format(self.picture, "--picture")
        if self.out is not None and self.out.exists():
            raise ConfigError(f"--out {self.out}: is there already; legal: another name, or to delete it")
        for option, path in (("--out", self.out), ("--picture", self.picture)):
            if path is not None:
                with writing(path, option):  # makes the folder now, and not after everything has been measured
                    pass
        if self.earlier is None:
            return None
        try:
            return Scaling.of_json(self.earlier.read_text(encoding="utf-8"), f"--with {self.earlier}")
        except OSError as error:
            words = f"cannot be read: {error.strerror}; legal: what --out has written"
            raise ConfigError(f"--with {self.earlier}: {words}") from None


def run(
    path: Path | None, overrides: Sequence[str], ranks: Sequence[int], axis: str, kind: str, job: Job, rounds: int,
    files: Files, json: bool,
) -> None:  # fmt: skip
    """Measure, and print tables or JSON; write what was measured, and the picture."""
    adopt(os.environ)
    Backend.built().prepare(os.environ)  # before this process, which may be a rank, asks for devices
    warnings, earlier = check_torch(), files.check()
    first = not under_torchrun() or os.environ["RANK"] == "0"
    console = make_console(stderr=json)
    with TemporaryDirectory(prefix="shardwise-bench-") as place:
        subject = Subject(path, overrides, axis, kind, Path(place))
        cases, notes = cases_of(subject, ranks, None if earlier is None else earlier.first[0])
        config = cases[0].config
        compare_weights(config)
        if config.train.deterministic:
            Backend.here().prepare_repeatable(os.environ)
        known = Scaling(in_common(config, axis), axis, subject.kinds, subject.rows, None, (), ())
        if earlier is not None:
            known = known.beside(earlier, f"--with {files.earlier}")
            _check_new(cases, known)
        for note in (*warnings, *notes) if first else ():
            console.print(f"note: {note}", markup=False, soft_wrap=note in warnings)
        steps, about = _measured(cases, job, rounds, Path(place), None if json or not first else console)
    if first:
        tokens = about[0]["tokens_per_row"]
        found = replace(
            known, tokens=tokens, about=(*known.about, *about), measured=(*known.measured, *steps)
        )  # fmt: skip
        _tell(found, notes, files, console, json)


def _check_new(cases: Sequence[Case], known: Scaling) -> None:
    """Raise :class:`ConfigError` if one of the cases has been measured earlier."""
    hosts = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else 1
    for case in cases:
        if (case.ranks, hosts, case.rows) in known.cases:
            raise ConfigError(f"--ranks {case.ranks}: --with has {case} already; legal: other numbers of ranks")


def _measured(
    cases: Sequence[Case], job: Job, rounds: int, place: Path, console: Console | None
) -> tuple[list[MeasuredStep], list[dict[str, Any]]]:
    """Return the steps of all cases, and on what each measured them; each round has all cases in turn, so that a slow
    moment of the machine does not fall on one of them alone."""
    steps: list[MeasuredStep] = []
    about: dict[int, dict[str, Any]] = {}
    for round in range(rounds):
        for index, case in enumerate(cases):
            folder = place / f"round_{round}_case_{index}"
            with run_folder(folder, "bench"):
                own = replace(job, round=round)
                if under_torchrun():
                    progress = Progress(record_path(folder, int(os.environ["RANK"])))
                    steps += [step for step in measure(case.config, own, folder, Surroundings(progress)) if step]
                else:
                    steps += _started(case, own, folder, f"round {round + 1} of {rounds}: {case}", console)
                if (folder / ABOUT).exists():
                    about[index] = jsonlib.loads((folder / ABOUT).read_text(encoding="utf-8"))
    return steps, list(about.values())


def _started(case: Case, job: Job, folder: Path, doing: str, console: Console | None) -> list[MeasuredStep]:
    """Start the ranks of a case, and return what they have measured."""
    (folder / JOB).write_text(jsonlib.dumps(asdict(job)), encoding="utf-8")
    (folder / CONFIG).write_text(case.config.resolved(), encoding="utf-8")
    train = case.config.train
    launch_counted(
        ["-m", "shardwise.launch.scaling", str(folder)], case.ranks, folder, threads=train.threads,
        hang_timeout=train.hang_timeout, console=console, doing=doing, total=job.steps,
        done=lambda: sum(step.steps for step in _read(folder)),
    )  # fmt: skip
    return _read(folder)


def _read(folder: Path) -> list[MeasuredStep]:
    """Return the steps that have been written so far."""
    path = folder / ROWS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [MeasuredStep(**jsonlib.loads(line)) for line in lines if line.endswith("\n")]


def _tell(found: Scaling, notes: Sequence[str], files: Files, console: Console, json: bool) -> None:
    values = found.to_dict() | {"notes": list(notes)}
    if files.out is not None:
        with writing(files.out, "--out"):
            write_whole(files.out, jsonlib.dumps(values, indent=2) + "\n")
    if files.picture is not None:
        draw(found, files.picture)
    if json:
        print_json(values)
        return
    show(console, *tables(found))
    for path in (files.out, files.picture):
        if path is not None:
            console.print(str(path))
