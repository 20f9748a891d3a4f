"""Train as one rank: from a config to the steps, and to what they leave in the run's folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from shardwise.backend import Backend
from shardwise.config import (
    Config,
    build_callbacks,
    build_data,
    build_loss_scale,
    build_model,
    build_optimizer,
    build_plan,
)
from shardwise.core.devices import DeviceModel, model_of
from shardwise.core.errors import ConfigError
from shardwise.core.garbage import without_gc
from shardwise.core.plan import Plan
from shardwise.estimate.devices import Device, here
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import batch_axes
from shardwise.parallel.pipeline import stages_in_words
from shardwise.parallel.tensor import across_hosts
from shardwise.report.files import PLAN, current
from shardwise.report.loggers import make_logger
from shardwise.report.observers import Observers
from shardwise.runtime.communicator import Communicator, host_gather, host_sum
from shardwise.runtime.connect import connect, ranks_of_a_host
from shardwise.train.trainer import Trainer

from .devices import Card, cards_of, check_free, explain_out_of_memory, mixed
from .folder import plan_to_keep
from .forecast import Forecast
from .left_open import EarlierChoice
from .matmul import SAFE, MatmulChoice, choose_matmul, typical_shapes
from .monitor import log_path
from .ordering import settle, unordered
from .ready import Surroundings
from .results import tokens_per_row
from .run import Run
from .subject import check_loads, example_of, links_of, start_values, wanted_of
from .utilisation import utilisation

DEVICE_TIMEOUT = 600.0
"""The number of seconds that a collective may be pending on a device.  It is longer than any phase for which a host is
given time (``watch.START_TIMEOUT``), since the device of another rank may be waiting for that host."""

TF32 = {
    "gpu": "train.tf32: matrices of float32 are multiplied with TF32 where the device has it",
    "cpu": "train.tf32: a CPU has no TF32; nothing changes",
}  # fmt: skip

log = logging.getLogger("shardwise")


def train(config: Config, side: Surroundings, *, timeout: float = 300.0) -> bool:
    """Train as the rank of ``config`` that the environment names, going on from the last checkpoint of its folder.

    Args:
        side: whom the rank tells what it does, and who can ask it to stop.
        timeout: seconds until a wait for another rank fails by itself; on GPUs at least :data:`DEVICE_TIMEOUT`.

    Rank 0 writes into ``train.run_dir``: ``plan.toml``, ``program.txt``, ``about.json``, ``memory.json``,
    ``metrics.jsonl``, ``evaluations.jsonl``, ``weights.safetensors``, ``sample.txt`` (for shardwise's own models of
    text) and at the end ``result.json``; all ranks write ``checkpoints``.  Return False if the run was asked to stop
    before the last step.
    """
    progress = side.progress
    with ready_run(config, side, timeout) as run:
        done = run.train()
        progress.phase("waiting for the last step of all ranks")
        run.trainer.comm.barrier(what="the end of training")
        if done:
            run.save_weights()
    if run.trainer.comm.rank == 0 and done:
        run.finish()
    run.observers.end("stopped")  # if it has not ended already
    return done


@contextmanager
def ready_run(
    config: Config, side: Surroundings, timeout: float = 300.0, *, trained: Path | None = None
) -> Iterator[Run]:
    """Connect the rank of ``config`` that the environment names, and build its model, data and trainer; the rank leaves
    the others at the end of the context.

    ``trained`` is the path of weights of the whole model, in place of those that training starts from.
    """
    torch.set_num_threads(config.train.threads)
    plan, progress = build_plan(config), side.progress
    progress.phase("connecting")
    device = Backend.here().device()
    if Backend.of(device).asynchronous:
        timeout = max(timeout, DEVICE_TIMEOUT)
    with explain_out_of_memory(device):
        comm = connect(plan.mesh, device=device, timeout=timeout, on_wait=progress.wait)
    progress.set_role(stages_in_words(plan, comm.rank))
    progress.follow(comm.device)
    _start_log(comm.rank, Path(config.train.run_dir))
    backend = Backend.of(comm.device)
    with backend.allow_tf32() if config.train.tf32 and backend.asynchronous else nullcontext():
        observers = Observers()
        try:
            observers = _observers(config, comm, side)
            yield _build(config, plan, comm, side, observers, trained)
        except BaseException as error:
            # Told before anything waits for other ranks: wrong input must not look like a lost connection, after which
            # ranks are started again.
            if isinstance(error, ConfigError) and side.failed is not None:
                side.failed(error)
            progress.leave()
            comm.abort()
            observers.end("failed", {"error": str(error) or type(error).__name__})
            raise
        comm.close()


def _observers(config: Config, comm: Communicator, side: Surroundings) -> Observers:
    """Return the loggers and callbacks of the config on rank 0, and none on the others."""
    if comm.rank != 0:
        return Observers()
    folder, names = Path(config.train.run_dir), config.train.loggers
    loggers = [(f'train.loggers = ["{name}"]', make_logger(name, folder)) for name in names]
    return Observers([*loggers, *build_callbacks(config)], side.tell)


def _build(
    config: Config, plan: Plan, comm: Communicator, side: Surroundings, observers: Observers, trained: Path | None
) -> Run:
    """Build the model, the data and the trainer; without weights to start from they depend on the seed alone."""
    progress = side.progress
    with explain_out_of_memory(comm.device):
        cards = cards_of(comm)
    progress.phase("building the model")
    constructor, loss = build_model(config)
    initial = start_values(config, constructor, trained)
    module = initial.module
    progress.phase("opening the data")
    data = build_data(config)
    example = example_of(data.train)
    progress.phase("choosing kernels")
    rows = config.rows_together // (plan.microbatches * plan.mesh.axis_size(batch_axes(plan.mesh)))
    matmul = _choose_matmul(module, rows * (tokens_per_row(example) or 1), plan, comm)
    progress.phase("capturing the model")
    per_host = ranks_of_a_host(comm)
    with without_gc():
        compiled = Compiled(
            module, plan, example, loss, comm.device, initial=initial, batch_rows=config.rows_together,
            per_host=per_host, model=_slowest(cards), links=links_of(config), loss_weight=config.model.loss_weight,
            wanted=wanted_of(config), varies=config.data.varies or {},
        )  # fmt: skip
    check_loads(config, compiled)
    progress.phase("predicting the memory")
    forecast = _forecast(config, compiled, comm, cards)
    if unordered(config):
        progress.phase("measuring the units of the pipeline")
        settle(forecast, comm, data.train)
    progress.phase("starting the engine and its communicators")
    trainer = Trainer(
        forecast.compiled, build_optimizer(config), forecast.plan, example, clip_norm=config.train.clip_norm or None,
        clip_value=config.train.clip_value, seed=config.train.seed, loss_scale=build_loss_scale(config), comm=comm,
        progress=progress.instruction,
    )  # fmt: skip
    if comm.rank == 0:
        current(Path(config.train.run_dir), PLAN).write_text(forecast.plan.to_toml(), encoding="utf-8")
    use = utilisation(trainer, config.data.batch_size)
    return Run(config, trainer, data, matmul, side, forecast, utilisation=use, observers=observers)


def _slowest(cards: Sequence[Card]) -> DeviceModel | None:
    """Return the model of the slowest GPU of all ranks, by which all find the same plan; None if one is unknown."""
    found = [model_of(one.name) for one in cards]
    known = [model for model in found if model is not None]
    if len(known) < len(found) or not known:
        return None
    return min(known, key=lambda model: model.peak.flops("bf16") or model.peak.fp32 * 1e12)


def _forecast(config: Config, compiled: Compiled, comm: Communicator, cards: Sequence[Card]) -> Forecast:
    """Predict what the plan needs on the rank with the least memory; raise ConfigError on all ranks if it is more."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", comm.mesh.size))
    device, host = here(comm.device, local), here(torch.device("cpu"), local)
    kept = plan_to_keep(Path(config.train.run_dir)) if comm.rank == 0 else None
    way, nbytes = (0, 0) if kept is None else (EarlierChoice.of(kept).way + 1, kept.tensor.bytes)
    mine = torch.tensor([device.budget, device.memory, host.budget, way, nbytes], dtype=torch.float64)
    budgets, memories, hosts, ways, kept_bytes = host_gather(comm, mine, "the memory of all ranks").T.tolist()
    before = EarlierChoice(int(ways[0]) - 1, int(kept_bytes[0])) if ways[0] else None
    found = Forecast.of(config, compiled, scarcest(device, budgets, memories, cards), comm.shares_memory, before)
    per_host = compiled.per_host or comm.mesh.size
    found.compiled.general.notes += [TF32[Backend.of(comm.device).kind]] if config.train.tf32 else []
    found.compiled.general.notes += [note] if (note := across_hosts(found.plan.mesh, per_host)) is not None else []
    found.compiled.general.notes += [note] if (note := mixed(cards)) is not None else []
    check_free(comm, cards, found)
    found.check()
    found.check_host(int(min(hosts)))
    return found


