"""All that the folder of a run tells is gathered for its page: each part by itself, so that a file that is missing or
damaged costs that part only, which then says so.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from shardwise.config.reference import reference
from shardwise.config.toml import inline
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.runtime.recorder import TRACE

from . import happened, plan_words, speed
from .chart import memory_chart, run_charts
from .display import printable
from .expert_maps import expert_maps, sheet
from .files import ABOUT, CONFIG, EVALUATIONS, MEMORY, METRICS, PLAN, RESULT, SAMPLE, SAMPLES, parsed_line
from .memory import present, read_memory
from .panels import OVER, panels
from .recorded import of_recorded, predicted
from .runs import PlottedRun, names, read_evaluations, read_run, summary
from .tables import count, decimal, duration, plural, size
from .timetable_picture import picture

OF_A_RUN = (METRICS, CONFIG, ABOUT, RESULT, PLAN, str(happened.LAUNCHER_LOG))
"""A folder that has any of these is that of a run."""
LOG_LINES = 40  # lines of each rank's log
MOST_LOGS = 16  # ranks whose logs are shown
MOST_SAMPLES = 20  # samples of text that are shown: the last ones
LONGEST_PROGRAM = 400_000  # characters of a program that are shown

T = TypeVar("T")
Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Part(Generic[T]):
    """What one part of the page shows; or, in ``note``, why it shows nothing."""

    found: T | None = None
    note: str = ""


@dataclass(frozen=True)
class MemoryFacts:
    title: str
    chart: str
    rows: Rows  # category, predicted, measured, difference
    notes: list[str]


@dataclass(frozen=True)
class Facts:
    """What the page of a run shows; charts and pictures are SVG, everything else is plain text."""

    name: str
    folder: str
    headline: str
    state: str  # "finished", "stopped", "failed" or "unfinished"
    state_words: str
    cards: list[tuple[str, str, str]]  # a title, a number, and what there is to add
    charts: Part[list[str]]
    plan: Part[tuple[list[str], Rows]]
    memory: Part[MemoryFacts]
    experts: Part[str]  # empty for a model without experts
    step: Part[str]
    evaluations: Part[tuple[tuple[str, ...], Rows]]
    samples: Part[list[tuple[str, str]]]
    events: list[happened.Event]
    again: list[int]  # the steps from which the ranks have gone on after a fault
    logs: list[tuple[str, str]]
    environment: Part[Rows]
    config: Part[list[tuple[str, Rows]]]
    program: Part[str]
    notes: list[str] = field(default_factory=list)


def gathered(folder: Path) -> Facts:
    """Return what the run in ``folder`` tells; raise :class:`ConfigError` if the folder is none of a run."""
    legal = "legal: the folder of a run (train.run_dir)"
    if not folder.is_dir():
        raise ConfigError(f"{folder}: {'is a file' if folder.exists() else 'there is no such folder'}; {legal}")
    if not any((folder / name).is_file() for name in OF_A_RUN):
        raise ConfigError(f"{folder}: none of {', '.join(OF_A_RUN)} is in this folder; {legal}")
    run = _part(lambda: read_run(folder), folder / METRICS, "no step has been written yet")
    config = _part(lambda: _toml(folder / CONFIG), folder / CONFIG, "the run has not written its configuration")
    about = _part(lambda: _object(folder / ABOUT), folder / ABOUT, "the run has not come to its first step")
    found = happened.events(folder)
    again = happened.went_on_from(found)
    state, words = _state(folder, run.found, config.found, found)
    return Facts(
        name=names([folder])[0], folder=str(folder.resolve()), headline=run.found.headline if run.found else "",
        state=state, state_words=words, cards=_cards(run.found, about.found, found),
        charts=Part(run_charts(panels([run.found]), OVER["steps"].lower(), again))
        if run.found else Part(note=run.note),
        plan=_part(lambda: _plan(folder), folder / PLAN, "the run has not written its plan"),
        memory=_part(lambda: _memory(folder), folder / MEMORY, "the run has not predicted its memory"),
        experts=_part(lambda: _experts(run.found), folder / METRICS, ""),
        step=_part(lambda: _step(folder), folder / TRACE, "no step has been recorded; train.trace_steps says which"),
        evaluations=_part(
            lambda: _evaluations(folder), folder / EVALUATIONS, "nothing has been evaluated; validation.every says when"
        ),
        samples=_samples(folder), events=found, again=again, logs=happened.log_tails(folder, LOG_LINES)[:MOST_LOGS],
        environment=Part(_environment(folder, about.found)) if about.found else Part(note=about.note),
        config=Part(_config(config.found)) if config.found else Part(note=config.note),
        program=_part(lambda: _program(folder), folder / "program.txt", "the run has not written its program"),
        notes=[str(note) for note in about.found.get("notes", [])] if about.found else [],
    )  # fmt: skip


def _part(read: Callable[[], T], path: Path, absent: str) -> Part[T]:
    """Return what ``read`` returns, or a note: ``absent`` where there is no ``path``, and what is wrong with it."""
    if not path.exists():
        return Part(note=absent)
    try:
        return Part(read())
    except ConfigError as error:
        return Part(note=str(error))


def _object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: damaged: no JSON object")
    return values


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


# ---- how far it has come ---------------------------------------------------------------------------------------------


def _state(
    folder: Path, run: PlottedRun | None, config: Mapping[str, Any] | None, found: Sequence[happened.Event]
) -> tuple[str, str]:
    """Return the state of a run, and words for it with the number of its steps."""
    done = run.metrics[-1]["step"] + 1 if run is not None and run.metrics else 0
    done = len(run.metrics) if run is not None and run.workers else done  # they end in any order
    train = (config or {}).get("train", {})
    steps = train.get("steps") if isinstance(train, dict) else None
    of = f"{done:,} of {steps:,} steps" if isinstance(steps, int) else plural(done, "step")
    if (folder / RESULT).is_file():
        return "finished", f"finished: {of}"
    last = found[-1].kind if found else "other"
    if last == "stop":
        return "stopped", f"stopped as asked: {of}; the same command goes on from there"
    if last == "fault":
        return "failed", f"failed: {of}"
    return "unfinished", f"not finished: {of}"


def _cards(
    run: PlottedRun | None, about: Mapping[str, Any] | None, found: Sequence[happened.Event]
) -> list[tuple[str, str, str]]:
    cards: list[tuple[str, str, str]] = []
    if run is not None:
        numbers = summary(run)
        cards.append(("loss", decimal(numbers["loss_last"]), f"{decimal(numbers['loss_first'])} at the first step"))
        if numbers["validation_loss"] is not None:
            perplexity = numbers["perplexity"]
            more = f"perplexity {perplexity:.2f}" if perplexity is not None else ""
            cards.append(("validation loss", decimal(numbers["validation_loss"]), more))
        if numbers[run.speed] is not None:
            number, unit = speed.in_words(numbers, numbers[run.speed]).split(" ")
            cards.append((unit, number, "median of all steps"))
        cards.append(("training", duration(run.seconds), f"in {plural(numbers['steps'], 'step')}"))
        if numbers["peak_memory_bytes"] is not None:
            cards.append(("peak memory", size(numbers["peak_memory_bytes"]), "of rank 0"))
        cards += _workers(run)
    if about is not None and isinstance(about.get("ranks"), int):
        cards.append(("ranks", f"{about['ranks']:,}", f"on {about.get('device')}"))
    again, faults = happened.restarts(list(found)), sum(event.kind == "fault" for event in found)
    if faults:
        cards.append(("faults", str(faults), f"started again {again} time{'s' * (again != 1)}"))
    return cards


def _workers(run: PlottedRun) -> list[tuple[str, str, str]]:
    """Return what there is to tell of workers that do not wait for each other."""
    if not run.workers:
        return []
    done = Counter(one["worker"] for one in run.metrics)
    stale = run.values("staleness")[1]
    most = f"at most {np.nanmax(stale):.0f}; updates of others from pull to push"
    return [
        ("workers", str(len(done)), f"steps of each: {', '.join(str(done[one]) for one in run.workers)}"),
        ("staleness", f"{np.nanmean(stale):.1f}", most),
    ]  # fmt: skip


# ---- parts -----------------------------------------------------------------------------------------------------------


def _plan(folder: Path) -> tuple[list[str], Rows]:
    try:
        plan = Plan.from_toml((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{folder / PLAN}: cannot be read: {error}") from None
    return plan_words.sentences(plan), [*plan_words.options(plan)]


def _memory(folder: Path) -> MemoryFacts:
    values = read_memory(folder)
    ours, theirs = values["predicted"], values["measured"]
    rows: Rows = []
    for category in [*present(*filter(None, (ours, theirs))), "total"]:
        total = category == "total"
        before = ours.peak_bytes if total else ours.peak.get(category, 0)
        after = None if theirs is None else theirs.peak_bytes if total else theirs.peak.get(category, 0)
        rows.append((category, size(before), "" if after is None else size(after), _more(before, after)))
    budget = values["budget_bytes"]
    notes = [f"The peak is predicted at: {ours.where}. The tensors of a rank may take {size(budget)}."]
    notes.append(f"It is measured at: {theirs.where}." if theirs else "Not measured: the run has not taken two steps.")
    return MemoryFacts(values["title"], memory_chart(ours, theirs, budget), rows, notes)


def _more(before: int, after: int | None) -> str:
    """Return by which share a measured number of bytes is more than the predicted one."""
    if after is None or after == before:
        return "" if after is None else "0"
    return (
        f"{(after - before) / before:+.1%}".replace("-0.0%", "0.0%").replace("+0.0%", "0.0%") if before else size(after)
    )


def _experts(run: PlottedRun | None) -> str:
    maps = [] if run is None else expert_maps(run)
    return sheet(maps, "Over the steps").svg() if maps else ""


def _step(folder: Path) -> str:
    return picture([of_recorded(folder), predicted(folder)]).svg()


def _evaluations(folder: Path) -> tuple[tuple[str, ...], Rows]:
    found = read_evaluations(folder)
    if not found:
        raise ConfigError("nothing has been evaluated yet")
    keys = list(dict.fromkeys(key for one in found for key in one))
    return tuple(key.replace("_", " ") for key in keys), [tuple(_cell(one.get(key)) for key in keys) for one in found]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.5g}"
    return "" if value is None else f"{value:,}" if type(value) is int else printable(str(value))


def _samples(folder: Path) -> Part[list[tuple[str, str]]]:
    """Return the samples of text, the last ones first."""
    found: list[tuple[str, str]] = []
    path = folder / SAMPLES
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for one in (values for line in lines if (values := parsed_line(line)) is not None):
        if isinstance(one.get("text"), str):
            found.append((f"after step {one.get('step')}", _readable(one["text"])))
    if (folder / SAMPLE).is_file():
        found.append(("at the end", _readable((folder / SAMPLE).read_text(encoding="utf-8", errors="replace"))))
    return Part(found[::-1][:MOST_SAMPLES]) if found else Part(note="no sample of text; train.sample_every says when")


def _readable(text: str) -> str:
    return "\n".join(map(printable, text.strip("\n").split("\n")))


def _environment(folder: Path, about: Mapping[str, Any]) -> Rows:
    rows: Rows = [("folder", str(folder.resolve()))]
    for key, value in about.items():
        if key == "notes" or value is None:
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{name.replace('_', ' ')} {_cell(item)}" for name, item in value.items())
        elif key.endswith("_bytes"):
            value = size(value)
        elif key == "parameters":
            value = f"{value:,} ({count(value)})"
        rows.append((key.replace("_", " ").removesuffix(" bytes"), _cell(value)))
    kept = sorted((folder / "checkpoints").glob("step_*"))
    rows.append(
        ("checkpoints kept", ", ".join(str(int(path.name[5:])) for path in kept if path.name[5:].isdigit()) or "none")
    )
    return rows


def _config(values: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    """Return each section's keys, values and what they mean."""
    means = {key.name: key.does.replace("`", "") for keys in reference().values() for key in keys}
    return [
        (section, [(key, inline(value), means.get(f"{section}.{key}", "")) for key, value in keys.items()])
        for section, keys in values.items()
        if isinstance(keys, dict)
    ]


def _program(folder: Path) -> str:
    text = (folder / "program.txt").read_text(encoding="utf-8", errors="replace")
    if len(text) > LONGEST_PROGRAM:
        raise ConfigError(f"{folder / 'program.txt'} is too long to be shown here: {len(text):,} characters")
    return text
