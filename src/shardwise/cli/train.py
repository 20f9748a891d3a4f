"""``shardwise train`` starts the ranks, shows their progress, and sums up."""

from __future__ import annotations

import atexit
import json as jsonlib
import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from shardwise.backend import Backend
from shardwise.checkpoint.reader import Checkpoint, latest
from shardwise.config import Config, build_data, build_metrics, build_plan, load_config
from shardwise.data.progress import shown
from shardwise.launch.devices import check_ranks, check_torch
from shardwise.launch.flight import STEM
from shardwise.launch.folder import CHECKPOINTS, FoundRun, prepare_folder, read_lines
from shardwise.launch.local import clear_logs, launch_local, run_folder, under_torchrun
from shardwise.launch.rank import end_now, message_of, stop_on
from shardwise.launch.restarts import run_with_restarts
from shardwise.launch.slurm import adopt
from shardwise.launch.subject import check_plan
from shardwise.report.display import Display, show_result
from shardwise.report.files import (
    ABOUT,
    BEST,
    CONFIG,
    EVALUATIONS,
    MEMORY,
    METRICS,
    PLAN,
    RESULT,
    SAMPLE,
    SAMPLES,
    SCHEDULE,
)
from shardwise.report.tables import make_console, print_json
from shardwise.runtime.progress import Progress, record_path

from .common import INTERRUPTED, exit_code

LEAST_TIMEOUT = 60.0  # seconds, under torchrun, where nobody watches and ranks may start at different times
STALE = (BEST, SAMPLE, SAMPLES, EVALUATIONS, METRICS, MEMORY, SCHEDULE, PLAN)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(path: Path | None, overrides: Sequence[str], json: bool) -> None:
    """Train as the config and its overrides say, or go on with the run in its folder."""
    start = time.monotonic()
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
    first = not under_torchrun() or os.environ["RANK"] == "0"
    folder = Path(config.train.run_dir)
    console = make_console(stderr=json)
    notices = [*warnings, *config.notices, *_prepare_data(config, console if first else None)]
    build_metrics(config)
    with console.status("capturing the model") if first and not json else nullcontext():
        # All ranks under torchrun check, so that none waits for another that fails.
        check_plan(config, torch.device(backend.type))
    with run_folder(folder) if first else nullcontext():
        found = _prepare(config) if first else FoundRun()
        notices += found.notices
        if first and not json:
            for notice in notices:
                # A warning may hold a command to copy, so it is not broken into lines.
                console.print(f"note: {notice}", markup=False, soft_wrap=notice in warnings)
        ranks = config.train.devices
        display = Display(
            console, folder, config.train.steps, f"starting {ranks} rank{'s' if ranks > 1 else ''}", found.step
        )
        with nullcontext() if json or not first else display:
            if under_torchrun():
                stopped = _train_here(config, display if first and not json else None)
            else:
                _train_local(config, display, quiet=json)
                stopped = not (folder / RESULT).exists()
    extra = {"notes": notices, "resumed_from": found.step or None}
    if stopped:
        if first:
            _tell_stopped(folder, console if not json else None, extra)
        raise typer.Exit(INTERRUPTED)
    if first:
        result = jsonlib.loads((folder / RESULT).read_text(encoding="utf-8"))
        print_json({**result, **extra}) if json else show_result(console, result, time.monotonic() - start)


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


def _prepare(config: Config) -> FoundRun:
    """Prepare the folder: unless this run goes on with an earlier one, delete logs and results that are left there."""
    folder = Path(config.train.run_dir)
    found = prepare_folder(config)
    if found.checkpoint is None:
        clear_logs(folder)
        for name in STALE:
            (folder / name).unlink(missing_ok=True)
    for name in (RESULT, ABOUT):
        (folder / name).unlink(missing_ok=True)
    (folder / CONFIG).write_text(config.resolved(), encoding="utf-8")
    return found


def _prepare_data(config: Config, console: Console | None) -> tuple[str, ...]:
    """Tokenise text that is not in the cache, before ranks have to wait for it; return notices about it."""
    if not config.data.is_text:
        return ()
    with nullcontext() if console is None else shown("reading the text", console) as progress:
        return build_data(config, progress).notices


def _train_local(config: Config, display: Display, quiet: bool) -> None:
    """Train in processes that this one starts and watches, and starts again if one is lost."""
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