def scarcest(device: Device, budgets: Sequence[float], memories: Sequence[float], cards: Sequence[Card]) -> Device:
    """Return the device of the rank with the least budget; ``budgets`` and ``memories`` are the bytes of each rank."""
    least = min(range(len(budgets)), key=budgets.__getitem__)
    name = cards[least].name if cards else device.name
    return replace(device, name=name, memory=int(memories[least]), budget=int(budgets[least]))


def _choose_matmul(module: nn.Module, rows: int, plan: Plan, comm: Communicator) -> MatmulChoice | None:
    """Use the fast float32 kernels if they are accurate for all ranks; return None where there is no choice."""
    if comm.device.type != "cpu" or plan.numeric.precision != "fp32":
        return None
    choice = choose_matmul(typical_shapes(module, rows))
    refused = torch.tensor([float(choice.precision == SAFE)])
    if bool(host_sum(comm, refused, "the choice of float32 kernels").any()):
        choice = MatmulChoice(SAFE, choice.fast_error, choice.safe_error)
    torch.set_float32_matmul_precision(choice.precision)
    return choice


def _start_log(rank: int, run_dir: Path) -> None:
    """Log into this rank's file, whoever started the rank."""
    path = log_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}: %(message)s", "%H:%M:%S"))
    for old in log.handlers:
        old.close()
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
