"""``shardwise evaluate`` measures the weights of a run on its validation data, or on other data."""

from __future__ import annotations

import json as jsonlib
import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from shardwise.backend import Backend
from shardwise.checkpoint.folder import checkpoints, latest, step_of
from shardwise.config import Config, build_data, build_metrics, load_config
from shardwise.config.servers import KEYS as SERVERS
from shardwise.config.toml import dumps
from shardwise.core.errors import ConfigError
from shardwise.launch.devices import check_ranks, check_torch
from shardwise.launch.folder import CHECKPOINTS
from shardwise.launch.local import clear_logs, launch_local, run_folder
from shardwise.report.display import evaluation
from shardwise.report.files import BEST, CONFIG, EVALUATION, MODEL, RESULT, WEIGHTS
from shardwise.report.tables import make_console, pairs, print_json, show

FOLDER = "evaluation"  # in the run's folder
DEVICES = ("train.devices", "train.threads", "parallel.dp")  # what another number of devices changes
TRAINING = (
    "checkpoint.best", "checkpoint.goal", "validation.every", "validation.patience", "validation.watch",
    "validation.goal", "train.trace_steps", "train.loggers", "train.callbacks", "train.sample_every", "model.weights",
)  # fmt: skip
"""What only matters while a run trains."""


def run(folder: Path, chosen: str, overrides: Sequence[str], json: bool) -> None:
    """Evaluate the weights ``chosen`` of the run in ``folder`` under its config with ``overrides``."""
    step, weights = weights_of(folder, chosen)
    out = folder / FOLDER
    Backend.built()
    check_torch()
    with run_folder(out):
        config = _config(folder, out, overrides)
        check_ranks(config.train.devices, config.train.devices)
        build_metrics(config)
        console = make_console(stderr=json)
        data = build_data(config)
        if data.validation is None:
            raise ConfigError(
                f"{folder}: its config sets no validation data apart; legal: validation.source=..., "
                "validation.factory=... or validation.share=..."
            )
        clear_logs(out)
        (out / EVALUATION).unlink(missing_ok=True)
        (out / CONFIG).write_text(config.resolved(), encoding="utf-8")
        limited = any(one.startswith("validation.batches") for one in overrides)
        most = [str(config.validation.batches)] if limited else []
        ranks = config.train.devices
        words = f"evaluating step {step} on {ranks} rank{'s' if ranks > 1 else ''}"
        with nullcontext() if json else console.status(words):
            launch_local(
                ["-m", "shardwise.launch.evaluator", str(out.absolute()), str(step), str(weights.absolute()), *most],
                ranks, out.absolute(), threads=config.train.threads, hang_timeout=config.train.hang_timeout,
            )  # fmt: skip
    found: dict[str, Any] = jsonlib.loads((out / EVALUATION).read_text(encoding="utf-8"))
    if json:
        print_json({**found, "weights": str(weights)})
        return
    rows = {
        "weights": f"of step {step} ({weights})",
        "validation": evaluation(found),
        "data": f"{found['rows']:,} rows, {found['seconds']:.1f} s",
    }
    show(make_console(), pairs("evaluation", rows))


def weights_of(folder: Path, chosen: str) -> tuple[int, Path]:
    """Return the step and the path of weights of a run: "best", "last" or the step of a checkpoint."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: there is no {CONFIG} in this folder; legal: the folder of a run (train.run_dir)")
    there = {step_of(path): path for path in checkpoints(folder / CHECKPOINTS)}
    has_best = (folder / BEST).is_file()
    legal = ", ".join([*(["best"] if has_best else []), "last", *(str(step) for step in there)])
    if chosen == "best":
        if not has_best:
            raise ConfigError(f"--checkpoint best: {folder} has no {BEST}; legal: for runs with checkpoint.best")
        step = int(jsonlib.loads((folder / BEST).read_text(encoding="utf-8"))["step"])
        if step not in there:
            raise ConfigError(f"--checkpoint best: the checkpoint of step {step} is gone; legal: {legal}")
        return step, there[step]
    if chosen != "last":
        if not chosen.isdecimal() or int(chosen) not in there:
            raise ConfigError(f"--checkpoint {chosen}: legal: {legal}")
        return int(chosen), there[int(chosen)]
    path = latest(folder / CHECKPOINTS)
    if path is not None:
        return step_of(path) or 0, path
    written = next((folder / name for name in (WEIGHTS, MODEL) if (folder / name).exists()), None)
    if written is None:
        raise ConfigError(f"{folder}: has neither a checkpoint nor {WEIGHTS}; legal: a run that has saved one")
    result = folder / RESULT
    return (jsonlib.loads(result.read_text(encoding="utf-8"))["steps"] if result.is_file() else 0), written


def _config(folder: Path, out: Path, overrides: Sequence[str]) -> Config:
    """Return the run's config with ``overrides``; keys that only say how many devices trained give way to those."""
    tables = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    elsewhere = any(one.startswith((*DEVICES, "parallel.")) for one in overrides)
    own = any(one.startswith(("validation.source", "validation.factory")) for one in overrides)
    dropped = [*TRAINING, *SERVERS, *(DEVICES if elsewhere else ())]
    if own:  # the run's training data stay what they were, but are not evaluated on
        dropped += ["validation.share", "validation.source", "validation.factory", "validation.arguments"]
    for key in dropped:
        section, _, name = key.partition(".")
        tables.get(section, {}).pop(name, None)
    (out / CONFIG).write_text(dumps(tables), encoding="utf-8")
    ours = [f"train.run_dir={out.absolute()}", "train.trace_steps=[]"]
    return load_config(out / CONFIG, [*ours, *overrides])
