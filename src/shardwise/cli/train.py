"""``shardwise train``: start the ranks, show how they go on, sum up."""

from __future__ import annotations

import json as jsonlib
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from shardwise.config import Config, load_config
from shardwise.launch.local import launch_local, run_folder, under_torchrun
from shardwise.report.display import Display, show_result
from shardwise.report.tables import make_console, print_json
from shardwise.runtime.progress import Progress, record_path

WRITTEN = ("metrics.jsonl", "about.json", "plan.toml", "program.txt", "result.json", "sample.txt", "weights.safetensors")
LEAST_TIMEOUT = 60.0  # seconds, under torchrun: nobody watches, and ranks need not start together


def run(path: Path | None, overrides: Sequence[str], json: bool) -> None:
    """Train as the config and its overrides say."""
    start = time.monotonic()
    config = load_config(path, overrides)
    first = not under_torchrun() or os.environ["RANK"] == "0"
    folder = Path(config.train.run_dir)
    console = make_console(stderr=json)
    if first and not json:
        for notice in config.notices:
            console.print(f"note: {notice}", markup=False)
    ranks = config.train.devices
    display = Display(console, folder, config.train.steps, f"starting {ranks} rank{'s' if ranks > 1 else ''}")
    with run_folder(folder, WRITTEN) if first else nullcontext(), nullcontext() if json or not first else display:
        if first:
            (folder / "config.toml").write_text(config.resolved(), encoding="utf-8")
        if under_torchrun():
            _train_here(config, display if first and not json else None)
        else:
            _train_local(config, None if json else display)
    if first:
        result = jsonlib.loads((folder / "result.json").read_text(encoding="utf-8"))
        print_json(result) if json else show_result(console, result, time.monotonic() - start)


def _train_local(config: Config, display: Display | None) -> None:
    """As processes that this one starts and watches."""
    command = ["-m", "shardwise.launch.worker", config.train.run_dir]
    try:
        launch_local(
            command, config.train.devices, Path(config.train.run_dir), threads=config.train.threads,
            hang_timeout=config.train.hang_timeout, tick=None if display is None else display.update,
        )  # fmt: skip
    except KeyboardInterrupt:
        if display is not None:
            display.say(f"stopped after {display.steps_done} steps; metrics and logs are in {config.train.run_dir}")
        raise


def _train_here(config: Config, display: Display | None) -> None:
    """As the one rank that this process is."""
    from shardwise.launch.training import train

    progress = Progress(record_path(Path(config.train.run_dir), int(os.environ["RANK"])))
    on_step = None if display is None else lambda metrics: display.show([metrics])
    train(config, progress, timeout=max(LEAST_TIMEOUT, config.train.hang_timeout), on_step=on_step)
    progress.finish()
