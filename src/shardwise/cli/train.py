"""``shardwise train`` starts the ranks, shows their progress, and sums up."""

from __future__ import annotations

import atexit
import json as jsonlib
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from shardwise.backend import Backend
from shardwise.checkpoint.reader import Checkpoint, latest
from shardwise.config import Config, build_data, build_metrics, build_plan, check_callbacks, load_config
from shardwise.core.errors import ConfigError
from shardwise.data.progress import shown
from shardwise.data.streams import samples_of
from shardwise.launch.apart import prepare, train_apart
from shardwise.launch.begin import begun, stage
from shardwise.launch.devices import check_ranks, check_torch
from shardwise.launch.flight import STEM
from shardwise.launch.folder import CHECKPOINTS, FoundRun, look, read_lines
from shardwise.launch.local import interruptible, launch_local, run_folder, under_torchrun
from shardwise.launch.rank import end_now, message_of, stop_on
from shardwise.launch.restarts import run_with_restarts
from shardwise.launch.slurm import adopt
from shardwise.launch.subject import check_plan, compare_weights
from shardwise.report.display import Display, show_result
from shardwise.report.files import METRICS, RESULT
from shardwise.report.loggers import check_loggers
from shardwise.report.observers import HOOKS
from shardwise.report.starting import Phases
from shardwise.report.tables import make_console, plural, print_json
from shardwise.runtime.progress import Progress, record_path

from .common import INTERRUPTED, Interrupted, exit_code

LEAST_TIMEOUT = 60.0  # seconds, under torchrun, where nobody watches and ranks may start at different times
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(path: Path | None, overrides: Sequence[str], json: bool) -> None:
    """Train as the config and its overrides say, or go on with the run in its folder, or show that it has finished."""
    adopt(os.environ)
    Backend.built().prepare(os.environ)  # before this process, which may be a rank, asks for devices
    warnings = check_torch()
    config = load_config(path, overrides)
    backend = Backend.here()
    if config.train.deterministic:
        backend.prepare_repeatable(os.environ)
    build_plan(config).memory.check_device(backend.kind)
    check_ranks(
        config.train.devices, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if under_torchrun() else config.train.devices
    )
    check_loggers(config.train.loggers)
    first = not under_torchrun() or os.environ["RANK"] == "0"
    console = make_console(stderr=json)
    phases = Phases(console if first and not json else None)
    with phases.phase("comparing the weights with the model"):
        compare_weights(config)
    with interruptible():
        config, notices = _with_data(config, console if first else None, phases)
        # All ranks under torchrun look and check, so that none waits for another that fails or has nothing to do.
        found = look(config)
        if found.finished:
            if first:
                _tell_finished(config, console if not json else None)
            return
        check_callbacks(config, HOOKS)
        build_metrics(config)  # checks them
        with phases.phase("checking the plan"):
            check_plan(config, torch.device(backend.type))
        start = _run_apart if build_plan(config).serving.apart else _run
        start(config, found, Shown(console, json, first, phases, [*warnings, *notices]), warnings)


@dataclass(frozen=True)
class Shown:
    """What the user sees, and where: of all ranks under torchrun only the ``first`` shows anything."""

    console: Console
    json: bool
    first: bool
    phases: Phases
    notices: list[str]


def _run(config: Config, found: FoundRun, shown: Shown, warnings: Sequence[str]) -> None:
    """Start the ranks, or be one, and tell how the run has ended."""
    folder, console = Path(config.train.run_dir), shown.console
    quiet = shown.json or not shown.first
    with run_folder(folder) if shown.first else nullcontext():
        if shown.first:
            stage(folder, config.resolved(), anew=found.checkpoint is None)
        notices = [*shown.notices, *found.notices]
        for notice in () if quiet else notices:
            # A warning may hold a command to copy, so it is not broken into lines.
            console.print(f"note: {notice}", markup=False, soft_wrap=notice in warnings)
        display = Display(
            console, folder, config.train.steps, f"starting {plural(config.train.devices, 'rank')}", found.step,
            shown.phases,
        )  # fmt: skip
        extra = {"notes": notices, "resumed_from": found.step or None}
        try:
            with nullcontext() if quiet else display:
                if under_torchrun():
                    stopped = _train_here(config, None if quiet else display)
                else:
                    stopped = _train_local(config, display, quiet=shown.json)
        except KeyboardInterrupt:
            if begun(folder):
                raise
            raise Interrupted(f"interrupted before the first step; {folder} is as it was") from None
    if stopped:
        if shown.first:
            _tell_stopped(folder, console if not shown.json else None, extra)
        raise typer.Exit(INTERRUPTED)
    if shown.first:
        result = jsonlib.loads((folder / RESULT).read_text(encoding="utf-8"))
        print_json({**result, **extra}) if shown.json else show_result(console, result, shown.phases.seconds)


