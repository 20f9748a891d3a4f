"""``shardwise simulate`` prints the timetable of a pipeline in numbers, and ``shardwise draw`` draws it."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from shardwise.core.errors import ConfigError, check_count
from shardwise.core.pipeline_options import Norm
from shardwise.core.schedules import AUTO, traits
from shardwise.core.timetable import read
from shardwise.estimate.search import auto
from shardwise.estimate.simulate import Costs, Simulation, simulate
from shardwise.launch.folder import plan_of
from shardwise.launch.ordering import chosen_before
from shardwise.launch.subject import load_anywhere
from shardwise.lower.versions import asynchronous_batches
from shardwise.parallel.schedule import check_schedule, timetable
from shardwise.report.files import writing
from shardwise.report.recorded import measured, of_recorded, predicted
from shardwise.report.simulated import drawing
from shardwise.report.tables import grid, make_console, pairs, plural, print_json, show
from shardwise.report.timetable import Drawing, milliseconds, perfetto
from shardwise.report.timetable_chart import chart
from shardwise.report.timetable_picture import picture

WIDEST = 160  # the most columns of a chart
TIMES = (
    "four numbers of at least 0 in ms, of one microbatch on one rank, which its stages share: forward, the backward's "
    "parts for inputs "
    "and for weights, and the transfer between two ranks"
)


@dataclass(frozen=True)
class Options:
    """This is what the command line says about a pipeline; None stands for the config's value, or 1F1B on 4 ranks.

    ``memory`` is the most activations, in microbatches, that schedule :data:`AUTO` may hold on a rank.  ``timetable``
    is the config's order for :data:`AUTO`, if it has one.
    """

    schedule: str | None = None
    ranks: int | None = None
    microbatches: int | None = None
    stages_per_rank: int | None = None
    times: str = "1,1,1,0"
    norm: str | None = None
    memory: float | None = None
    timetable: tuple[str, ...] | None = None

    @staticmethod
    def each(schedules: Sequence[str] | None, *others: Any) -> list[Options]:
        """Return the options of each schedule, or of the default one; ``others`` are the fields that they share."""
        return [Options(schedule, *others) for schedule in schedules or (None,)]


def run_simulate(path: Path | None, overrides: Sequence[str], pipelines: Sequence[Options], json: bool) -> None:
    """Print the time, bubble and memory of a step of each pipeline."""
    _tell([(options, *simulated(options)[:2]) for options in resolved(path, overrides, pipelines)], json)


def _tell(found: Sequence[tuple[Options, str, Simulation]], json: bool) -> None:
    if json:
        print_json({"simulations": [{"title": title, **vars(options), **_plain(one)} for options, title, one in found]})
        return
    for _, title, simulation in found:
        values = {
            "step": milliseconds(simulation.seconds),
            "bubble": f"{simulation.bubble_of_total:.2%} of the total time of all ranks",
            "": f"{simulation.bubble_of_ideal:.2%} of the ideal time, in which no rank waits",
            "critical": f"{len(simulation.critical)} of {sum(map(len, simulation.timetable))} tasks",
        }
        columns = zip(simulation.work, simulation.rank_bubbles_of_total, simulation.peak_bytes, strict=True)
        rows = [
            (rank, milliseconds(float(work)), f"{bubble:.2%}", f"{peak:.4g}")
            for rank, (work, bubble, peak) in enumerate(columns)
        ]
        table = grid("", ("rank", ">computes", ">bubble of total", ">peak activations"), rows)
        show(make_console(), pairs(title, values), table)


def run_what_if(folder: Path, step: int | None, pipelines: Sequence[Options], json: bool) -> None:
    """Print what a recorded step takes without communication, as it ran or under other schedules of the same stages.

    Of a window of batches that stages update by their own norms, one batch counts.  A run of schedule ``auto`` also
    gets its order simulated by the times that were measured before it; these then serve other schedules too.
    """
    plan = plan_of(folder)
    batch = plan.microbatches if plan is not None and plan.post_validates else None
    usual: Norm = "barrier" if batch is None else "post-validate"
    own, costs = measured(folder, step, batch)
    before = chosen_before(folder)
    ranks, stages = len(own), len(costs.forward)
    microbatches = 1 + max(task.microbatch for tasks in own for task in tasks)
    numbers = f"{plural(ranks, 'rank')}, {plural(microbatches, 'microbatch')}"
    found = []
    for one in pipelines:
        norm = one.norm or usual
        if (one.ranks, one.microbatches, one.stages_per_rank, one.memory) != (None,) * 4 or one.times != Options.times:
            raise ConfigError(
                f"ranks, microbatches, stages or times for {folder}; legal: a schedule, for the rest is the run's"
            )
        options = replace(one, ranks=ranks, microbatches=microbatches, norm=norm)
        if before is not None and one.schedule in (None, AUTO):
            title = f"{before[0]}, {numbers}, by the times before the run"
            found.append((replace(options, schedule=AUTO), title, simulate(before[1], before[2], norm)))
        if one.schedule is None:
            found.append((options, f"as it ran, {numbers}, without communication", simulate(own, costs, norm)))
        elif one.schedule != AUTO:
            if before is None:
                _check_recorded(folder, one.schedule, ranks, microbatches, costs)
            order = timetable(one.schedule, ranks, microbatches, stages // ranks)
            times, words = (
                (costs, "without communication") if before is None else (before[2], "by the times before the run")
            )
            found.append((options, f"{one.schedule}, {numbers}, {words}", simulate(order, times, norm)))
        elif before is None:
            raise ConfigError(
                f'--schedule {AUTO}: no order was found for {folder}; legal: a run of parallel.schedule = "{AUTO}"'
            )
    _tell(found, json)


def _check_recorded(folder: Path, schedule: str, ranks: int, microbatches: int, costs: Costs) -> None:
    """Raise :class:`ConfigError` if the run has not recorded the kinds of tasks that ``schedule`` has."""
    legal = check_schedule(schedule, ranks, microbatches, len(costs.forward) // ranks)
    if legal.splits and not any(costs.weight) or not (legal.splits or any(costs.backward)):
        both = ("I and W", "B") if legal.splits else ("B", "I and W")
        wrong = f"needs the times of {both[0]}, and {folder} has recorded {both[1]}"
        others = f"another schedule, or a run of parallel.schedule = {schedule}"
        raise ConfigError.on(f"--schedule {schedule}", wrong, others)


def run_draw(
    path: Path | None,
    overrides: Sequence[str],
    pipelines: Sequence[Options],
    out: Path | None,
    trace: Path | None,
    json: bool,
) -> None:
    """Draw the simulations of the pipelines, one above the other."""
    drawings = [drawing(*simulated(options), str(options.norm)) for options in resolved(path, overrides, pipelines)]
    _deliver(drawings, None, out, trace, json)


def run_folder(folder: Path, step: int | None, out: Path | None, trace: Path | None, json: bool) -> None:
    """Draw a step that a run has recorded, and below it the simulation with the times of its tasks."""
    below = predicted(folder, step)
    whole = [of_recorded(folder, step, whole=False), below] if trace is not None else None
    _deliver([of_recorded(folder, step), below], whole, out, trace, json)


def resolved(path: Path | None, overrides: Sequence[str], pipelines: Sequence[Options]) -> list[Options]:
    """Fill in what the options leave open; raise :class:`ConfigError` if the result is not legal."""
    schedule, ranks, microbatches, stages, texts, norm = "1f1b", 4, 8, None, None, "barrier"
    if path is not None or overrides:
        given = load_anywhere(path, overrides).parallel
        schedule, ranks, microbatches, stages = given.schedule, given.pp, given.microbatches, given.stages_per_rank
        texts, norm = given.timetable, given.norm
        if given.rows == "batch" and microbatches > 1 and any(one.schedule is None for one in pipelines):
            wrong = '"batch": only the captured model shows where all microbatches meet'
            raise ConfigError.on("parallel.rows", wrong, "`shardwise show CONFIG --picture FILE`, which draws that")
        if traits(schedule).asynchronous:  # several batches, since a single step does not show the steady state
            microbatches *= asynchronous_batches(given.window, ranks, microbatches)
    found = []
    for one in pipelines:
        name = schedule if one.schedule is None else one.schedule
        p = ranks if one.ranks is None else one.ranks
        m = microbatches if one.microbatches is None else one.microbatches
        if one.memory is not None and (name != AUTO or not one.memory >= 1):
            raise ConfigError(f"--memory {one.memory:g}: legal: a number of at least 1, with --schedule {AUTO}")
        least = 1 if name == AUTO else check_schedule(name, p, m, one.stages_per_rank).stages_per_rank
        own = stages if name == schedule and one.stages_per_rank is None else one.stages_per_rank
        each = least if own is None else own
        for field, value in (("ranks", p), ("microbatches", m), ("stages_per_rank", each)):
            check_count(field, value)
        own_order = (
            texts if name == AUTO and one.memory is None and (p, m, each) == (ranks, microbatches, stages) else None
        )
        found.append(
            replace(
                one,
                schedule=name,
                ranks=p,
                microbatches=m,
                stages_per_rank=each,
                timetable=own_order,
                norm=one.norm or norm,
            )
        )
    return found


def simulated(options: Options) -> tuple[str, Simulation, Costs]:
    """Return the title, the simulation and the stages' costs of a pipeline whose options are :func:`resolved`."""
    schedule, ranks, microbatches, each = options.schedule, options.ranks, options.microbatches, options.stages_per_rank
    norm = options.norm
    assert (
        schedule is not None
        and ranks is not None
        and microbatches is not None
        and each is not None
        and norm is not None
    )
    stages = ranks * each
    forward, inputs, weights, transfer = _times(options.times)
    costs = Costs(
        [forward / each] * stages, [inputs / each] * stages, [weights / each] * stages,
        transfer=[transfer] * (stages - 1),
        activations=[1 / each] * stages,
    )  # fmt: skip
    if options.timetable is not None:
        name, simulation = (
            f"{AUTO}: the config's",
            simulate(read(options.timetable, ranks, each, microbatches), costs, norm),
        )
    elif schedule == AUTO:
        limit = float("inf") if options.memory is None else options.memory * (1 + 1e-9)
        chosen = auto(ranks, microbatches, costs, limit, norm)
        name, simulation = f"{AUTO}: {chosen.words}", chosen.simulation
    else:
        name, simulation = schedule, simulate(timetable(schedule, ranks, microbatches, each), costs, norm)
    several = f" x {each} stages" if each > 1 else ""
    title = f"{name}, {plural(ranks, 'rank')}{several}, {plural(microbatches, 'microbatch')}"
    return title, simulation, costs


