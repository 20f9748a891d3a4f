"""Verify workers and parameter servers that do not wait for each other: they run as threads over sockets, and what the
servers have recorded is replayed on one device."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.core.clocks import Clocks
from shardwise.core.flat import FlatShard
from shardwise.core.frames import Shares
from shardwise.core.ledger import Ledger
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.core.tickets import Tickets
from shardwise.lower.compiled import Compiled
from shardwise.runtime.alone import AloneCommunicator
from shardwise.runtime.compression import Feedback, decode
from shardwise.runtime.engine import Engine
from shardwise.runtime.secret import SECRET
from shardwise.runtime.served_store import ServedStore, masters_of
from shardwise.runtime.served_worker import ServedWorker
from shardwise.runtime.server import Server
from shardwise.runtime.server_client import ServerClient
from shardwise.units.served import ONE, served_ranges
from shardwise.units.share import entry_ranges
from shardwise.verify.compare import Comparison
from shardwise.verify.oracle import Oracle
from shardwise.verify.replay import Received, Slice, bound_holds, replay

RUN = "verify"
LIMIT = 120.0
"""The seconds that a worker may wait for a server."""


@dataclass
class Served:
    """What workers and servers have left: a record and a store of each server, and the loss and gradient norm of each
    ticket, as its worker saw them."""

    records: list[list[str]]
    stores: list[ServedStore]
    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)


def slices_of(compiled: Compiled, choice: OptimizerChoice) -> list[list[Slice]]:
    """Return which elements of which parameters each server has."""
    found: list[list[Slice]] = []
    buckets = {b.index: b for b in compiled.buckets}
    for ranges in served_ranges(compiled.buckets, compiled.plan, choice):
        own: list[Slice] = []
        for index, held in ranges.items():
            layout = buckets[index].layout(choice, ONE, 0)
            where = FlatShard(held.start, held.stop)
            own += [
                Slice(e.name, a - e.offset, b - e.offset, index, a - where.start, where.numel)
                for e, a, b in entry_ranges(layout, where.start, where.stop)
            ]
        found.append(own)
    return found


def receiving(compiled: Compiled, choice: OptimizerChoice) -> list[Received]:
    """Return, for each server, what it receives of a worker's gradients if they are compressed; [] if they are not."""
    plan = compiled.plan
    if plan.serving.push == "whole":
        return []
    ranges = served_ranges(compiled.buckets, plan, choice)
    return [_compressing(plan, server, ranges[server]) for server in range(plan.serving.servers)]


def _compressing(plan: Plan, server: int, ranges: Shares) -> Received:
    workers: dict[int, Feedback] = {}

    def received(worker: int, bucket: int, gradient: Tensor) -> Tensor:
        if ranges[bucket].row:  # rows of tables come as they are
            return gradient
        feedback = workers.setdefault(worker, Feedback(plan.serving.push, plan.serving.push_share))
        found = torch.empty_like(gradient)
        for offset, count in ranges[bucket].cuts(gradient.itemsize):
            part = gradient[offset : offset + count]
            encoding, payload = feedback.encoded((server, bucket, offset), part)
            found[offset : offset + count] = decode(payload.numpy().data, encoding, count, gradient.dtype)
        return found

    return received


def run_served(
    compiled: Compiled, batches: Sequence[Mapping[str, Tensor]], choice: OptimizerChoice, *,
    clip_norm: float | None = None, seed: int = 0, speeds: Callable[[int], float] | None = None
) -> Served:  # fmt: skip
    """Train the workers of a plan on ``batches``, each of which is one ticket, and return what the servers have.

    ``speeds`` gives the seconds that a worker sleeps before each batch; by default they are random.
    """
    plan, secret = compiled.plan, secrets.token_bytes(SECRET)
    options = plan.serving
    ranges = served_ranges(compiled.buckets, plan, choice)
    stores = [ServedStore(compiled.buckets, plan, choice, k) for k in range(options.servers)]
    found = Served([[] for _ in stores], stores)
    rng = random.Random(seed)
    delays = {worker: speeds(worker) if speeds else rng.uniform(0.0, 0.01) for worker in range(options.workers)}
    with ExitStack() as stack:
        servers = []
        for k, store in enumerate(stores):
            store.load(compiled.values)
            tickets = Tickets(len(batches), True) if k == 0 else None
            ledger = Ledger(Clocks(options.bound), tickets, found.records[k].append, server=k, start=1 + k)
            server = Server(store, ranges[k], ledger, secret, RUN)
            thread = threading.Thread(target=server.run, name=f"server {k}", daemon=True)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(server.close)
            servers.append(server)
        addresses = [server.address for server in servers]
        lock = threading.Lock()

        def work(worker: int) -> None:
            client = ServerClient(addresses, ranges, secret, RUN, worker)
            try:
                served = ServedWorker(client, options, ranges)
                comm = AloneCommunicator(ONE, 0, torch.device("cpu"))
                engine = Engine(compiled, comm, choice, clip_norm=clip_norm, seed=seed, strict=True, servers=served)
                while (ticket := client.ticket()) is not None:
                    time.sleep(delays[worker])
                    served.begin(ticket)
                    engine.step_index = ticket
                    rows = len(next(iter(batches[ticket].values())))
                    result = engine.step(dict(batches[ticket]), rows)
                    with lock:
                        found.losses[ticket], found.norms[ticket] = float(result.loss), float(result.grad_norm)
            finally:
                client.close()

        with ThreadPoolExecutor(options.workers) as pool:
            for future in [pool.submit(work, worker) for worker in range(options.workers)]:
                future.result(LIMIT)
    return found


@dataclass
class Verdict:
    """What a replay has found; ``holds`` says whether every batch was pushed once, and the bound was kept."""

    comparison: Comparison
    holds: bool
    notes: list[str]


def compare_served(
    compiled: Compiled, oracle: Oracle, batches: Sequence[Mapping[str, Tensor]], choice: OptimizerChoice, *,
    clip_norm: float | None, seed: int
) -> Verdict:  # fmt: skip
    """Run the workers and servers of a plan on ``batches``, and compare them with a replay on one device: the loss, the
    gradient norm and the clipping of each push, and the parameters at the end."""
    plan = compiled.plan
    served = run_served(compiled, batches, choice, clip_norm=clip_norm, seed=seed)
    found = replay(
        oracle, lambda ticket: batches[ticket], served.records, slices_of(compiled, choice), choice,
        plan.serving.rate == "staleness", receiving(compiled, choice),
    )  # fmt: skip
    comparison = Comparison()
    for key, value in found.losses.items():
        ticket, norm = key[1], found.norms[key]
        comparison.add_number(ticket, "loss", served.losses[ticket], value)
        comparison.add_number(ticket, "grad_norm", served.norms[ticket], norm)
        clip = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        comparison.add_number(ticket, "clipping", found.weights[key], clip)
    masters = masters_of(served.stores)
    comparison.add(len(batches) - 1, "parameter", masters, {name: found.parameters[name] for name in masters})
    bound = plan.serving.bound
    kept = bound is None or all(bound_holds(record, bound) for record in served.records)
    every = ", ".join(f"{stale}: {times}" for stale, times in sorted(found.staleness.items()))
    notes = [
        f"{plan.serving.workers} workers and {plan.serving.servers} servers ran, and what the servers recorded was "
        f"replayed on one device; updates between a pull and its push, and how often: {every}"
    ]
    notes += [] if kept else [f"a worker was more than staleness = {bound} pushes ahead of another"]
    return Verdict(comparison, kept and len(found.losses) == len(batches), notes)