def _run_apart(config: Config, found: FoundRun, shown: Shown, warnings: Sequence[str]) -> None:
    """Start servers and workers that do not wait for each other, and tell how the run has ended."""
    if under_torchrun():
        wrong = f'"{config.parallel.server}" is not legal under torchrun, which ends all ranks with one'
        raise ConfigError.on("parallel.server", wrong, "shardwise train by itself")
    folder, console = Path(config.train.run_dir), shown.console
    with run_folder(folder):
        notices = [*shown.notices, *prepare(config)]
        for notice in () if shown.json else notices:
            console.print(f"note: {notice}", markup=False, soft_wrap=notice in warnings)
        words = f"starting {plural(config.parallel.server_ranks, 'server')} and {plural(config.parallel.dp, 'worker')}"
        display = Display(console, folder, config.train.steps, words, 0, shown.phases)
        with nullcontext() if shown.json else display:
            stopped = train_apart(config, (lambda: None) if shown.json else display.update, display.say)
    if stopped:
        if not shown.json:
            console.print("stopped; the same command goes on from the servers' snapshots")
        raise typer.Exit(INTERRUPTED)
    result = jsonlib.loads((folder / RESULT).read_text(encoding="utf-8"))
    print_json({**result, "notes": notices}) if shown.json else show_result(console, result, shown.phases.seconds)


def _with_data(config: Config, console: Console | None, phases: Phases) -> tuple[Config, tuple[str, ...]]:
    """Tokenise text that is not in the cache, before ranks have to wait for it, and count the steps of epochs; return
    the config with the number of steps, and notices for the user."""
    if not config.data.is_text and config.train.epochs is None:
        return config, config.notices
    with (
        phases.phase("reading the text" if config.data.is_text else "opening the data", quiet=True),
        nullcontext() if console is None else shown("reading the text", console) as progress,
    ):
        data = build_data(config, progress)
        config = config.for_samples(samples_of(data.train, config.data.batch_size))
    return config, (*config.notices, *data.notices)


def _tell_finished(config: Config, console: Console | None) -> None:
    """Show the result of a run that has finished already."""
    folder = Path(config.train.run_dir)
    result = jsonlib.loads((folder / RESULT).read_text(encoding="utf-8"))
    if console is None:
        print_json({**result, "already_finished": True, "notes": [], "resumed_from": None})
        return
    words = f"this run has finished: {plural(result['steps'], 'step')}, in {folder}"
    console.print(words, markup=False)
    show_result(console, result, None)
    more = "A greater validation.patience goes" if "stopped_early" in result else "More train.steps go"
    on = "" if "servers" in result else f"{more} on from there; "  # servers apart have shared out all their tickets
    console.print(f"{on}to train again: another train.run_dir, or train.resume=never", markup=False)


def _tell_stopped(folder: Path, console: Console | None, extra: dict[str, Any]) -> None:
    """Tell how far the run has come, and whether a checkpoint keeps that."""
    path = latest(folder / CHECKPOINTS)
    saved = None if path is None else Checkpoint.open(path).step
    lines = read_lines(folder / METRICS)
    done = max(saved or 0, lines[-1]["step"] + 1 if lines else 0)
    if console is None:
        values = {
            "error": "interrupted",
            "cause": "interrupted",
            "rank": None,
            "steps": done,
            "checkpoint": path and str(path),
        }
        print_json({**values, **extra})
        return
    if saved == done:
        words = "with a checkpoint; the same command goes on from there"
    else:
        words = (
            f"whose checkpoint could not be saved; the last good one is {'of step ' + str(saved) if saved else 'none'}"
        )
    console.print(f"stopped after {done} step{'s' if done != 1 else ''}, {words}", markup=False)


def _train_local(config: Config, display: Display, quiet: bool) -> bool:
    """Train in processes that this one starts and watches, and starts again if one is lost; return whether they were
    asked to stop before the last step."""
    folder = Path(config.train.run_dir).absolute()

    def start() -> bool:
        return launch_local(
            ["-m", "shardwise.launch.worker", str(folder)], config.train.devices, folder, threads=config.train.threads,
            hang_timeout=config.train.hang_timeout, tick=None if quiet else display.update, on_notice=display.say,
            on_stop=stop,
        )  # fmt: skip

    def stop() -> None:
        display.say("stopping after this step, with a checkpoint (once more: at once)")

    run_with_restarts(start, folder, config.train.max_restarts, display.say)
    return not begun(folder) or not (folder / RESULT).exists()


def _train_here(config: Config, display: Display | None) -> bool:
    """Train as the one rank that this process is; return whether it was asked to stop before the last step.

    The first SIGINT or SIGTERM asks all ranks to stop, and a second one ends this rank.  An error is printed at once,
    before anything waits for other ranks, and raised at the end.
    """
    from shardwise.launch.ready import Surroundings
    from shardwise.launch.training import train

    progress = Progress(record_path(Path(config.train.run_dir), int(os.environ["RANK"])))
    # Torch reads these when process groups are made.
    os.environ.update(Backend.built().flight_recorder(str(progress.path.with_name(STEM))))
    asked = stop_on(SIGNALS, then=signal.default_int_handler)
    on_step = None if display is None else lambda metrics: display.show([metrics])
    warn = print if display is None else display.say
    rank = os.environ["RANK"]
    side = Surroundings(progress, asked, warn, on_step, lambda error: warn(f"rank {rank} ends: {message_of(error)}"))
    try:
        done = train(config, side, timeout=max(LEAST_TIMEOUT, config.train.hang_timeout))
    except Exception as error:
        # At the interpreter's end, process groups would wait for what is pending on a device.
        if Backend.here().asynchronous:
            atexit.register(end_now, exit_code(error))
        raise
    progress.finish()
    return not done
