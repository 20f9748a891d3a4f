"""Every algorithm of every collective moves and sums numbers, on ranks that are threads."""

from __future__ import annotations

import pytest

from shardwise.core.links import OWN
from shardwise.core.mesh import Mesh
from shardwise.core.rounds import ALGORITHMS, rounds_of
from shardwise.launch.collectives import EVERY, Case, Job, groups_of
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.rounds import members
from shardwise.runtime.threads import run_ranks


@pytest.mark.parametrize(("ranks", "host"), [(2, 2), (3, 3), (4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("collective", EVERY)
def test_numbers(collective: str, ranks: int, host: int) -> None:
    """Sends that wait for their receives and communicators that block before they are prepared find no hang."""
    job = Job(ranks, host, (1, 640), (collective,), (OWN, *ALGORITHMS), runs=1)
    every = [rounds_of(collective, name, ranks, host) for name in job.algorithms_of(collective) if name != OWN]
    assert len(every) == (3 + (1 < host < ranks) if collective != "point-to-point" else 0)

    def work(comm: Communicator) -> list[int | None]:
        comm.prepare([*groups_of(comm), *members(every)])
        return [Case(comm, job, *case).run().sent for case in job.cases()]

    found = run_ranks(Mesh.of(ranks=ranks), work, timeout=20.0, sends_wait=True, first_use_blocks=True)
    assert len(set(map(tuple, found))) == 1


def test_wrong_numbers_are_found() -> None:
    job = Job(2, 2, (64,), ("all-reduce",), ("ring",))

    def work(comm: Communicator) -> None:
        comm.prepare(members([rounds_of("all-reduce", "ring", 2)]))
        case = Case(comm, job, "all-reduce", "ring", 64)
        case.rounds = case.rounds[:1]
        case.run()

    with pytest.raises(Exception, match=r"all-reduce by ring of 64 bytes: block \d of rank \d begins with"):
        run_ranks(Mesh.of(ranks=2), work, timeout=20.0)
