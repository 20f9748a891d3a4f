"""``shardwise simulate`` and ``shardwise draw``: the timetable of a pipeline in numbers, and as a picture."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from shardwise.core.errors import ConfigError
from shardwise.estimate.simulate import Costs, Simulation, simulate
from shardwise.launch.subject import load_anywhere
from shardwise.parallel.schedule import check_schedule, timetable
from shardwise.report.recorded import of_recorded, predicted
from shardwise.report.simulated import drawing
from shardwise.report.tables import grid, make_console, pairs, print_json, show
from shardwise.report.timetable import Drawing, milliseconds, perfetto
from shardwise.report.timetable_chart import chart
from shardwise.report.timetable_picture import picture

WIDEST = 160  # columns of a chart
TIMES = "four numbers of at least 0 in ms, of one microbatch on one stage: forward, the backward's parts for inputs and for weights, transfer"


@dataclass(frozen=True)
class Options:
    """What the command line says of a pipeline; None: as the config has it, or without one as 1F1B on 4 ranks."""

    schedule: str | None = None
    ranks: int | None = None
    microbatches: int | None = None
    stages_per_rank: int | None = None
    times: str = "1,1,1,0"
    norm: str = "barrier"


def run_simulate(path: Path | None, overrides: Sequence[str], options: Options, json: bool) -> None:
    """Print what a step of the pipeline takes."""
    options = resolved(path, overrides, options)
    title, simulation, _ = simulated(options)
    if json:
        print_json({"title": title, **vars(options), **_plain(simulation)})
        return
    console = make_console()
    values = {
        "step": milliseconds(simulation.seconds),
        "bubble": f"{simulation.bubble_of_total:.2%} of the total time of all ranks",
        "": f"{simulation.bubble_of_ideal:.2%} of the ideal time, in which no rank waits",
        "critical": f"{len(simulation.critical)} of {sum(map(len, simulation.timetable))} tasks",
    }
    rows = [
        (rank, milliseconds(float(work)), f"{bubble:.2%}", peak)
        for rank, (work, bubble, peak) in enumerate(
            zip(simulation.work, simulation.rank_bubbles_of_total, simulation.peak_activations, strict=True)
        )
    ]
    show(console, pairs(title, values), grid("", ("rank", ">computes", ">bubble of total", ">peak activations"), rows))


def run_draw(
    path: Path | None, overrides: Sequence[str], options: Options, out: Path | None, trace: Path | None, json: bool
) -> None:
    """Draw the simulation of the pipeline."""
    title, simulation, costs = simulated(resolved(path, overrides, options))
    _deliver([drawing(title, simulation, costs, options.norm)], None, out, trace, json)


def run_folder(folder: Path, step: int | None, out: Path | None, trace: Path | None, json: bool) -> None:
    """Draw a step that a run has recorded, and below it what the simulator makes of the times of its tasks."""
    below = predicted(folder, step)
    whole = [of_recorded(folder, step, whole=False), below] if trace is not None else None
    _deliver([of_recorded(folder, step), below], whole, out, trace, json)


def resolved(path: Path | None, overrides: Sequence[str], options: Options) -> Options:
    """The options with what they leave open; :class:`ConfigError` where they are not legal."""
    schedule, ranks, microbatches = "1f1b", 4, 8
    if path is not None or overrides:
        ranks, microbatches = 1, load_anywhere(path, overrides).parallel.microbatches
    schedule = schedule if options.schedule is None else options.schedule
    ranks = ranks if options.ranks is None else options.ranks
    microbatches = microbatches if options.microbatches is None else options.microbatches
    found = check_schedule(schedule, ranks, microbatches, options.stages_per_rank)
    return replace(
        options, schedule=schedule, ranks=ranks, microbatches=microbatches,
        stages_per_rank=options.stages_per_rank or found.stages_per_rank,
    )  # fmt: skip


def simulated(options: Options) -> tuple[str, Simulation, Costs]:
    """A pipeline, whose options are :func:`resolved`, in words, its simulation, and the costs of its stages."""
    assert options.schedule is not None and options.ranks is not None and options.microbatches is not None
    each = options.stages_per_rank or 1
    tasks = timetable(options.schedule, options.ranks, options.microbatches, each)
    forward, inputs, weights, transfer = _times(options.times)
    costs = Costs.uniform(options.ranks * each, forward, inputs, weights, transfer)
    several = f" x {each} stages" if each > 1 else ""
    title = f"{options.schedule}, {_plural(options.ranks, 'rank')}{several}, {_plural(options.microbatches, 'microbatch')}"
    return title, simulate(tasks, costs, options.norm), costs


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('h') else 's'}"


def _times(text: str) -> list[float]:
    """Seconds."""
    try:
        found = [float(part) / 1e3 for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 4 or not all(0 <= one < float("inf") for one in found) or not sum(found[:3]):
        raise ConfigError(f"--times {text}: legal: {TIMES}, such as 1,1,1,0")
    return found


def _plain(simulation: Simulation) -> dict[str, Any]:
    return {
        "step_seconds": simulation.seconds,
        "bubble_of_total": simulation.bubble_of_total,
        "bubble_of_ideal": simulation.bubble_of_ideal,
        "by_rank": [
            {"rank": rank, "work_seconds": float(work), "bubble_of_total": float(total), "bubble_of_ideal": float(ideal),
             "peak_activations": int(peak)}
            for rank, (work, total, ideal, peak) in enumerate(zip(
                simulation.work, simulation.rank_bubbles_of_total, simulation.rank_bubbles_of_ideal, simulation.peak_activations,
                strict=True,
            ))
        ],
        "critical": [[rank, *simulation.timetable[rank][place]] for rank, place in simulation.critical],
    }  # fmt: skip


def _deliver(drawings: list[Drawing], traced: list[Drawing] | None, out: Path | None, trace: Path | None, json: bool) -> None:
    """Into files, and to the terminal."""
    if out is not None:
        picture(drawings).write(out, "--out")
    if trace is not None:
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            trace.write_text(jsonlib.dumps(perfetto(traced or drawings)) + "\n", encoding="utf-8")
        except OSError as error:
            words = f"cannot be written: {error.strerror or error}"
            raise ConfigError(f"--perfetto {trace}: {words}; legal: a file in a writable folder") from None
    if json:
        print_json({"drawings": [one.to_dict() for one in drawings]})
        return
    console = make_console()
    seconds = max(one.end for one in drawings)
    for one in drawings:
        console.print(chart(one, min(console.width, WIDEST), _has_colours(console), seconds), Text(), sep="\n")
    for file in (out, trace):
        if file is not None:
            print(file)


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color
