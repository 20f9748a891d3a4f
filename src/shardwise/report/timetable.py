"""The timetable of a step says what each rank does when, simulated or recorded.  It is pure data; others draw it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import Lane

from .tables import size

COMPUTE = str(Lane.COMPUTE)
LANES = tuple(map(str, Lane))
"""The lanes of a rank from top to bottom."""


@dataclass(frozen=True, slots=True)
class TimeBox:
    """A rank's work on a microbatch of a stage, from ``start`` to ``stop`` seconds after the step's begin.

    ``kind`` is F (forward), B (backward), its parts I (gradients of inputs) and W (of weights), or the word of an
    instruction.  ``stage`` and ``microbatch`` are -1 where there is none.  A SEND and a RECEIVE of one ``flow`` are the
    two ends of a message.  ``name`` is what the box is called; by default what the other fields say.
    """

    rank: int
    start: float
    stop: float
    kind: str
    stage: int = -1
    microbatch: int = -1
    lane: str = COMPUTE
    critical: bool = False
    flow: str = ""
    name: str = ""

    @property
    def title(self) -> str:
        """The name of the box, by default words such as ``F 3 of stage 1``."""
        number = f" {self.microbatch}" if self.microbatch >= 0 else ""
        return self.name or f"{self.kind}{number}" + (f" of stage {self.stage}" if self.stage >= 0 else "")


@dataclass(frozen=True)
class Drawing:
    """The boxes of all ranks in a step of ``step`` seconds.  Those of a rank and lane do not overlap.

    Boxes may lie behind ``step`` if steps follow each other at once, each rank as soon as it can.  ``bubble`` is the
    fraction of the ranks' time in the step in which they compute nothing.  ``memory`` is the most that each rank holds:
    bytes, or the number of microbatches whose activations it keeps if ``memory_unit`` says so.
    """

    title: str
    boxes: tuple[TimeBox, ...]
    ranks: int
    step: float
    bubble: float
    memory: tuple[float, ...] | None = None
    memory_unit: str = "bytes"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.memory is not None and len(self.memory) != self.ranks:
            raise ShardwiseError(f"a drawing of {self.ranks} ranks has the memory of {len(self.memory)}")
        for row in self.rows().values():
            for before, after in zip(row, row[1:], strict=False):
                if after.start < before.stop - 1e-9 * self.step:
                    raise ShardwiseError(
                        f"rank {after.rank}, {after.lane}: {after.title} begins before {before.title} has ended"
                    )
        for box in self.boxes:
            if not 0 <= box.rank < self.ranks or not 0 <= box.start <= box.stop:
                raise ShardwiseError(f"{box} does not lie in a step of {self.ranks} ranks")

    @property
    def end(self) -> float:
        """The seconds at which the last box ends, or the step if that is later."""
        return max([self.step, *(box.stop for box in self.boxes)])

    def rows(self) -> dict[tuple[int, str], list[TimeBox]]:
        """Return the boxes of each rank and lane, by time."""
        found: dict[tuple[int, str], list[TimeBox]] = defaultdict(list)
        for box in sorted(self.boxes, key=lambda b: (b.start, b.stop)):
            found[box.rank, box.lane].append(box)
        return found

    def lanes(self) -> list[list[str]]:
        """Return for each rank the lanes in which there is something, computing first."""
        there = {(box.rank, box.lane) for box in self.boxes}
        return [[lane for lane in LANES if lane == COMPUTE or (rank, lane) in there] for rank in range(self.ranks)]

    def chunks(self) -> dict[int, dict[int, int]]:
        """Return for each rank its stages, numbered from 0 in the model's order."""
        stages: dict[int, set[int]] = defaultdict(set)
        for box in self.boxes:
            if box.stage >= 0:
                stages[box.rank].add(box.stage)
        return {rank: {stage: at for at, stage in enumerate(sorted(those))} for rank, those in stages.items()}

    @property
    def summary(self) -> str:
        """The step in words, such as ``step 33 ms, bubble 27.3% of the ranks' time``."""
        return f"step {milliseconds(self.step)}, bubble {self.bubble:.1%} of the ranks' time"

    @property
    def memory_words(self) -> list[str]:
        """The most that each rank holds; for activations only the number, as :attr:`memory_title` says what it is."""
        return [size(value) if self.memory_unit == "bytes" else f"{value:.4g}" for value in self.memory or ()]

    @property
    def memory_title(self) -> str:
        """The title of :attr:`memory_words`; empty if there are none."""
        return (
            "" if self.memory is None else "peak memory" if self.memory_unit == "bytes" else f"peak {self.memory_unit}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the drawing as JSON values, times in seconds."""
        return {
            "title": self.title, "ranks": self.ranks, "step_seconds": self.step, "bubble": self.bubble,
            "memory": self.memory, "memory_unit": self.memory_unit, "notes": list(self.notes),
            "boxes": [
                {"rank": b.rank, "lane": b.lane, "kind": b.kind, "stage": b.stage, "microbatch": b.microbatch,
                "start": b.start,
                 "stop": b.stop, "critical": b.critical}
                for b in self.boxes
            ],
        }  # fmt: skip


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, such as ``27.35 ms`` or ``1,234 ms``."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"


# ---- the critical path -----------------------------------------------------------------------------------------------


def mark_critical(boxes: Iterable[TimeBox], pipelines: Sequence[int] | None = None) -> tuple[TimeBox, ...]:
    """Return the boxes with the critical path marked: from the last back to the begin, each waited for the one before.

    What a box waited for is the latest to end of: the box before it on its rank, and what its own microbatch needs of
    other stages.  What belongs to no microbatch (a norm, a step) may have waited for any rank.  ``pipelines`` has the
    replica of the model that each rank belongs to; by default all belong to one.
    """
    all_boxes = tuple(boxes)
    computed = sorted((b for b in all_boxes if b.lane == COMPUTE), key=lambda b: b.stop)
    home: Sequence[int] | dict[int, int] = pipelines or defaultdict(int)
    ends = {(home[b.rank], b.kind, b.stage, b.microbatch): b for b in computed}
    before: dict[TimeBox, TimeBox] = {}
    last: dict[int, TimeBox] = {}
    for box in sorted(computed, key=lambda b: (b.start, b.stop)):
        if box.rank in last:
            before[box] = last[box.rank]
        last[box.rank] = box
    path: set[TimeBox] = set()
    at = computed[-1] if computed else None
    while at is not None and at not in path:
        path.add(at)
        needed = [before[at]] if at in before else []  # first, so that on a tie the path stays on its rank
        needed += [ends[home[at.rank], *key] for key in _needs(at) if (home[at.rank], *key) in ends]
        if at.microbatch < 0 and (other := _latest(computed, at)) is not None:
            needed.append(other)
        late = max((b.stop for b in needed), default=0.0)
        at = next((b for b in needed if b.stop >= late * (1 - 1e-9) and b not in path), None)
    return tuple(replace(b, critical=True) if b in path else b for b in all_boxes)


def _needs(box: TimeBox) -> list[tuple[str, int, int]]:
    """Return the tasks that a task of a microbatch reads: their kinds, stages and microbatches."""
    kind, stage, m = box.kind, box.stage, box.microbatch
    if kind == "F":
        return [("F", stage - 1, m)]
    if kind in ("B", "I"):
        return [("F", stage, m), ("B", stage + 1, m), ("I", stage + 1, m)]
    return [("I", stage, m)] if kind == "W" else []


def _latest(computed: Sequence[TimeBox], box: TimeBox) -> TimeBox | None:
    """Return the box that ends last on another rank before ``box`` begins."""
    return next((b for b in reversed(computed) if b.stop <= box.start and b.rank != box.rank), None)


# ---- Perfetto --------------------------------------------------------------------------------------------------------


def perfetto(drawings: Sequence[Drawing]) -> dict[str, Any]:
    """Return the drawings in the Trace Event Format that chrome://tracing and ui.perfetto.dev read: a process for each
    rank, a thread for each lane, times in microseconds.  Of several drawings each has processes of its own, with its
    title."""
    events: list[dict[str, Any]] = []
    first = 0
    for drawing in drawings:
        flows: dict[str, dict[str, TimeBox]] = defaultdict(dict)
        for rank, lanes in enumerate(drawing.lanes()):
            name = f"{drawing.title}: rank {rank}" if len(drawings) > 1 else f"rank {rank}"
            events += _named("process", first + rank, 0, name, first + rank)
            for lane in lanes:
                events += _named("thread", first + rank, LANES.index(lane), lane, LANES.index(lane))
        for box in sorted(drawing.boxes, key=lambda b: b.start):
            events.append({
                "name": box.title, "cat": box.kind, "ph": "X", **_place(box, first, box.start),
                "dur": (box.stop - box.start) * 1e6,
                "args": {"stage": box.stage, "microbatch": box.microbatch, "critical": box.critical},
            })  # fmt: skip
            if box.flow:
                flows[box.flow][box.kind] = box
        for flow, ends in flows.items():
            if (sent := ends.get("SEND")) is not None and (received := ends.get("RECEIVE")) is not None:
                about = {"name": "message", "cat": "flow", "id": f"{first} {flow}"}
                arrival = min(max(sent.start, received.start), received.stop)  # a receive may be posted before its send
                events.append({**about, "ph": "s", **_place(sent, first, sent.start)})
                events.append({**about, "ph": "f", "bp": "e", **_place(received, first, arrival)})
        first += drawing.ranks
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"drawings": [d.title for d in drawings]}}


def _place(box: TimeBox, first: int, time: float) -> dict[str, Any]:
    return {"pid": first + box.rank, "tid": LANES.index(box.lane), "ts": time * 1e6}


def _named(what: str, pid: int, tid: int, name: str, order: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {"name": f"{what}_name", **place, "args": {"name": name}},
        {"name": f"{what}_sort_index", **place, "args": {"sort_index": order}},
    ]
