"""``python -m shardwise.launch.scaling FOLDER`` is one rank of ``shardwise bench scaling``.

The rank takes the steps of the config in that folder as training does, and records them as training does; it evaluates,
samples and saves nothing.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.garbage import without_gc
from shardwise.core.recording import RankStep
from shardwise.report.files import CONFIG
from shardwise.report.scaling import MeasuredStep

from .rank import rank_process, record_error

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.data.loader import Batch
    from shardwise.data.stream_loader import AnyLoader

    from .ready import Surroundings
    from .run import Run

JOB, ROWS, ABOUT = "job.json", "rows.jsonl", "about.json"


@dataclass(frozen=True)
class Job:
    """A job measures ``steps`` steps after ``warmup`` others; of steps that overlap, whole windows."""

    steps: int
    warmup: int
    round: int = 0


def main() -> None:
    """Measure as the rank that torchrun's environment variables name."""
    folder = Path(sys.argv[1]).absolute()
    with rank_process(folder) as progress:
        with without_gc():
            from shardwise.config import load_config  # imports torch, whose warnings now go to the log

            from .ready import Surroundings
        job = Job(**json.loads((folder / JOB).read_text(encoding="utf-8")))
        failed = partial(record_error, folder, int(os.environ["RANK"]), progress)
        steps = measure(load_config(folder / CONFIG), job, folder, Surroundings(progress, failed=failed))
        with (folder / ROWS).open("a", encoding="utf-8") as file:
            for step in steps:
                if step is not None:
                    print(json.dumps(asdict(step)), file=file, flush=True)


def measure(config: Config, job: Job, folder: Path, side: Surroundings) -> Iterator[MeasuredStep | None]:
    """Take the steps of ``job``; yield each measured one on rank 0, and None on the others.

    The rank writes its log, and rank 0 :data:`ABOUT`, into ``folder``, which no run of the user's is in.
    """
    from .repeatable import repeatable
    from .training import ready_run

    config = replace(config, train=replace(config.train, run_dir=str(folder)))
    with ready_run(config, side) as run:
        trainer = run.trainer
        if trainer.comm.rank == 0:
            (folder / ABOUT).write_text(json.dumps(_about(run) | {"warmup": job.warmup}), encoding="utf-8")
        with (
            trainer.loader(run.data.train, config.data.batch_size) as loader,
            repeatable(trainer.comm.device, config.train.deterministic),
        ):
            yield from _steps(run, job, loader)
        side.progress.phase("waiting for the last step of all ranks")
        trainer.comm.barrier(what="the end of measuring")


def _steps(run: Run, job: Job, loader: AnyLoader) -> Iterator[MeasuredStep | None]:
    from shardwise.runtime.recorder import Recorder

    from .results import peak_memory

    trainer, plan, rows = run.trainer, run.trainer.plan, run.config.data.batch_size
    window = min(job.steps, plan.pipeline.window) if plan.overlaps else 1
    batches = _whole_batches(run, loader)
    for _ in range(-(-job.warmup // window)):
        for _ in trainer.steps(batches, window):
            pass
    stages = trainer.engine.cut.stage
    for _ in range(-(-job.steps // window)):
        first = trainer.engine.step_index
        with Recorder(trainer.engine.interpreter, lambda one: stages[one.unit] if one.unit >= 0 else -1) as recorder:
            for _ in trainer.steps(batches, window):
                pass
        run.side.progress.phase(f"bringing together what step {first} did when")
        found = _gathered(run, recorder.found(first, peak_memory(trainer.comm.device)))
        yield MeasuredStep.of(found, rows, job.round, window) if trainer.comm.rank == 0 else None
    trainer.finish()


def _whole_batches(run: Run, loader: AnyLoader) -> Iterator[Batch]:
    """Yield the batches of a loader without the last ones of epochs that have fewer rows."""
    for batch in loader:
        if batch.rows == run.config.data.batch_size:
            run.side.progress.begin(run.trainer.engine.step_index)
            run.side.progress.batch(batch.rows)
            yield batch


def _gathered(run: Run, mine: RankStep) -> list[RankStep]:
    """Return what all ranks have recorded, on rank 0; all ranks call it together."""
    from shardwise.runtime.communicator import host_gather_bytes

    comm = run.trainer.comm
    every = host_gather_bytes(comm, json.dumps(mine.to_dict()).encode(), "what ranks have recorded")
    return [RankStep.from_dict(json.loads(one)) for one in every] if comm.rank == 0 else []


def _about(run: Run) -> dict[str, Any]:
    """Return on what is measured, and what a reader of the figures has to know of the model."""
    import torch

    from shardwise import __version__
    from shardwise.backend import Backend
    from shardwise.config import Hardware

    from .results import tokens_per_row

    trainer = run.trainer
    device = trainer.comm.device
    backend = Backend.of(device)
    return {
        "shardwise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": Hardware.here().cores,
        "device": backend.name(device) if backend.asynchronous else device.type,
        "communicator": type(trainer.comm).__name__,
        "ranks": trainer.plan.mesh.size,
        "threads": run.config.train.threads,
        "precision": trainer.plan.numeric.precision,
        "parameters": sum(parameter.numel() for parameter in run.module.parameters()),
        "tokens_per_row": tokens_per_row(trainer.compiled.example),
    }


if __name__ == "__main__":
    main()
