"""Write what a run says about itself before its first step: in its log, and in ``about.json`` for the parent."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from shardwise.backend import Backend
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.lower.versions import steady_batches
from shardwise.report.files import ABOUT, MEMORY
from shardwise.train.checkpoints import Checkpoints
from shardwise.units.trace import Trace

from .measuring import write_memory
from .mfu import mfu, model_flops, peak_flops
from .ready import Ready
from .results import write_json

log = logging.getLogger("shardwise")


def write_about(run: Ready, checkpoints: Checkpoints, first: int) -> None:
    """Log how the start went, and let rank 0 write ``about.json``, ``program.txt`` and ``memory.json`` into the run's
    folder; all ranks call it together before step ``first``."""
    trainer = run.trainer
    phases = _phases(run.side.progress.timeline)
    log.info("ready after %.1f s (%s): process %d on %s", age(), phases, os.getpid(), trainer.comm.device)
    ceiling = checkpoints.prepare()
    log.info("saving takes at most %.1f MiB beside the training's memory", ceiling / 2**20)
    if trainer.comm.rank != 0:
        return
    compiled, plan = trainer.compiled, trainer.plan
    programs = compiled.programs(compiled.general, plan.microbatches, steady_batches(plan))
    (run.folder / "program.txt").write_text(
        "\n\n".join(program.text() for program in programs) + "\n", encoding="utf-8"
    )
    about = _about(run) | {"start_seconds": age(), "first_step": first, "staging_bytes": ceiling, "phases": phases}
    write_json(run.folder / ABOUT, about)
    write_memory(run.folder / MEMORY, run.forecast)
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


def utilisation(run: Ready) -> Callable[[int, float], float] | None:
    """Return a function from a step's rows and seconds to its MFU; None if peak or FLOPs of the model are unknown."""
    trainer, rows = run.trainer, run.config.data.batch_size
    peak = peak_flops(trainer.comm.device, trainer.plan.numeric.precision)
    flops = None if peak is None else model_flops(_whole(trainer.compiled), rows, trainer.plan.microbatches)
    if peak is None or flops is None:
        return None
    return lambda taken, seconds: mfu(flops * taken / rows, seconds, trainer.plan.mesh.size, peak)


def _whole(compiled: Compiled) -> Trace:
    """Return the trace of the whole model, as a single rank would compute it."""
    if not compiled.general.tensor:
        return compiled.general
    return compiled.under(Plan(numeric=compiled.plan.numeric)).general


def _phases(timeline: Sequence[tuple[str, float]]) -> str:
    """Return ``starting 2.1 s, connecting 0.1 s, …``; "starting" includes the interpreter and its imports."""
    began = time.time() - age()
    marks = [(timeline[0][0], began), *timeline[1:], ("", time.time())]
    return ", ".join(f"{text} {after - at:.1f} s" for (text, at), (_, after) in zip(marks, marks[1:], strict=False))


def age() -> float:
    """Return the number of seconds since this process began."""
    return time.time() - float(psutil.Process().create_time())
