"""Training as one rank: from a config to steps, and what they leave in the run's folder."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from shardwise.config import Config, build_dataset, build_model, build_optimizer, build_plan
from shardwise.config.build import Decode
from shardwise.core.plan import Plan
from shardwise.data.samples import Samples
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.connect import connect
from shardwise.runtime.progress import Progress
from shardwise.trace.initial import record
from shardwise.trainer import NonFiniteError, Trainer

from .matmul import SAFE, MatmulChoice, choose_matmul, typical_shapes
from .results import Metrics, MetricsWriter, OnStep, sample_text, save_weights, write_json

EXAMPLE_ROWS = 2

log = logging.getLogger("shardwise")


def train(config: Config, progress: Progress, *, timeout: float = 300.0, on_step: OnStep | None = None) -> None:
    """Train as one rank of ``config``; the environment says which (torchrun's variables).

    Args:
        progress: is told what this rank does.
        timeout: seconds until a wait for another rank fails by itself.
        on_step: gets the metrics of each step, on rank 0.

    Rank 0 writes into ``train.run_dir``: ``plan.toml``, ``program.txt``, ``about.json``, ``metrics.jsonl``,
    ``weights.safetensors``, ``sample.txt`` (own models of text) and at the end ``result.json``.
    """
    torch.set_num_threads(config.train.threads)
    plan = build_plan(config)
    progress.phase("connecting")
    comm = connect(plan.mesh, timeout=timeout, on_wait=progress.wait)
    _start_log(comm.rank)
    try:
        run = _build(config, plan, comm, progress)
        log.info("ready after %.1f s: process %d on %s", _age(), os.getpid(), comm.device)
        if comm.rank == 0:
            run.describe()
        run.train(on_step)
        progress.phase("waiting for the last step of all ranks", patient=False)
        comm.barrier(what="the end of training")
        state = run.trainer.state_dict()
    finally:
        comm.close()
    if comm.rank == 0:
        progress.phase("saving the weights")
        run.finish(state)


@dataclass
class _Run:
    """A rank that is ready to train; ``module`` is the plain model with its initial weights."""

    config: Config
    module: nn.Module
    trainer: Trainer
    dataset: Any
    decode: Decode | None
    matmul: MatmulChoice | None
    progress: Progress
    metrics: MetricsWriter | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.train.run_dir)

    def train(self, on_step: OnStep | None) -> None:
        """All steps.  A step that is not finite ends the run; the weights before it are saved."""
        train, trainer = self.config.train, self.trainer
        with trainer.loader(self.dataset, self.config.data.batch_size) as loader, self._metrics(on_step) as metrics:
            try:
                for step in range(train.steps):
                    self.progress.begin(step)
                    batch = next(loader)
                    result = trainer.step(batch)
                    if metrics is not None:
                        metrics.add(step, batch.rows, result)
                trainer.finish()
            except NonFiniteError:
                if metrics is not None:
                    save_weights(trainer.state_dict(), self.module, self.folder / "weights.safetensors")
                raise

    @contextmanager
    def _metrics(self, on_step: OnStep | None) -> Iterator[MetricsWriter | None]:
        if self.trainer.comm.rank != 0:
            yield None
            return
        with (self.folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
            tokens = _tokens_per_row(self.trainer.compiled.example)
            self.metrics = MetricsWriter(file, self.trainer.engine.optimizer, tokens, self.trainer.comm.device, on_step)
            try:
                yield self.metrics
            finally:
                self.metrics.flush()

    def describe(self) -> None:
        """What is known before the first step, for people and for the parent."""
        trainer, folder = self.trainer, self.folder
        general = trainer.compiled.general
        programs = trainer.compiled.programs(general, trainer.plan.microbatches)
        (folder / "program.txt").write_text("\n\n".join(program.text() for program in programs) + "\n", encoding="utf-8")
        about = {
            "ranks": trainer.plan.mesh.size,
            "device": str(trainer.comm.device.type),
            "communicator": type(trainer.comm).__name__,
            "threads": self.config.train.threads,
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "units": len(general.units),
            "float32_matmul": None if self.matmul is None else vars(self.matmul),
            "start_seconds": _age(),
            "notes": trainer.notes,
        }
        write_json(folder / "about.json", about)
        for line in (*trainer.notes, *([str(self.matmul)] if self.matmul else [])):
            log.info(line)
        log.info("%d parameters in %d units", about["parameters"], about["units"])

    def finish(self, state: Mapping[str, Tensor]) -> None:
        """Save the weights, let an own model of text write, and sum up."""
        folder, model = self.folder, self.config.model
        save_weights(state, self.module, folder / "weights.safetensors")
        written = {"weights": str(folder / "weights.safetensors")}
        if self.decode is not None and model.name is not None:
            self.progress.phase("writing a sample")
            self.module.load_state_dict(dict(state))
            prompt = b"\ndef " if self.config.data.source == "stdlib" else b"\n"
            text = sample_text(self.module.to(self.trainer.comm.device), prompt, self.decode, self.config.train.seed)
            (folder / "sample.txt").write_text(text, encoding="utf-8")
            written["sample"] = str(folder / "sample.txt")
        assert self.metrics is not None
        mesh, device = self.trainer.plan.mesh, self.trainer.comm.device
        result: Metrics = {**self.metrics.summary(), "ranks": mesh.size, "device": device.type, "run_dir": str(folder), **written}
        write_json(folder / "result.json", result)
        log.info("done: %s", result)


def _build(config: Config, plan: Plan, comm: Communicator, progress: Progress) -> _Run:
    """The model with weights that depend on the seed alone, the data, and a trainer over both."""
    progress.phase("building the model")
    constructor, loss = build_model(config)
    recorded = record(constructor, seed=config.train.seed)
    module = recorded.materialise_all(config.train.seed, "cpu")
    progress.phase("opening the data")
    dataset, decode = build_dataset(config)
    samples = Samples(dataset)
    example = samples.read(range(min(EXAMPLE_ROWS, samples.size)))
    progress.phase("choosing kernels")
    rows = config.data.batch_size // (plan.microbatches * plan.mesh.size)
    matmul = _choose_matmul(module, rows * _tokens_per_row(example), plan, comm)
    progress.phase("capturing the model")
    trainer = Trainer(
        module, build_optimizer(config), plan, example, loss=loss, clip_norm=config.train.clip_norm or None,
        seed=config.train.seed, comm=comm, progress=progress.instruction,
    )  # fmt: skip
    if comm.rank == 0:
        (Path(config.train.run_dir) / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
    return _Run(config, module, trainer, dataset, decode, matmul, progress)


def _choose_matmul(module: nn.Module, rows: int, plan: Plan, comm: Communicator) -> MatmulChoice | None:
    """Set the fast float32 kernels if they are accurate on the machines of all ranks; None where there is nothing to choose."""
    if comm.device.type != "cpu" or plan.precision != "fp32":
        return None
    choice = choose_matmul(typical_shapes(module, rows))
    refused = torch.tensor([float(choice.precision == SAFE)])
    comm.all_reduce(refused, plan.mesh.names, what="the choice of float32 kernels").wait()
    if bool(refused.any()):
        choice = MatmulChoice(SAFE, choice.fast_error, choice.safe_error)
    torch.set_float32_matmul_precision(choice.precision)
    return choice


def _tokens_per_row(example: Mapping[str, Tensor]) -> int:
    """Tokens of a sample of text; a sample of anything else counts as one."""
    ids = example.get("input_ids")
    return ids.shape[1] if ids is not None and ids.dim() == 2 else 1


def _age() -> float:
    """Seconds since this process began."""
    return time.time() - float(psutil.Process().create_time())


def _start_log(rank: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}: %(message)s", "%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
