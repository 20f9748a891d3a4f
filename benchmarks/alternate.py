"""Timing several programs against each other on one machine: all are started at once, then take turns of a few steps.

Machines are shared and drift; only what is measured side by side compares.  A step counts as clean if processes that
are not part of the benchmark used less than 8 % of a core while it ran.
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
LAST_LINES = 15  # of what a rank printed, shown if it fails

Step = Callable[[], Any]
"""Runs one step; what it returns, a number or a tensor of one element, is this rank's loss before the step.

One that measures something itself has a list ``measured``, with a dict of numbers for every step that it has run."""
StepMaker = Callable[[int, int], Step]
"""(rank, ranks) -> the step.  Ranks unpickle it: a function of a module beside this one, or a partial of such a
function.
"""


class ContenderFailed(RuntimeError):
    """A rank of ``contender`` raised an exception or ended; the message has the last lines that it printed."""

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
    environment: dict[str, str] = field(default_factory=dict)  # of its processes
    python: str = sys.executable  # that runs them
    seconds: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)
    losses: list[float] = field(
        default_factory=list
    )  # of every step, those of the warm-up first: the mean over the ranks
    memory: list[dict[str, float]] = field(default_factory=list)  # what each rank took, as :func:`_memory` says
    clean_at: list[int] = field(default_factory=list)  # the places in ``losses`` of the clean steps
    measured: list[list[dict[str, float]]] = field(
        default_factory=list
    )  # by rank, what it measured in each clean step (or in all)

    @property
    def median(self) -> float:
        """Median seconds of the clean steps (of all, where none was clean)."""
        return statistics.median(self.clean or self.seconds)

    def most(self, kind: str) -> float:
        """The memory of the rank that took most of this ``kind``."""
        return max(rank[kind] for rank in self.memory)


@dataclass
class _Rank:
    """A process of a contender, seen from here."""

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
    """Run the contenders in turns, ``rounds`` times ``steps`` steps each, after ``warmup`` steps; fills in what they
    measured.

    No round begins that would probably not be over by ``until``, a time of :func:`time.monotonic`; but the first is
    always run.
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
    """Show this in place of what was shown before, to whoever is looking."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _start(one: Contender, stack: ExitStack) -> list[_Rank]:
    """Start the ranks of a contender, which tell when they can make a step; the stack ends them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(one.ranks):
        variables = {
            "RANK": rank, "WORLD_SIZE": one.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": one.ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        environment = {**os.environ, **one.environment, **{name: str(value) for name, value in variables.items()}}
        mine, theirs = Pipe()
        log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the stack closes it)
        process = subprocess.Popen(
            [one.python, str(Path(__file__).resolve()), str(theirs.fileno())],
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
    """Those that were told to end have a while to do so; the others are waiting for what will not come."""
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
        if foreign < FOREIGN_LIMIT * seconds + 0.02:  # /proc/stat counts in hundredths of a second
            one.clean.append(seconds)
            one.clean_at.append(len(one.losses) - 1)


def _busy() -> float:
    """Seconds that all cores together have been busy since boot."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _memory() -> dict[str, float]:
    """Bytes of this process.

    ``peak_rss``: the most that was resident, pages shared with other processes in full (not ``ru_maxrss``, which begins
    with what the parent had).  ``pss``: resident now, a page that n processes share as 1/n.  ``data``: of that, what no
    file backs, so that the libraries' code does not count, of which the share depends on how many other contenders run.
    ``cuda_peak``: the most that tensors took of the GPU.
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
    """Wall seconds, processor seconds of this process and of all, and the loss, of each of ``count`` steps."""
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
    """One rank: makes its step, then does what it is asked until that is nothing."""
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
