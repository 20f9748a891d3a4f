"""``python -m shardwise.launch.collectives FOLDER`` is one rank of ``shardwise bench collectives``."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.links import OWN, POINT_TO_POINT, Measured
from shardwise.core.rounds import ALGORITHMS, COLLECTIVES, blocks_of, rounds_of, sent_blocks

from .rank import rank_process

if TYPE_CHECKING:
    from torch import Tensor

    from shardwise.core.communicators import Members
    from shardwise.runtime.communicator import Communicator

ROWS, JOB, BACKEND = "rows.jsonl", "job.json", "backend"
LANE = "compute"
BLOCK = 16  # bytes that the size of a block is a multiple of
OWN_COLLECTIVES = ("broadcast", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", POINT_TO_POINT)
"""What backends have themselves."""
EVERY = (*COLLECTIVES, POINT_TO_POINT)


@dataclass(frozen=True)
class Job:
    """What is measured: ``sizes`` in bytes, ``host`` ranks on a host; runs of a case end after ``runs``, or after
    ``seconds`` and three runs."""

    ranks: int
    host: int
    sizes: tuple[int, ...]
    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]
    backend: str = "auto"
    runs: int = 20
    seconds: float = 0.3

    @staticmethod
    def of_json(text: str) -> Job:
        values: dict[str, Any] = json.loads(text)
        several: dict[str, Any] = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return Job(**(values | several))

    def cases(self) -> list[tuple[str, str, int]]:
        """Return each (collective, algorithm, bytes); the bytes are those of n equal blocks."""
        found = []
        for collective in self.collectives:
            for algorithm in self.algorithms_of(collective):
                found += [(collective, algorithm, self.rounded(size)) for size in self.sizes]
        return list(dict.fromkeys(found))

    def algorithms_of(self, collective: str) -> list[str]:
        hosts = 1 < self.host < self.ranks and self.ranks % self.host == 0
        every = [OWN] if collective in OWN_COLLECTIVES else []
        if collective in COLLECTIVES:
            every += [name for name in ALGORITHMS if name != "hierarchical" or hosts]
        return [name for name in every if name in self.algorithms]

    def rounded(self, size: int) -> int:
        step = BLOCK * self.ranks
        return max(1, round(size / step)) * step


def main() -> None:
    """Measure as the rank that torchrun's environment variables name; rank 0 writes down what was found."""
    folder = Path(sys.argv[1]).absolute()
    with rank_process(folder) as progress:
        import torch  # its warnings now go to the log

        job = Job.of_json((folder / JOB).read_text(encoding="utf-8"))
        torch.set_num_threads(1)
        comm = joined(job)
        if comm.rank == 0:
            (folder / BACKEND).write_text(backend_of(comm, job), encoding="utf-8")
        with (folder / ROWS).open("a", encoding="utf-8") as file:
            for row in measure(comm, job, progress.phase):
                if row is not None:
                    print(json.dumps(asdict(row)), file=file, flush=True)


def joined(job: Job) -> Communicator:
    from shardwise.core.mesh import Mesh
    from shardwise.runtime.connect import connect

    return connect(Mesh.of(ranks=job.ranks), backend=job.backend)


def backend_of(comm: Communicator, job: Job) -> str:
    """Return the name of what ranks communicate through, which "auto" has chosen."""
    from shardwise.backend import Backend
    from shardwise.runtime.connect import AUTO, SHARED

    if job.backend != AUTO:
        return job.backend
    return SHARED if comm.shares_memory else Backend.of(comm.device).transport or AUTO


def measure(
    comm: Communicator, job: Job, doing: Callable[[str], object] = lambda words: None
) -> Iterator[Measured | None]:
    """Measure each case, and yield it on rank 0 and None on the others; ``doing`` is told what comes next.  Close
    ``comm`` at the end.

    The first run of a case also checks what comes out; raise :class:`ShardwiseError` if it is wrong."""
    from shardwise.runtime.rounds import members

    try:
        every = [
            rounds_of(c, a, job.ranks, job.host) for c in job.collectives for a in job.algorithms_of(c) if a != OWN
        ]
        comm.prepare([*groups_of(comm), *members(every)])
        for collective, algorithm, nbytes in job.cases():
            doing(f"{collective} by {algorithm}, {nbytes} bytes")
            case = Case(comm, job, collective, algorithm, nbytes)
            found = case.run()
            yield found if comm.rank == 0 else None
    finally:
        comm.close()


def groups_of(comm: Communicator) -> list[Members]:
    """Return the communicators that backends' own collectives and point-to-point need."""
    from shardwise.core.communicators import Members, groups
    from shardwise.core.instruction import CHANNELS

    pairs = [Members(pair, CHANNELS[0], True) for pair in ((0, 1), (1, 0))] if comm.mesh.size > 1 else []
    return [*groups(comm.mesh, comm.mesh.names, LANE), *pairs]


