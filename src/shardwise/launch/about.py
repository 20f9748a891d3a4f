"""Write what a run says about itself before its first step: in its log, and in ``about.json`` for the parent."""

from __future__ import annotations

import logging
import os
import time
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import psutil

from shardwise.backend import Backend
from shardwise.lower.versions import steady_batches
from shardwise.report.files import ABOUT, MEMORY, current
from shardwise.train.checkpoints import Checkpoints

from .measuring import write_memory
from .ready import Ready
from .results import write_json

log = logging.getLogger("shardwise")


def write_about(run: Ready, checkpoints: Checkpoints, first: int) -> None:
    """Log how the start went, and let rank 0 write ``about.json``, ``program.txt`` and ``memory.json`` into the run's
    folder; all ranks call it together before step ``first``."""
    trainer = run.trainer
    phases = _phases(run.side.progress.timeline)
    words = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases)
    log.info("ready after %.1f s (%s): process %d on %s", age(), words, os.getpid(), trainer.comm.device)
    ceiling = checkpoints.prepare()
    log.info("saving takes at most %.1f MiB beside the training's memory", ceiling / 2**20)
    if trainer.comm.rank != 0:
        return
    compiled, plan = trainer.compiled, trainer.plan
    programs = compiled.programs(compiled.general, plan.microbatches, steady_batches(plan))
    current(run.folder, "program.txt").write_text(
        "\n\n".join(program.text() for program in programs) + "\n", encoding="utf-8"
    )
    about = _about(run) | {"start_seconds": age(), "first_step": first, "staging_bytes": ceiling, "phases": phases}
    write_memory(current(run.folder, MEMORY), run.forecast)
    write_json(current(run.folder, ABOUT), about)
    for line in (*about["notes"], *([str(run.matmul)] if run.matmul else [])):
        log.info(line)
    log.info("%d parameters in %d units, from step %d", about["parameters"], about["units"], first)


def _about(run: Ready) -> dict[str, Any]:
    config, trainer = run.config, run.trainer
    return {
        "ranks": trainer.plan.mesh.size,
        "device": str(trainer.comm.device.type),
        "communicator": type(trainer.comm).__name__,
        "threads": config.train.threads,
        "parameters": sum(parameter.numel() for parameter in run.module.parameters()),
        "units": len(trainer.compiled.general.units),
        "float32_matmul": None if run.matmul is None else vars(run.matmul),
        "deterministic": Backend.of(trainer.comm.device).repeats(os.environ) if config.train.deterministic else None,
        "checkpoint_every": config.checkpoint.every,
        "notes": [*trainer.notes, *([run.forecast.note] if run.forecast.note else [])],
    }


def facts(run: Ready, first: int) -> dict[str, Any]:
    """Return what observers of a run are told once step ``first`` has worked."""
    config, about = run.config, _about(run)
    return {
        "run_dir": str(run.folder),
        "config": tomllib.loads(config.resolved()),
        "steps": config.train.steps,
        "first_step": first,
        **{key: about[key] for key in ("ranks", "device", "parameters")},
    }


def _phases(timeline: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the phases so far, with their seconds; the first, "starting", includes the interpreter and its imports."""
    began = time.time() - age()
    marks = [(timeline[0][0], began), *timeline[1:], ("", time.time())]
    return [(text, after - at) for (text, at), (_, after) in pairwise(marks)]


def age() -> float:
    """Return the number of seconds since this process began."""
    return time.time() - float(psutil.Process().create_time())
