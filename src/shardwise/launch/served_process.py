"""``python -m shardwise.launch.served_process RUN_DIR W`` is worker W of a run with parameter servers apart."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import ShardwiseError
from shardwise.core.frames import Outcome
from shardwise.core.metrics import LOSS, PERPLEXITY
from shardwise.report.files import CONFIG, EVALUATIONS, METRICS, current

from .rank import rank_process, stop_on
from .server_process import ADDRESS, SECRET_FILE, SERVERS, compiled_of, run_name

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.progress import Progress

PATIENCE = 120.0  # seconds that servers may take to start, or to start again
REST = "buffers_{}.safetensors"
"""What forward writes, and no server has: a worker's buffers, as it has them when it ends."""


def work(run_dir: Path, number: int, progress: Progress) -> bool:
    """Train on one batch after the other until there are no tickets, and return True; False after a SIGTERM."""
    import torch

    from shardwise.config import build_data, build_optimizer, build_plan, load_config
    from shardwise.data.loader import Loader
    from shardwise.runtime.alone import AloneCommunicator
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.secret import read_secret
    from shardwise.runtime.served_worker import ServedWorker
    from shardwise.runtime.server_client import ServerClient
    from shardwise.units.served import ONE, served_ranges

    asked = stop_on([signal.SIGTERM], then=signal.getsignal(signal.SIGTERM))
    config = load_config(current(run_dir, CONFIG))
    torch.set_num_threads(config.train.threads)
    plan = build_plan(config)
    progress.phase("opening the data")
    data = build_data(config)
    progress.phase("building and capturing the model")
    compiled = compiled_of(config, data.train)
    choice = build_optimizer(config, compiled.module)
    ranges = served_ranges(compiled.buckets, plan, choice)
    progress.phase("looking for the servers")
    secret = read_secret(run_dir / SERVERS / SECRET_FILE)
    client = ServerClient(
        _addresses(run_dir, plan.serving.servers),
        ranges,
        secret,
        run_name(run_dir),
        number,
        patience=PATIENCE,
        log=print,
    )
    try:
        servers = ServedWorker(client, plan.serving, ranges)
        engine = Engine(
            compiled, AloneCommunicator(ONE, 0, torch.device("cpu")), choice,
            clip_norm=config.train.clip_norm or None, seed=config.train.seed, progress=progress.instruction,
            servers=servers,
        )  # fmt: skip
        compiled.release()
        with Loader(data.train, ONE, 0, config.rows_of_step, plan.microbatches, config.train.seed) as loader:
            _take_buffers(run_dir, number, engine)
            done = _train(run_dir, number, config, engine, client, loader, data.validation, progress, asked)
        _keep_buffers(run_dir, number, engine)
        return done
    finally:
        client.close()


def _train(
    run_dir: Path, number: int, config: Config, engine: Engine, client: Any, loader: Any, validation: Any,
    progress: Progress, asked: Any,
) -> bool:  # fmt: skip
    """Return whether there were no tickets left."""
    from .results import append_line, peak_memory, tokens_per_row

    servers, every = engine.interpreter.servers, config.validation.every
    assert servers is not None
    tokens = tokens_per_row(engine.compiled.example) or 1
    evaluated = 0
    while not asked():
        begun = time.perf_counter()
        progress.phase("waiting for a ticket")
        ticket = client.ticket()
        if ticket is None:
            return True
        progress.begin(ticket)
        batch = loader.batch_at(ticket)
        progress.batch(batch.rows)
        servers.begin(ticket)
        engine.step_index = ticket
        result = engine.step(batch.fields, batch.rows, ones=batch.ones).on_host()
        if result.skipped:
            raise ShardwiseError(f"step {ticket}: the gradient of worker {number} is not finite; nothing was pushed")
        seconds = time.perf_counter() - begun
        applied = servers.committed[0]
        if applied.outcome == Outcome.REFUSED:  # another worker has done the batch meanwhile
            continue
        append_line(run_dir / METRICS, {
            "step": ticket, "loss": result.loss, "grad_norm": result.grad_norm,
            "lr": engine.optimizer.learning_rate(applied.version - 1), "step_seconds": seconds,
            "tokens_per_second": batch.rows * tokens / seconds, "worker": number,
            "staleness": max(0, applied.version - 1 - servers.versions[0]), "time": time.time(),
            "peak_memory_bytes": peak_memory(engine.comm.device),
        }, print)  # fmt: skip
        if number == 0 and validation is not None and every and ticket // every > evaluated:
            evaluated = ticket // every
            _evaluate(run_dir, config, engine, servers, validation, ticket)
    return False


def _evaluate(run_dir: Path, config: Config, engine: Engine, servers: Any, validation: Any, ticket: int) -> None:
    """Evaluate the parameters that the servers have now, on this worker."""
    from shardwise.data.loader import one_pass
    from shardwise.train.evaluation import evaluate
    from shardwise.units.served import ONE

    from .results import append_line

    servers.fresh()  # not those of the worker's last pull
    batches = one_pass(validation, ONE, 0, config.data.batch_size, batches=config.validation.batches)
    found = evaluate(engine, batches)
    values: dict[str, Any] = {"step": ticket + 1, LOSS: found.loss, "rows": found.rows, "seconds": found.seconds}
    if config.data.is_text:
        values[PERPLEXITY] = math.exp(min(found.loss, 700.0))
    append_line(run_dir / EVALUATIONS, values, print)


def _addresses(run_dir: Path, servers: int) -> list[tuple[str, int]]:
    """Return the servers' addresses, once they have started."""
    deadline, found = time.monotonic() + PATIENCE, list[tuple[str, int]]()
    for number in range(servers):
        path = run_dir / SERVERS / str(number) / ADDRESS
        while not path.exists():
            if time.monotonic() > deadline:
                raise ShardwiseError(f"server {number} has not started within {PATIENCE:.0f} s")
            time.sleep(0.05)
        host, port = json.loads(path.read_text(encoding="utf-8"))
        found.append((host, port))
    return found


def _keep_buffers(run_dir: Path, number: int, engine: Engine) -> None:
    """Write this worker's buffers, with which it goes on, and which the run's weights may take."""
    from safetensors.torch import save_file

    path = run_dir / SERVERS / REST.format(number)
    save_file({name: value.contiguous().clone() for name, value in engine.memory.buffers.items()}, f"{path}.part")
    os.replace(f"{path}.part", path)


def _take_buffers(run_dir: Path, number: int, engine: Engine) -> None:
    """Go on with the buffers that this worker had when the run was stopped, if it was."""
    from safetensors.torch import load_file

    path = run_dir / SERVERS / REST.format(number)
    if path.exists():
        for name, value in load_file(path).items():
            engine.memory.buffers[name].copy_(value)


def main() -> None:
    """Work as the number that the command line names."""
    run_dir, number = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    with rank_process(run_dir) as progress:
        if not work(run_dir, number, progress):
            sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