class Case:
    """A collective of a size by an algorithm, on fresh numbers in every run."""

    def __init__(self, comm: Communicator, job: Job, collective: str, algorithm: str, nbytes: int) -> None:
        import torch

        self.comm, self.job, self.collective, self.algorithm, self.nbytes = comm, job, collective, algorithm, nbytes
        n = job.ranks
        self.rounds = () if algorithm == OWN else rounds_of(collective, algorithm, n, job.host)
        blocks = blocks_of(self.rounds, n)[comm.rank] if self.rounds else 2 * n
        self.x: Tensor = torch.zeros(blocks, nbytes // n // 4, device=comm.device)
        self.axes = comm.mesh.names

    def run(self) -> Measured:
        """Return the median seconds of the slowest rank."""
        import torch

        from shardwise.backend import Backend
        from shardwise.runtime.communicator import host_gather

        synchronize = functools.partial(Backend.of(self.comm.device).synchronize, self.comm.device)
        seconds: list[float] = []
        begun = time.monotonic()
        while True:
            self.fill()
            synchronize()
            self.comm.barrier("bench")
            start = time.perf_counter()
            self.exchange()
            synchronize()
            own = time.perf_counter() - start
            if not seconds:
                self.check()
            spent = host_gather(self.comm, torch.tensor([own, time.monotonic() - begun], dtype=torch.float64), "bench")
            seconds.append(float(spent[:, 0].max()))
            done = len(seconds) > self.job.runs or (len(seconds) > 3 and float(spent[0, 1]) > self.job.seconds)
            if done:  # the first run warms up
                share = 0.5 if self.collective == POINT_TO_POINT else 1.0  # there and back
                found = statistics.median(seconds[1:]) * share
                return Measured(self.collective, self.algorithm, self.job.ranks, self.nbytes, found, self.sent())

    def sent(self) -> int | None:
        """Return the bytes that the busiest rank sends, where the algorithm says."""
        if self.algorithm == OWN:
            return self.nbytes if self.collective == POINT_TO_POINT else None
        block = self.nbytes // self.job.ranks
        return block * max(sent_blocks(self.rounds, rank) for rank in range(self.job.ranks))

    def exchange(self) -> None:
        from shardwise.runtime.rounds import run

        if self.rounds:
            run(self.comm, self.rounds, self.x)
            return
        comm, n, rank = self.comm, self.job.ranks, self.comm.rank
        data, out = self.x[:n].view(-1), self.x[n:].view(-1)
        if self.collective == "all-reduce":
            comm.all_reduce(data, self.axes, LANE).wait()
        elif self.collective == "all-gather":
            comm.all_gather(data, self.x[rank], self.axes, LANE).wait()
        elif self.collective == "reduce-scatter":
            comm.reduce_scatter(self.x[rank], data, self.axes, LANE).wait()
        elif self.collective == "all-to-all":
            comm.all_to_all(out, data, self.axes, LANE).wait()
        elif self.collective == "broadcast":
            comm.broadcast(data, self.axes, 0, LANE).wait()
        elif rank < 2:  # a message and its answer
            way = (comm.send, comm.receive) if rank == 0 else (comm.receive, comm.send)
            for move in way:
                move(data, 1 - rank).wait()

    # ---- what comes out ----------------------------------------------------------------------------------------------

    def value(self, rank: int, block: int) -> float:
        """Return what a rank has in a block at the beginning: small integers, whose sums are exact."""
        return float(1 + (7 * rank + 3 * block) % 11)

    def fill(self) -> None:
        for block, row in enumerate(self.x[: self.job.ranks]):
            row.fill_(self.value(self.comm.rank, block))

    def check(self) -> None:
        from shardwise.core.errors import ShardwiseError

        for block, value in self.expected().items():
            row = self.x[block]
            if not bool((row == value).all()):
                wrong = f"block {block} of rank {self.comm.rank} begins with {row[:3].tolist()} instead of {value}"
                raise ShardwiseError(f"{self.collective} by {self.algorithm} of {self.nbytes} bytes: {wrong}")

    def expected(self) -> dict[int, float]:
        """Return what this rank has to have at the end, by block."""
        n, rank, at = self.job.ranks, self.comm.rank, self.value
        total = [sum(at(r, b) for r in range(n)) for b in range(n)]
        first = rank == 0
        return {
            "broadcast": {b: at(0, b) for b in range(n)},
            "scatter": {rank: at(0, rank)},
            "gather": {b: at(b, b) for b in range(n if first else 0)},
            "reduce": {b: total[b] for b in range(n if first else 0)},
            "all-reduce": {b: total[b] for b in range(n)},
            "all-gather": {b: at(b, b) for b in range(n)},
            "reduce-scatter": {rank: total[rank]},
            "all-to-all": {n + s: at(s, rank) for s in range(n)},
            POINT_TO_POINT: {b: at(0, b) for b in range(n if rank < 2 else 0)},
        }[self.collective]


if __name__ == "__main__":
    main()
