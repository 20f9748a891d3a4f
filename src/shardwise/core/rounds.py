"""Algorithms of collectives as data: rounds of messages between n ranks, each of which has a buffer of blocks.

A rank takes part in a round when it has received what the round before has brought it.  All that it sends in a round is
what was there before the round.  So the same rounds are run (``runtime/rounds.py``), counted and priced.

The data of a collective are n equal blocks.  Block b is rank b's part where parts are scattered or gathered; in an
all-to-all block b of a rank is what it has for rank b, and block n + b is what it gets from rank b.  Higher numbers are
room that an algorithm needs on the way.  Broadcast, reduce, scatter and gather have rank 0 as their root.

Sources: rings and the costs of all of them: Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH" (2005), sections 4 and 5; all-to-all in log2 n rounds: Bruck et al. (1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from types import MappingProxyType

from shardwise.core.errors import ConfigError

Blocks = Sequence[int]


@dataclass(frozen=True, slots=True)
class Message:
    """A message takes blocks ``at`` of rank ``source`` to the blocks ``to`` of ``target``, or ``adds`` them there.

    With the same source and target it is a copy, which costs nothing."""

    source: int
    target: int
    at: tuple[int, ...]
    to: tuple[int, ...]
    adds: bool = False


Round = tuple[Message, ...]
Rounds = tuple[Round, ...]


def _sent(source: int, target: int, blocks: Iterable[int], adds: bool = False) -> Message:
    """Return a message of blocks that have the same numbers on both ranks."""
    blocks = tuple(blocks)
    return Message(source, target, blocks, blocks, adds)


def _rounds(rounds: Iterable[Iterable[Message]]) -> Rounds:
    """Return the rounds without messages of nothing, and without rounds that have no message."""
    found = (tuple(one for one in each if one.at) for each in rounds)
    return tuple(one for one in found if one)


def _together(each: Iterable[Rounds]) -> Rounds:
    """Return the rounds of algorithms that run at the same time, on different ranks or blocks."""
    return tuple(tuple(one for part in parts for one in part) for parts in zip_longest(*each, fillvalue=()))


def _back(rounds: Rounds, adds: bool) -> Rounds:
    """Return the rounds in which everything goes the other way: of a broadcast a reduction, of a scatter a gather."""
    return tuple(tuple(Message(m.target, m.source, m.to, m.at, adds) for m in each) for each in reversed(rounds))


# ---- rings: among ``ranks``, each of which has one of the ``parts``, some blocks -------------------------------------


def _ring_gathering(ranks: Sequence[int], parts: Sequence[Blocks]) -> Rounds:
    n = len(ranks)
    return _rounds((_sent(ranks[i], ranks[(i + 1) % n], parts[(i - t) % n]) for i in range(n)) for t in range(n - 1))


def _ring_scattering(ranks: Sequence[int], parts: Sequence[Blocks]) -> Rounds:
    n = len(ranks)
    return _rounds(
        (_sent(ranks[i], ranks[(i + 1) % n], parts[(i - t - 1) % n], adds=True) for i in range(n)) for t in range(n - 1)
    )


def _ring_summing(ranks: Sequence[int], parts: Sequence[Blocks]) -> Rounds:
    return (*_ring_scattering(ranks, parts), *_ring_gathering(ranks, parts))


def _ring_broadcast(n: int) -> Rounds:
    """Block after block goes from rank to rank."""
    return _rounds((_sent(i, i + 1, [t - i]) for i in range(n - 1) if 0 <= t - i < n) for t in range(2 * n - 2))


def _ring_scatter(n: int) -> Rounds:
    """The root sends the block that goes furthest first."""
    return _rounds(
        (_sent(i, i + 1, [n - 1 - (t - i)]) for i in range(n - 1) if i < n - 1 - (t - i) < n) for t in range(2 * n - 2)
    )


def _ring_exchange(n: int) -> Rounds:
    """In round t each rank sends to the one that is t places further."""
    own = _rounds([(Message(i, i, (i,), (n + i,)) for i in range(n))])
    return (
        *own,
        *_rounds((Message(i, (i + t) % n, ((i + t) % n,), (n + i,)) for i in range(n)) for t in range(1, n)),
    )


# ---- trees: binomial, so each round doubles the number of ranks that have something ----------------------------------


def _tree_broadcast(ranks: Sequence[int], blocks: Blocks) -> Rounds:
    n, found, have = len(ranks), [], 1
    while have < n:
        found.append([_sent(ranks[i], ranks[i + have], blocks) for i in range(min(have, n - have))])
        have *= 2
    return _rounds(found)


def _tree_scatter(ranks: Sequence[int], parts: Sequence[Blocks]) -> Rounds:
    n, found, step = len(ranks), [], 1
    while step < n:
        step *= 2
    while step > 1:
        half = step // 2
        found.append([
            _sent(ranks[i], ranks[i + half], (b for part in parts[i + half : i + step] for b in part))
            for i in range(0, n - half, step)
        ])  # fmt: skip
        step = half
    return _rounds(found)


def _tree_exchange(n: int) -> Rounds:
    """The data for the rank d places further lie in place d of the room; for each bit of d, all that have it move on by
    that many ranks, and the rest of the way is what the higher bits say."""
    room = 2 * n
    found: list[list[Message]] = [[
        Message(i, i, tuple((i + d) % n for d in range(n)), tuple(room + d for d in range(n))) for i in range(n)
    ]]  # fmt: skip
    bit = 1
    while bit < n:
        moving = tuple(room + d for d in range(n) if d & bit)
        found.append([Message(i, (i + bit) % n, moving, moving) for i in range(n)])
        bit *= 2
    found.append([
        Message(i, i, tuple(room + d for d in range(n)), tuple(n + (i - d) % n for d in range(n))) for i in range(n)
    ])  # fmt: skip
    return _rounds(found)


# ---- a server: rank 0 gets everything and sends everything -----------------------------------------------------------


def _server_sends(n: int, parts: Sequence[Blocks]) -> Rounds:
    return _rounds([(_sent(0, i, parts[i]) for i in range(1, n))])


def _server_exchange(n: int) -> Rounds:
    """The server has room for the data of all pairs."""
    room = 2 * n

    def place(source: int, target: int) -> int:
        return room + source * n + target

    others = [tuple(j for j in range(n) if j != i) for i in range(n)]
    own = [Message(i, i, (i,), (n + i,)) for i in range(n)]
    up = [Message(i, 0, others[i], tuple(place(i, j) for j in others[i])) for i in range(n)]
    down = [
        Message(0, j, tuple(place(i, j) for i in others[j]), tuple(n + i for i in others[j])) for j in range(n)
    ]  # fmt: skip
    return _rounds([own, up, down])


# ---- hosts: first or last among the ranks of a host, and between hosts only what has to ------------------------------


@dataclass(frozen=True)
class _Hosts:
    """n ranks on hosts of ``size`` ranks each: rank h · size + l is the l-th of host h."""

    n: int
    size: int

    @property
    def count(self) -> int:
        return self.n // self.size

    def ranks(self, host: int) -> list[int]:
        return [host * self.size + place for place in range(self.size)]

    def across(self, place: int) -> list[int]:
        """Return the ranks that have this place on their hosts."""
        return [host * self.size + place for host in range(self.count)]

    def within(self, made: Callable[[Sequence[int], Sequence[Blocks]], Rounds], blocks: str) -> Rounds:
        """Return an algorithm on each host at the same time; its parts are the blocks ``of a place``, or the ``own``
        ones of ranks."""
        parts = [self.across(place) for place in range(self.size)]
        return _together(
            made(self.ranks(h), parts if blocks == "of a place" else [(b,) for b in self.ranks(h)])
            for h in range(self.count)
        )

    def between(self, made: Callable[[Sequence[int], Sequence[Blocks]], Rounds]) -> Rounds:
        """Return an algorithm among the ranks of each place at the same time; its parts are their own blocks."""
        return _together(made(ranks, [(b,) for b in ranks]) for ranks in map(self.across, range(self.size)))

    # Each of these is for all ranks.

    def sums(self) -> Rounds:
        return (
            *self.within(_ring_scattering, "of a place"),
            *self.between(_ring_summing),
            *self.within(_ring_gathering, "of a place"),
        )

    def scatters_sums(self) -> Rounds:
        return (*self.within(_ring_scattering, "of a place"), *self.between(_ring_scattering))

    def gathers(self) -> Rounds:
        return (*self.between(_ring_gathering), *self.within(_ring_gathering, "of a place"))

    def broadcasts(self) -> Rounds:
        every = range(self.n)
        return (
            *_tree_broadcast(self.across(0), every),
            *_together(_tree_broadcast(self.ranks(h), every) for h in range(self.count)),
        )

    def scatters(self) -> Rounds:
        return (
            *_tree_scatter(self.across(0), [self.ranks(h) for h in range(self.count)]),
            *self.within(_tree_scatter, "own"),
        )

    def exchanges(self) -> Rounds:
        """On each host the rank of place l collects what goes to place l of any host, and sends it there."""
        n, room = self.n, 2 * self.n
        first, second = [], []
        for h in range(self.count):
            for source in range(self.size):
                for place in range(self.size):
                    to = tuple(room + source * self.count + other for other in range(self.count))
                    first.append(Message(self.ranks(h)[source], self.ranks(h)[place], tuple(self.across(place)), to))
        for place in range(self.size):
            for h in range(self.count):
                for other in range(self.count):
                    at = tuple(room + source * self.count + other for source in range(self.size))
                    to = tuple(n + rank for rank in self.ranks(h))
                    second.append(Message(self.across(place)[h], self.across(place)[other], at, to))
        return _rounds([first, second])


# ---- the table -------------------------------------------------------------------------------------------------------


def _ring(n: int, _: int) -> Mapping[str, Rounds]:
    every, own = range(n), [(b,) for b in range(n)]
    return {
        "broadcast": _ring_broadcast(n), "reduce": _back(_ring_broadcast(n), adds=True),
        "scatter": _ring_scatter(n), "gather": _back(_ring_scatter(n), adds=False),
        "all-reduce": _ring_summing(every, own), "all-gather": _ring_gathering(every, own),
        "reduce-scatter": _ring_scattering(every, own), "all-to-all": _ring_exchange(n),
    }  # fmt: skip


def _in_two(broadcast: Rounds, scatter: Rounds, exchange: Rounds) -> Mapping[str, Rounds]:
    """Return all collectives, by way of rank 0, from what it sends."""
    reduce, gather = _back(broadcast, adds=True), _back(scatter, adds=False)
    return {
        "broadcast": broadcast, "reduce": reduce, "scatter": scatter, "gather": gather,
        "all-reduce": (*reduce, *broadcast), "all-gather": (*gather, *broadcast),
        "reduce-scatter": (*reduce, *scatter), "all-to-all": exchange,
    }  # fmt: skip


def _tree(n: int, _: int) -> Mapping[str, Rounds]:
    own = [(b,) for b in range(n)]
    return _in_two(_tree_broadcast(range(n), range(n)), _tree_scatter(range(n), own), _tree_exchange(n))


def _server(n: int, _: int) -> Mapping[str, Rounds]:
    every = [range(n)] * n
    return _in_two(_server_sends(n, every), _server_sends(n, [(b,) for b in range(n)]), _server_exchange(n))


def _hierarchical(n: int, size: int) -> Mapping[str, Rounds]:
    hosts = _Hosts(n, size)
    return {
        "broadcast": hosts.broadcasts(), "reduce": _back(hosts.broadcasts(), adds=True),
        "scatter": hosts.scatters(), "gather": _back(hosts.scatters(), adds=False),
        "all-reduce": hosts.sums(), "all-gather": hosts.gathers(), "reduce-scatter": hosts.scatters_sums(),
        "all-to-all": hosts.exchanges(),
    }  # fmt: skip


_TABLE: Mapping[str, Callable[[int, int], Mapping[str, Rounds]]] = MappingProxyType(
    {"ring": _ring, "tree": _tree, "hierarchical": _hierarchical, "server": _server}
)
ALGORITHMS = tuple(_TABLE)
COLLECTIVES = (
    "broadcast", "scatter", "gather", "reduce", "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
)  # fmt: skip


@cache  # all sizes of a collective have the same
def rounds_of(collective: str, algorithm: str, ranks: int, host: int = 0) -> Rounds:
    """Return the rounds of a collective of ``ranks`` ranks; a hierarchical one has hosts of ``host`` ranks each.

    Raises :class:`ConfigError` for names that are not in :data:`COLLECTIVES` and :data:`ALGORITHMS`, and for hosts that
    do not divide the ranks.
    """
    for what, given, legal in (("collective", collective, COLLECTIVES), ("algorithm", algorithm, ALGORITHMS)):
        if given not in legal:
            raise ConfigError.on(what, f"{given!r} is not known", ", ".join(legal))
    if ranks < 1:
        raise ConfigError.on("ranks", f"{ranks} is not legal", "1 or more")
    if algorithm == "hierarchical" and (host < 1 or ranks % host):
        wrong = f"{ranks} ranks are not on hosts of {host} each"
        raise ConfigError.on("hierarchical", wrong, "as many ranks on each host")
    return _TABLE[algorithm](ranks, host)[collective]


def sent_blocks(rounds: Rounds, rank: int) -> int:
    """Return how many blocks a rank sends to others."""
    return sum(len(m.at) for each in rounds for m in each if m.source == rank != m.target)


def blocks_of(rounds: Rounds, ranks: int) -> list[int]:
    """Return how many blocks the buffer of each rank has: its data, and the room that it needs."""
    found = [ranks] * ranks
    for m in (m for each in rounds for m in each):
        found[m.source] = max(found[m.source], *(b + 1 for b in m.at))
        found[m.target] = max(found[m.target], *(b + 1 for b in m.to))
    return found


def priced(rounds: Rounds, latency: float, seconds: float) -> float:
    """Return the seconds of all rounds, if a round takes ``latency`` and ``seconds`` for each block that the busiest
    rank sends or receives."""
    total = 0.0
    for each in rounds:
        sent: dict[int, int] = {}
        got: dict[int, int] = {}
        for m in each:
            if m.source != m.target:
                sent[m.source] = sent.get(m.source, 0) + len(m.at)
                got[m.target] = got.get(m.target, 0) + len(m.at)
        if sent:
            total += latency + seconds * max(*sent.values(), *got.values())
    return total
