"""Time several programs against each other on one machine: all are started at once, then take turns of a few steps.

Machines are shared and their speed drifts, so only times measured side by side compare.  A step is clean if processes
that are not part of the benchmark used less than 8 % of a core while it ran.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

FOREIGN_LIMIT = 0.08  # of a core
LAST_LINES = 15  # the last lines of a rank's output that are shown if it fails

Step = Callable[[], Any]
"""Run one step and return this rank's loss before it, a number or a tensor of one element.

A step that measures something itself has a list ``measured``, with a dict of numbers for every step that it has run."""
StepMaker = Callable[[int, int], Step]
"""Make the step of a (rank, ranks).  Ranks unpickle the maker, so it is a function of a module beside this one, or a
partial of one.
"""


class ContenderFailed(RuntimeError):
    """The error of a rank of ``contender`` that raised or ended; the message has the last lines that it printed."""

    def __init__(self, contender: str, message: str) -> None:
        self.contender = contender
        super().__init__(message)


@dataclass
class Contender:
    """One program: ``ranks`` processes that make a step and run it when it is their turn."""

    name: str
    make: StepMaker
    ranks: int = 2
    connected: bool = True  # whether the ranks wait for each other in a step
    environment: dict[str, str] = field(default_factory=dict)  # variables of its processes
    python: str = sys.executable  # the Python that runs them
    namespaces: Sequence[str] = ()  # the network namespace of each rank, where they have some
    seconds: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)
    losses: list[float] = field(
        default_factory=list
    )  # the mean over the ranks for every step, those of the warm-up first
    memory: list[dict[str, float]] = field(default_factory=list)  # the bytes of each rank, from :func:`_memory`
    clean_at: list[int] = field(default_factory=list)  # the places in ``losses`` of the clean steps
    measured: list[list[dict[str, float]]] = field(
        default_factory=list
    )  # by rank, what its step measured in each clean step (or in all, where none was clean)

    @property
    def median(self) -> float:
        """The median seconds of the clean steps (of all, where none was clean)."""
        return statistics.median(self.clean or self.seconds)

    def most(self, kind: str) -> float:
        """Return the bytes of the rank that took most of this ``kind`` of memory."""
        return max(rank[kind] for rank in self.memory)


@dataclass
class _Rank:
    """A process of a contender, as the process that times it sees it."""

    contender: str
    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: IO[bytes]

    def receive(self) -> Any:
        try:
            problem, value = self.pipe.recv()
        except EOFError:
            problem, value = f"ended with exit code {self.process.wait()}", None
        if problem is None:
            return value
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        name = f"{self.contender}, rank {self.rank}"
        raise ContenderFailed(self.contender, "\n".join([f"{name}: {problem}", *lines[-LAST_LINES:]]))


def alternate(contenders: Sequence[Contender], rounds: int, steps: int, warmup: int, until: float = math.inf) -> None:
    """Run the contenders in turns, ``rounds`` times ``steps`` steps each, after ``warmup`` steps, and fill in what they
    measured.

    A round does not begin if it would probably not be over by ``until``, a time of :func:`time.monotonic`; the first
    round always runs.  Raises :class:`ContenderFailed`.
    """
    begun = 0.0
    with ExitStack() as stack:
        started = [(one, _start(one, stack)) for one in contenders]
        for _, ranks in started:
            for rank in ranks:
                rank.receive()
        for turn in range(rounds + 1):
            before, begun = begun, time.monotonic()
            if turn > 1 and begun + (begun - before) > until:
                break
            _progress(f"round {turn} of {rounds}" if turn else "warming up")
            for one, ranks in started:
                _record(one, _ask(ranks, steps if turn else warmup), timed=turn > 0)
        _progress("")
        for one, ranks in started:
            one.memory = _ask(ranks, "memory")
            chosen = one.clean_at or range(len(one.losses) - len(one.seconds), len(one.losses))
            one.measured = [[steps[at] for at in chosen] for steps in _ask(ranks, "measured") if steps]
        for _, ranks in started:
            for rank in ranks:
                rank.pipe.send(None)


def _progress(text: str) -> None:
    """Show this text in place of the one shown before, if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _start(one: Contender, stack: ExitStack) -> list[_Rank]:
    """Start the ranks of a contender, which report when they are ready to step; the stack ends them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(one.ranks):
        variables = {
            "RANK": rank, "WORLD_SIZE": one.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": one.ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}, **one.environment}
        there = ["ip", "netns", "exec", one.namespaces[rank]] if one.namespaces else []
        mine, theirs = Pipe()
        log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the stack closes it)
        process = subprocess.Popen(
            [*there, one.python, str(Path(__file__).resolve()), str(theirs.fileno())],
            env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        theirs.close()  # so that the end of the process is seen
        stack.callback(_end, process)
        mine.send((pickle.dumps(one.make), rank, one.ranks))
        ranks.append(_Rank(one.name, rank, process, mine, log))
    return ranks


def _ask(ranks: Sequence[_Rank], what: Any) -> list[Any]:
    for rank in ranks:
        rank.pipe.send(what)
    return [rank.receive() for rank in ranks]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process.  One that was told to end gets time; after a failure it may wait for others and is killed soon."""
    failed = sys.exc_info()[0] is not None
    try:
        process.wait(timeout=0.1 if failed else 20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _record(one: Contender, ranks: list[list[tuple[float, float, float, float]]], timed: bool) -> None:
    for each in zip(*ranks, strict=True):
        one.losses.append(statistics.mean(loss for *_, loss in each))
        if not timed:
            continue
        seconds = max(wall for wall, *_ in each) if one.connected else statistics.mean(wall for wall, *_ in each)
        foreign = max(busy for _, _, busy, _ in each) - sum(own for _, own, _, _ in each)
        one.seconds.append(seconds)
        if foreign < FOREIGN_LIMIT * seconds + 0.02:  # 0.02, since /proc/stat counts in hundredths of a second
            one.clean.append(seconds)
            one.clean_at.append(len(one.losses) - 1)


def _busy() -> float:
    """Return the seconds that all cores together have been busy since boot."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _memory() -> dict[str, float]:
    """Return the bytes of this process, by kind.

    ``peak_rss`` is the most that was resident, with shared pages in full (not ``ru_maxrss``, which begins with what the
    parent had).  ``pss`` is resident now, where a page that n processes share counts as 1/n.  ``data`` is the part of
    it that no file backs: the libraries' code does not count, whose share depends on the number of other contenders.
    ``cuda_peak`` is the most that tensors took of the GPU.
    """
    lines = [
        *Path("/proc/self/status").read_text().splitlines(),
        *Path("/proc/self/smaps_rollup").read_text().splitlines()[1:],
    ]
    found = {
        name: int(rest.split()[0]) * 1024.0 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    taken = {"peak_rss": found["VmHWM"], "pss": found["Pss"], "data": found["Pss_Anon"] + found["Pss_Shmem"]}
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized():
        taken["cuda_peak"] = float(torch.cuda.max_memory_allocated())
    return taken


def _steps(step: Step, count: int) -> list[tuple[float, float, float, float]]:
    """Run ``count`` steps; return wall seconds, CPU seconds of this process and of all, and the loss of each."""
    rows = []
    for _ in range(count):
        busy, own, start = _busy(), time.process_time(), time.perf_counter()
        loss = float(step())
        rows.append((time.perf_counter() - start, time.process_time() - own, _busy() - busy, loss))
    return rows


def _answer(step: Step, asked: Any) -> Any:
    if asked == "memory":
        return _memory()
    if asked == "measured":
        return getattr(step, "measured", [])
    return _steps(step, asked)


def _worker(pipe: Connection) -> None:
    """Run one rank: make its step, then answer what the pipe asks until it sends None."""
    make, rank, ranks = pipe.recv()
    try:
        import torch

        torch.set_num_threads(1)
        step = pickle.loads(make)(rank, ranks)
        pipe.send((None, "ready"))
        while (asked := pipe.recv()) is not None:
            pipe.send((None, _answer(step, asked)))
    except Exception as error:
        traceback.print_exc()
        pipe.send((type(error).__name__, None))


if __name__ == "__main__":
    _worker(Connection(int(sys.argv[1])))
