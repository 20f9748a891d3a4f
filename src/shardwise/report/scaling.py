"""How a training step scales over ranks: where the time of all ranks goes, and what that costs of the efficiency.

This is pure data: it is made of what ranks have recorded (:mod:`shardwise.core.recording`), and
:mod:`shardwise.report.scaling_shown` prints and draws it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.instruction import Lane
from shardwise.core.recording import Operation, RankStep

Kind = Literal["strong", "weak"]
KINDS: tuple[Kind, ...] = ("strong", "weak")
USES = ("computing", "exposed", "waiting", "other")
"""What ranks do with their time: they compute, wait for data that is under way (exposed communication), wait for ranks
that are late, or do what lies between instructions."""
LEGAL = "legal: a file that `shardwise bench scaling --out` has written"

Post = tuple[tuple[int, ...], str, int]
"""An operation is told apart by its members, its queue, and how many there were before it."""


class Interval(NamedTuple):
    start: float
    stop: float


# ---- a recorded step -------------------------------------------------------------------------------------------------


def split(ranks: Sequence[RankStep]) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step that all ``ranks`` have recorded, from the first begin to the last end, and the
    share of ranks x seconds of each of :data:`USES`; the shares add up to 1.

    A wait for an operation is *waiting* until the last of the other members has posted it, and *exposed* from then on.
    The time of the host's work on operations under way is exposed too, and a rank that is done is waiting until all
    are.  *Computing* are the instructions of the compute lane without the waits inside of them.  Raises
    :class:`ShardwiseError` where a member has not recorded an operation.
    """
    begins = _begins(ranks)
    end = max(begin + one.seconds for begin, one in zip(begins, ranks, strict=True))
    posts = _posts(ranks, begins)
    spent = dict.fromkeys(USES, 0.0)
    for begin, one in zip(begins, ranks, strict=True):
        waits = []
        for post, operation in _numbered(one.operations):
            wait = Interval(begin + operation.waited, begin + operation.arrived)
            ready = max(_post_of(posts, post, member) for member in post[0] if member != one.rank)
            late = max(0.0, min(wait.stop, ready) - wait.start)
            spent["waiting"] += late
            spent["exposed"] += wait.stop - wait.start - late
            waits.append(wait)
        computing = _computing(one, begin)
        spent["computing"] += sum(stop - start for start, stop in computing) - _common(computing, sorted(waits))
        spent["exposed"] += one.moved
        spent["waiting"] += end - begin - one.seconds
    whole = len(ranks) * end
    spent["other"] = whole - sum(spent.values())
    return end, {use: seconds / whole for use, seconds in spent.items()}


def _begins(ranks: Sequence[RankStep]) -> list[float]:
    """Return when each rank began, in seconds since the first of its host did: hosts begin together, after a
    barrier."""
    hosts = {one.host: min(r.wall for r in ranks if r.host == one.host) for one in ranks}
    return [one.wall - hosts[one.host] for one in ranks]


def _numbered(operations: Iterable[Operation]) -> Iterator[tuple[Post, Operation]]:
    seen: Counter[tuple[tuple[int, ...], str]] = Counter()
    for one in operations:
        yield (one.ranks, one.queue, seen[one.ranks, one.queue]), one
        seen[one.ranks, one.queue] += 1


def _posts(ranks: Sequence[RankStep], begins: Sequence[float]) -> dict[Post, dict[int, float]]:
    """Return when each member of each operation has posted it."""
    found: dict[Post, dict[int, float]] = defaultdict(dict)
    for begin, one in zip(begins, ranks, strict=True):
        for post, operation in _numbered(one.operations):
            found[post][one.rank] = begin + operation.posted
    return found


def _post_of(posts: Mapping[Post, Mapping[int, float]], post: Post, member: int) -> float:
    try:
        return posts[post][member]
    except KeyError:
        members, queue, number = post
        among = ", ".join(map(str, members))
        words = f"operation {number} of queue {queue} among ranks {among} is not recorded by rank {member}"
        raise ShardwiseError(f"recorded step: {words}") from None


