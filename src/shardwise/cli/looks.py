"""Define the commands that look: at a plan, its program and memory before a run, and at what runs have left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.core.errors import ConfigError

from .common import Arguments, Json, reported, split_arguments

RunArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [section.key=value]... | RUN_DIR", help="As for train, or the folder of a run."
    ),
]


Schedules = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Such as 1f1b, zb-h1 or auto; several: each (default: the config's, or 1f1b).",
    ),
]
Ranks = Annotated[int | None, typer.Option(help="Of the pipeline (default: the config's, or 4).")]
Microbatches = Annotated[int | None, typer.Option(help="Of a step (default: the config's, or 8).")]
StagesPerRank = Annotated[
    int | None, typer.Option(help="Parts of the model on a rank (default: the fewest that the schedule takes).")
]
Times = Annotated[str, typer.Option(metavar="F,I,W,TRANSFER", help="Of a rank and microbatch, in ms; B is I + W.")]
Memory = Annotated[
    float | None,
    typer.Option(metavar="N", help="The most microbatches whose activations a rank may hold; of schedule auto."),
]
Norm = Annotated[
    str | None,
    typer.Option(
        help="barrier or post-validate: when ranks take their optimizer step (default: the config's, or barrier)."
    ),
]
RecordedStep = Annotated[int | None, typer.Option(help="Of a run: one of train.trace_steps (default: the last).")]


def _run_folder(arguments: list[str], step: int | None = None) -> Path | None:
    """Return the folder of a run if the arguments name one; raise :class:`ConfigError` on a ``step`` without one."""
    if len(arguments) == 1 and Path(arguments[0]).is_dir():
        return Path(arguments[0])
    if step is not None:
        raise ConfigError(f"--step {step}: legal: with the folder of a run")
    return None


def show(
    arguments: Arguments = None,
    json: Json = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the program of a step instead: .svg, .png or .pdf.")
    ] = None,
    per_host: Annotated[
        int | None,
        typer.Option(
            metavar="RANKS",
            min=1,
            help="Ranks of a host; says which axes reach over several. (default: this machine's GPUs; of CPUs all)",
        ),
    ] = None,
) -> None:
    """Show the plan, the model's units with their costs, and the program of a step."""
    with reported(json):
        path, overrides = split_arguments(arguments or [])  # before torch is imported
        from .show import run

        run(path, overrides, json, picture, per_host)


def memory(
    arguments: RunArguments = None,
    json: Json = False,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Such as A100-80GB, H200 or cpu=64 (GiB). (default: this machine's)"),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the step's bytes: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Predict the memory that a plan takes on each rank of any device; for a run, also show what was measured."""
    with reported(json):
        given = arguments or []
        folder = _run_folder(given)
        if folder is not None:
            if device is not None:
                raise ConfigError(f"--device {device}: legal: left out, for {given[0]} is the folder of a run")
            from .memory import run_folder

            run_folder(folder, json, picture)
            return
        path, overrides = split_arguments(given)  # before torch is imported
        from .memory import run

        run(path, overrides, json, device, picture)


def simulate(
    arguments: RunArguments = None,
    schedules: Schedules = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    times: Times = "1,1,1,0",
    norm: Norm = None,
    memory: Memory = None,
    step: RecordedStep = None,
    json: Json = False,
) -> None:
    """Simulate the schedule of a pipeline, for given times or a run's: step time, bubble, activations of each rank."""
    with reported(json):
        given = arguments or []
        folder = _run_folder(given, step)
        path, overrides = (None, []) if folder else split_arguments(given)  # before torch is imported
        from .pipeline import Options, run_simulate, run_what_if

        each = Options.each(schedules, ranks, microbatches, stages_per_rank, times, norm, memory)
        run_what_if(folder, step, each, json) if folder else run_simulate(path, overrides, each, json)


def draw(
    arguments: RunArguments = None,
    schedules: Schedules = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    times: Times = "1,1,1,0",
    norm: Norm = None,
    memory: Memory = None,
    step: RecordedStep = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Also draw a picture: .svg, .png or .pdf.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Also write a trace for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    json: Json = False,
) -> None:
    """Draw what each rank computes when in a step, simulated from a schedule or recorded by a run."""
    with reported(json):
        given = arguments or []
        folder = _run_folder(given, step)
        path, overrides = (None, []) if folder else split_arguments(given)  # before torch is imported
        from .pipeline import Options, run_draw, run_folder

        each = Options.each(schedules, ranks, microbatches, stages_per_rank, times, norm, memory)
        if folder and each != [Options()]:
            raise ConfigError(f"a schedule or times for {given[0]}; legal: none, for it is the folder of a run")
        run_folder(folder, step, out, perfetto, json) if folder else run_draw(
            path, overrides, each, out, perfetto, json
        )


def plot(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="By default RUN_DIR/plot.png; plot.png for several runs.")
    ] = None,
    over: Annotated[str, typer.Option(metavar="steps|seconds", help="What the curves are drawn over.")] = "steps",
    experts: Annotated[
        bool, typer.Option("--experts", help="The load of a run's experts over its steps, here and in experts.png.")
    ] = False,
    json: Json = False,
) -> None:
    """Draw the curves of runs as a picture: loss, learning rate, gradient norm, throughput, memory, metrics."""
    with reported(json):
        from .plot import run, run_experts

        run_experts(run_dirs, out, json) if experts else run(run_dirs, out, json, over)


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="By default RUN_DIR/report.html.")] = None,
    json: Json = False,
) -> None:
    """Write one page of HTML about a run, finished or not: curves, plan, memory, a step, samples, faults, config."""
    with reported(json):
        from .report import run

        run(run_dir, out, json)


LOOKS = (show, memory, simulate, draw, plot, report)
