"""What was measured of the collectives between ranks, as a file that later predictions read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.core.rates import PASSES, Link, Rates

OWN = "own"
"""The algorithm of the backend itself, whichever it takes."""
POINT_TO_POINT = "point-to-point"
VERSION = 1
LEGAL_PROFILE = "a file that `shardwise bench collectives --out` has written"


def bus_factor(collective: str, ranks: int) -> float:
    """Return by how much the bytes of a collective are multiplied for its bus bandwidth, which is that of the busiest
    link if the algorithm is the best (nccl-tests, doc/PERFORMANCE.md)."""
    if collective in ("broadcast", "reduce", POINT_TO_POINT):
        return 1.0
    return (2 if collective == "all-reduce" else 1) * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Measured:
    """A collective of ``nbytes`` bytes took ``seconds``, the median over runs of the slowest rank.

    ``nbytes`` is the size of the whole: of a rank's data, or of what a gather puts together and a scatter takes apart.
    ``sent`` are the bytes that the busiest rank sends; None where the backend does not say.
    """

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    seconds: float
    sent: int | None = None

    @property
    def kind(self) -> str:
        """Return the name of the collective in :data:`~shardwise.core.rates.PASSES`, if it is there."""
        return self.collective.replace("-", "_")

    @property
    def algorithm_bandwidth(self) -> float:
        """Return bytes per second of the whole."""
        return self.nbytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Return bytes per second of the busiest link, comparable between collectives and numbers of ranks."""
        return self.algorithm_bandwidth * bus_factor(self.collective, self.ranks)


@dataclass(frozen=True)
class LinkProfile:
    """What was measured over ``backend`` between devices of a type, ``host`` ranks on each host."""

    backend: str
    device: str
    host: int
    rows: tuple[Measured, ...]

    def applied(self, rates: Rates, ranks: int) -> Rates:
        """Return ``rates`` with the links that were measured, for groups of about ``ranks`` ranks: on one host, and for
        those mesh axes that use other links between hosts.  What was not measured stays as it is."""
        between = self.link(ranks, between=True)
        links = rates.links if between is None else dict.fromkeys(rates.links, between)
        return replace(rates, link=self.link(ranks) or rates.link, links=links)

    def link(self, ranks: int, *, between: bool = False) -> Link | None:
        """Return the link α + bytes/β that fits best to the backend's own collectives of that many ranks, or of the
        number of ranks nearest to it; None if none was measured.  They are collectives on a host, or ``between`` hosts.

        The relative errors are minimised, by least squares."""
        own = [
            r for r in self.rows
            if r.algorithm == OWN and r.kind in PASSES and r.ranks > 1
            and (r.ranks > self.host) == between
        ]  # fmt: skip
        if not own:
            return None
        nearest = min((r.ranks for r in own), key=lambda n: (abs(math.log(n / ranks)), n))
        return _fitted([r for r in own if r.ranks == nearest])

    def to_json(self) -> str:
        values = {"version": VERSION, **asdict(self)}
        return json.dumps(values, indent=1) + "\n"

    @staticmethod
    def of_json(text: str, where: str) -> LinkProfile:
        """Read what :meth:`to_json` returns; raise :class:`ConfigError`, which names ``where``, for anything else."""
        try:
            values: Any = json.loads(text)
            if values["version"] != VERSION:
                raise ConfigError.on(where, f"version {values['version']}", f"version {VERSION}")
            rows = tuple(Measured(**row) for row in values["rows"])
            if not all(r.seconds > 0 and r.nbytes > 0 and r.ranks > 0 for r in rows):
                raise ValueError("times, sizes or ranks that are not above 0")
            return LinkProfile(str(values["backend"]), str(values["device"]), int(values["host"]), rows)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError.on(where, f"cannot be read: {error or type(error).__name__}", LEGAL_PROFILE) from None


def _fitted(rows: Sequence[Measured]) -> Link:
    """Return the link of least relative errors: of α + x/β with x the bytes that a rank of a ring sends."""
    pairs = [(PASSES[r.kind] * r.nbytes * (r.ranks - 1) / r.ranks, r.seconds) for r in rows]
    # Each row says 1 = α·(1/t) + (1/β)·(x/t).
    a = sum(1 / t**2 for _, t in pairs)
    b = sum(x / t**2 for x, t in pairs)
    c = sum(x**2 / t**2 for x, t in pairs)
    p, q = sum(1 / t for _, t in pairs), sum(x / t for x, t in pairs)
    determinant = a * c - b * b
    latency, inverse = 0.0, q / c
    if determinant > 1e-12 * a * c:
        latency, inverse = (p * c - q * b) / determinant, (a * q - b * p) / determinant
    if latency < 0 or inverse <= 0:
        latency, inverse = (0.0, q / c) if latency < 0 else (p / a, 1e-15)
    return Link(latency, 1 / inverse)
