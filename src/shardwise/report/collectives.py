"""Tables of what a step communicates, and why: a microbatch's units op by op, and everything that a rank sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.core.instruction import OP_INFO, BufferKind, Instruction, Op
from shardwise.core.mesh import Mesh
from shardwise.core.pins import starred
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.estimate.traffic import TrafficMoment
from shardwise.lower.versions import steady_batches
from shardwise.measure.unit_traffic import Cause, Traffic, UnitTraffic, by_cause
from shardwise.units.share import place_of
from shardwise.units.trace import Trace, Unit

from .tables import grid, size

WAYS = ("forward", "again", "backward")
PURPOSES = (
    "forward", "recompute", "backward", "activations", "their gradients", "parameters", "gradients", "tied gradients",
    "targets", "loss",
    "norm",
)  # fmt: skip
"""What is communicated: what units do by themselves; messages; whole buckets; scalars of a batch."""


class Caused(NamedTuple):
    """What a unit communicates in a microbatch because of one op; ``again`` is empty if nothing is recomputed."""

    unit: Unit | None  # None stands for any unit that does the same
    cause: Cause
    traffic: UnitTraffic

    def sent(self, mesh: Mesh) -> float:
        """Return the bytes that a rank sends."""
        every = (*self.traffic.forward, *self.traffic.again, *self.traffic.backward)
        return sum(t.ring(mesh.axis_size(t.axes)) for t in every)

    def plain(self, mesh: Mesh) -> dict[str, Any]:
        """Return the fields as JSON values."""
        ways = {way: [t._asdict() for t in getattr(self.traffic, way)] for way in WAYS}
        return {
            "unit": None if self.unit is None else self.unit.index,
            **self.cause._asdict(),
            **ways,
            "sent_bytes": self.sent(mesh),
        }


@dataclass
class Sum:
    """What a rank hands to the communicator in a step for the purpose ``of``, by ``kind`` and axes: ``times`` tensors
    of ``nbytes`` bytes together, for which the rank sends ``sent_bytes``; ``buckets`` are those concerned."""

    rank: int
    of: str
    axes: tuple[str, ...]
    kind: str
    buckets: tuple[int, ...] = ()
    times: int = 0
    nbytes: int = 0
    sent_bytes: float = 0.0


def of_units(trace: Trace, mesh: Mesh, rows: int, programs: Sequence[Program]) -> list[Caused]:
    """Return what units communicate in a microbatch of ``rows`` rows, on the last rank."""
    env = place_of(trace, mesh, mesh.size - 1, rows)
    again = {one.unit for program in programs for one in program.instructions if one.op is Op.RECOMPUTE}
    return [
        Caused(unit, cause, one if unit.index in again else replace(one, again=()))
        for unit in trace.units
        if unit.graph is not None
        for cause, one in by_cause(unit.graph, env, unit.output_grads)
        if one != UnitTraffic()
    ]


def of_step(moments: Iterable[TrafficMoment], mesh: Mesh, rank: int) -> list[Sum]:
    """Return the sums of ``rank``, whose instructions the moments are."""
    found: dict[tuple[str, tuple[str, ...], str], Sum] = {}
    for moment in moments:
        for number, t in enumerate(moment.traffic):
            what = _what(moment.instruction)
            one = found.setdefault((what, t.axes, t.kind), Sum(rank, what, t.axes, t.kind))
            one.times, one.nbytes = one.times + 1, one.nbytes + t.nbytes
            if moment.sent is None:
                one.sent_bytes += t.ring(mesh.axis_size(t.axes))
            elif not number:
                one.sent_bytes += moment.sent
            if moment.instruction.bucket >= 0:
                one.buckets = tuple(sorted({*one.buckets, moment.instruction.bucket}))
    return sorted(found.values(), key=lambda one: PURPOSES.index(one.of))


def _what(one: Instruction) -> str:
    """Return what an instruction communicates, as a word of :data:`PURPOSES`."""
    if one.peer is not None and one.unit >= 0:
        return "activations" if (one.reads or one.writes)[0].kind == BufferKind.ACTIVATION else "their gradients"
    return one.writes[0].kind if one.op is Op.REDUCE and one.bucket < 0 else OP_INFO[one.op].carries


def unit_table(mesh: Mesh, found: Sequence[Caused]) -> list[Any]:
    """Return a table of what units communicate; none if nothing does.  Units that differ only in the number of their
    block and communicate the same are one row."""
    units: dict[tuple[str, tuple[tuple[Caused, int], ...]], list[int]] = {}
    for unit in {one.unit.index: one.unit for one in found if one.unit is not None}.values():
        counts = Counter(
            one._replace(unit=None, cause=_within(one.cause, unit.name)) for one in found if one.unit is unit
        )
        units.setdefault((starred(unit.name), tuple(counts.items())), []).append(unit.index)
    if not units:
        return []
    over, again = {_over(one.traffic) for one in found}, any(one.traffic.again for one in found)
    cells = []
    for (_, own), numbers in units.items():
        for i, (one, times) in enumerate(own):
            needed = f"{one.cause.op} {one.cause.path}".strip() + f" ({times})" * (times > 1)
            axes, repeated = [_over(one.traffic)] * (len(over) > 1), [len(one.traffic.again) or ""] * again
            ways = (_kinds(one.traffic.forward), *repeated, _kinds(one.traffic.backward))
            cells.append(("" if i else runs(numbers), needed, *axes, *ways, size(times * one.sent(mesh))))
    column, where = (("over",), "") if len(over) > 1 else ((), f" over {over.pop()}")
    columns = ("unit", "needed by", *column, "forward", *((">again",) if again else ()), "backward", ">sent")
    more = "; again: of forward's, by recomputation" if again else ""
    title = f"collectives{where} (sent: by a rank, of a microbatch, forward and backward{more})"
    total = size(sum(one.sent(mesh) for one in found))
    return [grid(title, columns, cells, totals=("", "all units", *[""] * (len(columns) - 3), total))]


def step_tables(plan: Plan, found: Sequence[Sum]) -> list[Any]:
    """Return one table for each rank that communicates."""
    batches, tables = steady_batches(plan), []
    when = "a step" if batches == 1 else f"{batches} batches of a window"
    for rank in dict.fromkeys(one.rank for one in found):
        own = [one for one in found if one.rank == rank]
        cells = [
            (
                f"{one.of} {runs(one.buckets, 'b')}",
                ", ".join(one.axes),
                one.kind,
                one.times,
                size(one.nbytes),
                size(one.sent_bytes),
            )
            for one in own
        ]
        sums = (
            sum(one.times for one in own),
            size(sum(one.nbytes for one in own)),
            size(sum(one.sent_bytes for one in own)),
        )
        title = f"all that rank {rank} communicates in {when} (bytes: of the whole; sent: by it)"
        tables.append(
            grid(title, ("of", "over", "", ">times", ">bytes", ">sent"), cells, totals=("all", "", "", *sums))
        )
    return tables


def _within(cause: Cause, unit: str) -> Cause:
    """Return the cause in short, with its path relative to the unit."""
    return Cause(cause.op.removeprefix("aten.").partition(".")[0], cause.path.removeprefix(unit).removeprefix("."))


def _over(one: UnitTraffic) -> str:
    return ",".join(dict.fromkeys(axis for t in (*one.forward, *one.backward) for axis in t.axes))


def _kinds(several: Sequence[Traffic]) -> str:
    return ", ".join(t.kind for t in several)


def runs(numbers: Sequence[int], letter: str = "u") -> str:
    """Return numbers in short, such as ``u1-u3, u5``."""
    starts = [u for u in numbers if u - 1 not in numbers]
    stops = [u for u in numbers if u + 1 not in numbers]
    return ", ".join(
        f"{letter}{a}" if a == b else f"{letter}{a}-{letter}{b}" for a, b in zip(starts, stops, strict=True)
    )