def _times(text: str) -> list[float]:
    """Parse ``--times``, in milliseconds, into the seconds of F, I, W and a transfer."""
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
            {"rank": rank, "work_seconds": float(work), "bubble_of_total": float(total),
            "bubble_of_ideal": float(ideal),
             "peak_activations": peak}
            for rank, (work, total, ideal, peak) in enumerate(zip(
                simulation.work, simulation.rank_bubbles_of_total, simulation.rank_bubbles_of_ideal,
                simulation.peak_bytes,
                strict=True,
            ))
        ],
        "critical": [[rank, *simulation.timetable[rank][place]] for rank, place in simulation.critical],
    }  # fmt: skip


def _deliver(
    drawings: list[Drawing], traced: list[Drawing] | None, out: Path | None, trace: Path | None, json: bool
) -> None:
    """Write drawings into files, and print them."""
    if out is not None:
        picture(drawings).write(out, "--out")
    if trace is not None:
        with writing(trace, "--perfetto"):
            trace.write_text(jsonlib.dumps(perfetto(traced or drawings)) + "\n", encoding="utf-8")
    if json:
        print_json({"drawings": [one.to_dict() for one in drawings]})
        return
    console = make_console()
    console.print(chart(drawings, min(console.width, WIDEST), _has_colours(console)), Text(), sep="\n")
    for file in (out, trace):
        if file is not None:
            print(file)


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color