def _computing(one: RankStep, begin: float) -> list[Interval]:
    """Return when a rank was in instructions of the compute lane; a rank runs one instruction after the other."""
    starts = [*(event.start for event in one.events), one.seconds]
    return [
        Interval(begin + event.start, begin + max(event.start, min(event.stop, after)))
        for event, (_, after) in zip(one.events, pairwise(starts), strict=True)
        if event.lane == Lane.COMPUTE
    ]


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the seconds that lie in intervals of both; those of each are in order and apart."""
    found, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        found += max(0.0, min(one[i].stop, other[j].stop) - max(one[i].start, other[j].start))
        if one[i].stop <= other[j].stop:
            i += 1
        else:
            j += 1
    return found


# ---- over numbers of ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredStep:
    """This is a measured step, or the mean of ``steps`` that overlap: its ``seconds``, and the shares of
    :data:`USES`."""

    ranks: int
    hosts: int
    batch_size: int
    round: int
    step: int
    steps: int
    seconds: float
    computing: float
    exposed: float
    waiting: float
    other: float

    @staticmethod
    def of(recorded: Sequence[RankStep], batch_size: int, round: int, steps: int = 1) -> MeasuredStep:
        """Return what ``recorded`` of all ranks, the record of ``steps`` steps from ``step`` on, says."""
        seconds, shares = split(recorded)
        hosts = len({one.host for one in recorded})
        at = recorded[0].step
        return MeasuredStep(len(recorded), hosts, batch_size, round, at, steps, seconds / steps, **shares)


@dataclass(frozen=True)
class Point:
    """This is what a number of ranks has shown: medians over its steps.

    ``speed_up`` is its rows a second over those of the first point of its ``kind``; ``efficiency`` is that over the
    ratio of their ranks.  ``shares`` say where the time of all ranks goes and add up to 1.  ``lost`` says, for each of
    :data:`USES`, how much more of the ranks' time it takes than for the same rows at the first point; efficiency and
    all of ``lost`` add up to 1.
    """

    kind: Kind
    ranks: int
    hosts: int
    batch_size: int
    steps: int
    seconds: float
    rows_per_second: float
    tokens_per_second: float | None
    speed_up: float
    efficiency: float
    shares: Mapping[str, float]
    lost: Mapping[str, float]


@dataclass(frozen=True)
class Scaling:
    """These are measured steps of one configuration: ``config`` has the values of keys that all have in common.

    The first number of ranks has ``batch_size`` rows; ``axis`` is the axis of the mesh that grows.  ``tokens`` is the
    number of tokens of a row, None for data that is no text.  ``about`` says, for each launch, on what it measured.
    """

    config: Mapping[str, Any]
    axis: str
    kinds: tuple[Kind, ...]
    batch_size: int
    tokens: int | None
    about: tuple[Mapping[str, Any], ...]
    measured: tuple[MeasuredStep, ...]

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits, which are the same for the same configuration."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def first(self) -> tuple[int, int, int]:
        """Return (ranks, hosts, rows) of the first point."""
        return min(case for case in self.cases if case[2] == self.batch_size)

    @property
    def cases(self) -> dict[tuple[int, int, int], list[MeasuredStep]]:
        """Return the measured steps by (ranks, hosts, rows)."""
        found: dict[tuple[int, int, int], list[MeasuredStep]] = {}
        for one in self.measured:
            found.setdefault((one.ranks, one.hosts, one.batch_size), []).append(one)
        return found

    @property
    def points(self) -> list[Point]:
        """Return the points of each kind, by ranks."""
        return [
            self._point(kind, case)
            for kind in self.kinds
            for case in sorted(self.cases)
            if case[2] * self.first[0] == self.batch_size * (case[0] if kind == "weak" else self.first[0])
        ]

    def _point(self, kind: Kind, case: tuple[int, int, int]) -> Point:
        ranks, hosts, rows = case
        seconds, shares = _medians(self.cases[case])
        first_seconds, first_shares = _medians(self.cases[self.first])
        work, whole = rows / self.batch_size, ranks * seconds
        base = self.first[0] * first_seconds * work  # the time of all ranks, were they as efficient as the first
        lost = {use: (shares[use] * whole - first_shares[use] * base) / whole for use in USES}
        speed = rows / seconds
        return Point(
            kind, ranks, hosts, rows, sum(one.steps for one in self.cases[case]), seconds, speed,
            None if self.tokens is None else speed * self.tokens, work * first_seconds / seconds, base / whole, shares,
            lost,
        )  # fmt: skip

    def beside(self, earlier: Scaling, name: str) -> Scaling:
        """Return this with what was measured ``earlier``; raise :class:`ConfigError`, which names it by ``name``, where
        they do not belong together."""
        here = {"axis": self.axis, "data.batch_size": self.batch_size, **self.config}
        there = {"axis": earlier.axis, "data.batch_size": earlier.batch_size, **earlier.config}
        wrong = [
            f"{key} is {there.get(key)}, not {here.get(key)}"
            for key in dict.fromkeys((*here, *there)) if here.get(key) != there.get(key)
        ]  # fmt: skip
        if wrong:
            raise ConfigError.on(name, ", ".join(wrong), "what was measured of the same configuration")
        kinds = tuple(kind for kind in KINDS if kind in (*self.kinds, *earlier.kinds))
        about, measured = (*earlier.about, *self.about), (*earlier.measured, *self.measured)
        return Scaling(self.config, self.axis, kinds, self.batch_size, earlier.tokens, about, measured)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values for JSON, with the points that follow; :meth:`of_json` reads it back."""
        return {"digest": self.digest, **asdict(self), "points": [asdict(point) for point in self.points]}

    @staticmethod
    def of_json(text: str, name: str) -> Scaling:
        """Read what :meth:`to_dict` has given; raise :class:`ConfigError`, which names it by ``name``, for other
        text."""
        try:
            values = json.loads(text)
            steps = tuple(MeasuredStep(**one) for one in values["measured"])
            rest = {one.name: values[one.name] for one in fields(Scaling) if one.name != "measured"}
            found = Scaling(**{**rest, "kinds": tuple(rest["kinds"]), "about": tuple(rest["about"])}, measured=steps)
            found.first, found.points  # noqa: B018 - they raise where there is nothing to compare
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ConfigError(f"{name}: no measured scaling: {type(error).__name__}: {error}; {LEGAL}") from None
        return found


def _medians(steps: Sequence[MeasuredStep]) -> tuple[float, dict[str, float]]:
    """Return the median seconds of steps, and the median share of each use; these are scaled to add up to 1."""
    shares = {use: statistics.median(getattr(one, use) for one in steps) for use in USES}
    whole = sum(shares.values())
    return statistics.median(one.seconds for one in steps), {use: share / whole for use, share in shares.items()}
