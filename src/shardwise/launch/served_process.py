"""``python -m shardwise.launch.served_process RUN_DIR W`` is worker W of a run with parameter servers apart."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import ShardwiseError
from shardwise.core.metrics import LOSS, PERPLEXITY
from shardwise.report.files import CONFIG, EVALUATIONS, METRICS, current

from .rank import rank_process, stop_on
from .server_process import ADDRESS, SECRET_FILE, SERVERS, compiled_of

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.progress import Progress

PATIENCE = 120.0  # seconds that servers may take to start, or to start again
REST = "rest.safetensors"
"""What no server has: buffers, and parameters that do not learn, as worker 0 has them at the end."""


def work(run_dir: Path, number: int, progress: Progress) -> None:
    """Train on one batch after the other until there are no tickets, or a SIGTERM comes."""
    import torch

    from shardwise.config import build_data, build_optimizer, build_plan, load_config
    from shardwise.data.loader import Loader
    from shardwise.runtime.alone import AloneCommunicator
    from shardwise.runtime.engine import Engine
    from shardwise.runtime.secret import read_secret
    from shardwise.runtime.served_store import ONE, served_ranges
    from shardwise.runtime.served_worker import ServedWorker
    from shardwise.runtime.server_client import ServerClient

    asked = stop_on([signal.SIGTERM], then=signal.getsignal(signal.SIGTERM))
    config = load_config(current(run_dir, CONFIG))
    torch.set_num_threads(config.train.threads)
    plan, choice = build_plan(config), build_optimizer(config)
    progress.phase("opening the data")
    data = build_data(config)
    progress.phase("building and capturing the model")
    compiled = compiled_of(config, data.train)
    ranges = served_ranges(compiled.buckets, plan, choice)
    progress.phase("looking for the servers")
    secret = read_secret(run_dir / SERVERS / SECRET_FILE)
    client = ServerClient(
        _addresses(run_dir, plan.serving.servers), ranges, secret, str(run_dir), number, patience=PATIENCE, log=print
    )
    try:
        servers = ServedWorker(client, plan.serving, ranges)
        engine = Engine(
            compiled, AloneCommunicator(ONE, 0, torch.device("cpu")), choice,
            clip_norm=config.train.clip_norm or None, seed=config.train.seed, progress=progress.instruction,
            servers=servers,
        )  # fmt: skip
        compiled.release()
        with Loader(data.train, ONE, 0, config.data.batch_size, plan.microbatches, config.train.seed) as loader:
            _train(run_dir, number, config, engine, client, loader, data.validation, progress, asked)
        if number == 0:
            _keep_rest(run_dir, engine)
    finally:
        client.close()


def _train(
    run_dir: Path, number: int, config: Config, engine: Engine, client: Any, loader: Any, validation: Any,
    progress: Progress, asked: Any,
) -> None:  # fmt: skip
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
            break
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
        append_line(run_dir / METRICS, {
            "step": ticket, "loss": result.loss, "grad_norm": result.grad_norm,
            "lr": engine.optimizer.learning_rate(applied.version - 1), "step_seconds": seconds,
            "tokens_per_second": batch.rows * tokens / seconds, "worker": number,
            "staleness": applied.version - 1 - servers.versions[0], "time": time.time(),
            "peak_memory_bytes": peak_memory(engine.comm.device),
        }, print)  # fmt: skip
        if number == 0 and validation is not None and every and ticket // every > evaluated:
            evaluated = ticket // every
            _evaluate(run_dir, config, engine, servers, validation, ticket)


def _evaluate(run_dir: Path, config: Config, engine: Engine, servers: Any, validation: Any, ticket: int) -> None:
    """Evaluate the parameters that the servers have now, on this worker."""
    from shardwise.data.loader import one_pass
    from shardwise.runtime.served_store import ONE
    from shardwise.train.evaluation import evaluate

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


def _keep_rest(run_dir: Path, engine: Engine) -> None:
    """Write what no server has."""
    from safetensors.torch import save_file

    memory = engine.memory
    frozen = {n: v for m in memory.buckets.values() if not m.learns for n, v in m.views(m.param).items()}
    every = {**engine.unused, **frozen, **memory.buffers}
    names: Sequence[str] = sorted(set(engine.whole.first_names.values()) & every.keys())
    save_file({name: every[name].detach().contiguous().clone() for name in names}, run_dir / SERVERS / REST)


def main() -> None:
    """Work as the number that the command line names."""
    run_dir, number = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    with rank_process(run_dir) as progress:
        work(run_dir, number, progress)


if __name__ == "__main__":
    main()
