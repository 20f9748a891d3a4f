"""Timing several programs against each other on one machine: all are started at once, then take turns of a few steps.

Machines are shared and drift; only what is measured side by side compares.  A step counts as clean if processes that are not part of
the benchmark used less than 8 % of a core while it ran.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

FOREIGN_LIMIT = 0.08  # of a core

StepMaker = Callable[[int, int, int], Callable[[], Any]]
"""(rank, ranks, port) -> a function that runs one step."""


@dataclass
class Contender:
    """One program: ``ranks`` processes that run ``make(rank, ranks, port)`` and then its steps when it is their turn."""

    name: str
    make: StepMaker
    ranks: int = 2
    connected: bool = True  # whether the ranks wait for each other in a step
    environment: dict[str, str] = field(default_factory=dict)  # of its processes
    seconds: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds of the clean steps (of all, where none was clean)."""
        return statistics.median(self.clean or self.seconds)


def _busy() -> float:
    """Seconds that all cores together have been busy since boot."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _worker(make: StepMaker, rank: int, ranks: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    step = make(rank, ranks, port)
    pipe.send("ready")
    while (count := pipe.recv()) is not None:
        rows = []
        for _ in range(count):
            busy, own, start = _busy(), time.process_time(), time.perf_counter()
            step()
            rows.append((time.perf_counter() - start, time.process_time() - own, _busy() - busy))
        pipe.send(rows)


def alternate(contenders: Sequence[Contender], rounds: int, steps: int, warmup: int, first_port: int = 29600) -> None:
    """Run the contenders in turns, ``rounds`` times ``steps`` steps each, after ``warmup`` steps; fills in their seconds."""
    context = mp.get_context("spawn")
    pipes: list[list[Connection]] = []
    processes = []
    for at, one in enumerate(contenders):
        ends = []
        for rank in range(one.ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(one.make, rank, one.ranks, first_port + at, theirs), daemon=True)
            with _environment(one.environment):
                process.start()
            processes.append(process)
            ends.append(mine)
        for end in ends:
            assert end.recv() == "ready"
        pipes.append(ends)
    for turn in range(rounds + 1):
        for one, ends in zip(contenders, pipes, strict=True):
            count = steps if turn else warmup
            for end in ends:
                end.send(count)
            ranks = [end.recv() for end in ends]
            if turn:
                _record(one, ranks)
    for ends in pipes:
        for end in ends:
            end.send(None)
    for process in processes:
        process.join(timeout=20)
        if process.is_alive():
            process.terminate()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """For what is started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _record(one: Contender, ranks: list[list[tuple[float, float, float]]]) -> None:
    for each in zip(*ranks, strict=True):
        seconds = max(wall for wall, _, _ in each) if one.connected else statistics.mean(wall for wall, _, _ in each)
        foreign = max(busy for _, _, busy in each) - sum(own for _, own, _ in each)
        one.seconds.append(seconds)
        if foreign < FOREIGN_LIMIT * seconds + 0.02:  # /proc/stat counts in hundredths of a second
            one.clean.append(seconds)
