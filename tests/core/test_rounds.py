"""Every algorithm of every collective, played on names instead of numbers, for up to 13 ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.rounds import ALGORITHMS, COLLECTIVES, Rounds, blocks_of, priced, rounds_of, sent_blocks

SIZES = [1, 2, 3, 4, 5, 7, 8, 12, 13]
HOSTS = {4: (2, 4), 12: (2, 3, 4), 8: (2, 4), 1: (1,), 2: (1, 2), 3: (1, 3), 5: (5,), 7: (1,), 13: (13,)}
Value = Counter
"""What a block is the sum of: pairs of a rank and the block that it had at first."""


def cases() -> list[tuple[str, str, int, int]]:
    return [
        (collective, algorithm, n, host)
        for collective in COLLECTIVES
        for algorithm in ALGORITHMS
        for n in SIZES
        for host in (HOSTS[n] if algorithm == "hierarchical" else (0,))
    ]


def play(rounds: Rounds, n: int) -> list[list[Value]]:
    """Return each rank's blocks after the rounds."""
    state = [[Counter({(r, b): 1}) if b < n else Counter() for b in range(size)] for r, size in
             enumerate(blocks_of(rounds, n))]  # fmt: skip
    for each in rounds:
        before = [list(row) for row in state]
        written: dict[tuple[int, int], bool] = {}  # whether something was added there
        for m in each:
            assert len(m.at) == len(m.to)
            for a, b in zip(m.at, m.to, strict=True):
                assert m.adds and written.setdefault((m.target, b), True) or (m.target, b) not in written
                written[m.target, b] = m.adds
                state[m.target][b] = (state[m.target][b] if m.adds else Value()) + before[m.source][a]
    return state


def expected(collective: str, n: int) -> dict[tuple[int, int], Value]:
    """What a (rank, block) has to hold at the end."""
    ranks = range(n)
    total = [Counter({(r, b): 1 for r in ranks}) for b in ranks]
    return {
        "broadcast": {(r, b): Counter({(0, b): 1}) for r in ranks for b in ranks},
        "scatter": {(r, r): Counter({(0, r): 1}) for r in ranks},
        "gather": {(0, b): Counter({(b, b): 1}) for b in ranks},
        "reduce": {(0, b): total[b] for b in ranks},
        "all-reduce": {(r, b): total[b] for r in ranks for b in ranks},
        "all-gather": {(r, b): Counter({(b, b): 1}) for r in ranks for b in ranks},
        "reduce-scatter": {(r, r): total[r] for r in ranks},
        "all-to-all": {(r, n + s): Counter({(s, r): 1}) for r in ranks for s in ranks},
    }[collective]


@pytest.mark.parametrize(("collective", "algorithm", "n", "host"), cases())
def test_everyone_has_what_the_collective_says(collective: str, algorithm: str, n: int, host: int) -> None:
    found = play(rounds_of(collective, algorithm, n, host), n)
    for (rank, block), value in expected(collective, n).items():
        if n > 1 or block < len(found[rank]):
            assert found[rank][block] == value


@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_rings_send_the_least(n: int) -> None:
    """Each rank of a ring sends 2(n-1)/n of what is summed, the least that is possible (Thakur et al., section 4.5),
    while a server sends and receives (n-1) times as much."""
    ring, server = (rounds_of("all-reduce", name, n) for name in ("ring", "server"))
    assert [sent_blocks(ring, r) for r in range(n)] == [2 * (n - 1)] * n
    assert sent_blocks(server, 0) == n * (n - 1)
    assert priced(ring, 0.0, 1.0) == 2 * (n - 1)
    assert priced(server, 0.0, 1.0) == 2 * n * (n - 1)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_trees_have_the_fewest_rounds(n: int) -> None:
    bits = n.bit_length() - 1
    assert priced(rounds_of("broadcast", "tree", n), 1.0, 0.0) == bits
    assert priced(rounds_of("all-to-all", "tree", n), 1.0, 0.0) == bits
    assert priced(rounds_of("all-to-all", "ring", n), 1.0, 0.0) == n - 1


def test_hosts_exchange_a_part_only() -> None:
    """Of an all-reduce over 4 hosts of 2 ranks each rank sends what a ring of the 4 hosts sends of its half."""
    found = rounds_of("all-reduce", "hierarchical", 8, 2)
    between = sum(len(m.at) for each in found for m in each if m.source // 2 != m.target // 2)
    assert between == 8 * 2 * 3  # blocks: 8 ranks, each 2(4-1) of its 4 blocks in parts of 1


@pytest.mark.parametrize(
    ("collective", "algorithm", "n", "host", "words"),
    [
        ("sum", "ring", 2, 0, "legal: broadcast"),
        ("reduce", "star", 2, 0, "legal: ring"),
        ("reduce", "ring", 0, 0, "1 or more"),
        ("reduce", "hierarchical", 6, 4, "as many ranks on each host"),
        ("reduce", "hierarchical", 6, 0, "as many ranks on each host"),
    ],
)
def test_bad_input(collective: str, algorithm: str, n: int, host: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rounds_of(collective, algorithm, n, host)
