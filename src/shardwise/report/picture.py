"""A step is drawn as its programs say: the lanes of each rank from top to bottom, instructions from left to right, and
lines for what waits for what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import OP_INFO, Instruction, Lane, Op, Queue
from shardwise.core.mesh import Mesh
from shardwise.core.program import Program, class_of

from .kinds import ink, kind_of, look
from .sheet import Line, Rectangle, Sheet, Words, width_of
from .tables import plural

UNIT, HEIGHT, GAP, LEFT = 17, 34, 16, 84
TOP, TITLE, BETWEEN = 44, 20, 12  # pixels above all ranks, for the words of each, and between two
MOST_RANKS = 4  # with more, one rank of each class is drawn
NARROWEST = 760
MOST_UNITS = 8  # units that the legend names
WAIT, MESSAGE, GREY = "#777777", "#b9771d", "#444444"

Span = tuple[float, float]
Spans = list[Span]


@dataclass(frozen=True)
class Row:
    """The lanes of ``rank``, which runs ``program`` as all ranks do that ``words`` name."""

    rank: int
    program: Program
    words: str

    @property
    def lanes(self) -> list[Lane]:
        """The lanes in which there is something."""
        return [lane for lane in Lane if any(one.lane is lane for one in self.program.instructions)]


def rows(programs: Sequence[Program], mesh: Mesh) -> list[Row]:
    """Return a row for each rank, or if there are more than :data:`MOST_RANKS` for the first rank of each class."""
    if mesh.size <= MOST_RANKS:
        return [Row(rank, class_of(programs, mesh, rank), f"rank {rank}") for rank in range(mesh.size)]
    found = []
    for program in programs:
        first, *others = mesh.members(program.coordinates)
        more = f", and {plural(len(others), 'rank')} that do the same" if others else ""
        found.append(Row(first, program, f"rank {first}{more}"))
    return found


def _homes(found: Sequence[Row], mesh: Mesh) -> dict[int, int]:
    """Return for every rank the index of the row that shows it, or its class."""
    home = {rank: at for at, row in enumerate(found) for rank in mesh.members(row.program.coordinates)}
    return home | {row.rank: at for at, row in enumerate(found)}


# ---- where instructions lie ------------------------------------------------------------------------------------------


def place(found: Sequence[Row], mesh: Mesh) -> list[Spans]:
    """Return (start, stop) of every instruction of each row in units of width, each as early as its lane, its waits and
    the other ranks allow: a message arrives after it was sent, and ranks begin a collective together."""
    home = _homes(found, mesh)
    ready: dict[Meeting, float] = {}
    keys = [list(_meetings(row, at, home, mesh)) for at, row in enumerate(found)]
    for _ in range(2 + len({key for own in keys for key in own})):  # each round settles one meeting at least
        spans, before = [], dict(ready)
        for row, own in zip(found, keys, strict=True):
            spans.append(_spans(row.program, own, ready))
        if ready == before:
            return spans
    raise ShardwiseError("the instructions of these programs wait for each other in a circle")


Meeting = tuple[object, ...]
"""What ranks have to agree on: the number of a message or collective among those of the same ranks and channel."""


def _meetings(row: Row, at: int, home: dict[int, int], mesh: Mesh) -> Iterator[Meeting | None]:
    """Yield for each instruction of a row what it meets other rows for, or None."""
    seen: Counter[Meeting] = Counter()
    for one in row.program.instructions:
        key: Meeting | None = None
        if one.peer is not None:
            other = home[mesh.offset(row.rank, *one.peer, wrap=True)]
            key = ("message", *((at, other) if one.op is Op.SEND else (other, at)), one.channel)
        elif one.axes:
            together = {home[rank] for rank in mesh.group(row.rank, one.axes)}
            key = ("collective", frozenset(together), one.axes, one.lane) if len(together) > 1 else None
        if key is None:
            yield None
        else:
            yield (*key, seen[key])
            seen[key] += 1


def _spans(program: Program, keys: Sequence[Meeting | None], ready: dict[Meeting, float]) -> Spans:
    """Place the instructions of one rank by what is known of the others, and note in ``ready`` what they wait for."""
    free: dict[Queue, float] = {}
    spans: Spans = []
    issued = 0.0  # other lanes are given their work in the order of the program, while computing goes on
    for one, key in zip(program.instructions, keys, strict=True):
        start = max([free.get(one.queue, 0.0), issued, *(spans[at][1] for at in one.waits)])
        if one.lane is Lane.COMPUTE:
            issued = start
        if key is not None and one.op is not Op.SEND:
            start = max(start, ready.get(key, 0.0))
        spans.append((start, start + (4 if one.op is Op.BACKWARD else 2)))  # a backward takes as long as two forwards
        free[one.queue] = spans[-1][1]
        if key is not None and one.op is not Op.RECEIVE:
            mark = spans[-1][1] if one.op is Op.SEND else start
            ready[key] = max(ready.get(key, 0.0), mark)
    return spans


def tracks(program: Program, spans: Spans) -> list[int]:
    """Return for each instruction its track within its lane: queues of a lane may be busy at the same time."""
    ends: dict[Lane, list[float]] = {}
    found = [0] * len(spans)
    for at in sorted(range(len(spans)), key=lambda at: spans[at]):
        own = ends.setdefault(program.instructions[at].lane, [])
        start, stop = spans[at]
        found[at] = next((track for track, end in enumerate(own) if end <= start), len(own))
        own[found[at] : found[at] + 1] = [stop]
    return found


# ---- drawing ---------------------------------------------------------------------------------------------------------


def picture(programs: Sequence[Program], mesh: Mesh, title: str, units: Sequence[str] = ()) -> Sheet:
    """Return the picture of a step; ``units`` are the names of the model's units.

    A line joins two instructions if one waits for the other, or if one sends what the other receives.
    """
    found = rows(programs, mesh)
    spans = place(found, mesh)
    tops, y = list[Tops](), float(TOP)
    for row, own in zip(found, spans, strict=True):
        tops.append(Tops.of(row, own, y + TITLE))
        y = tops[-1].bottom + BETWEEN
    last = max((stop for own in spans for _, stop in own), default=0)
    sheet = Sheet(max(LEFT + UNIT * last + 12, NARROWEST), y)
    sheet.items.append(Words(12, 24, title, 15, bold=True))
    for row, own, top in zip(found, spans, tops, strict=True):
        sheet.items.append(Words(12, top.top - 7, row.words, 13, bold=True))
        sheet.items += [Words(12, at + HEIGHT / 2 + 5, str(lane), 13) for lane, at in top.lanes.items()]
        sheet.items += _waits(row, own, top)
    sheet.items += _messages(found, spans, tops, mesh)
    for row, own, top in zip(found, spans, tops, strict=True):
        placed = list(zip(row.program.instructions, own, top.each, strict=True))
        tips = [f"{one}: {OP_INFO[one.op].does}" for one, _, _ in placed]
        sheet.items += [
            Rectangle(*_place(span, at), HEIGHT, _colour(one.op), tip=tip)
            for (one, span, at), tip in zip(placed, tips, strict=True)
        ]
        sheet.items += [words for one, span, at in placed for words in _labels(one, span, at)]
    sheet.height = _legend(sheet, found, units, y + 4) + 10
    return sheet


@dataclass(frozen=True)
class Tops:
    """The y of a row's lanes, and of each of its instructions; the row lies between ``top`` and ``bottom``."""

    top: float
    bottom: float
    lanes: dict[Lane, float]
    each: list[float]

    @staticmethod
    def of(row: Row, spans: Spans, top: float) -> Tops:
        own, lanes, y = tracks(row.program, spans), dict[Lane, float](), top
        for lane in row.lanes:
            lanes[lane] = y
            used = {track for one, track in zip(row.program.instructions, own, strict=True) if one.lane is lane}
            y += len(used) * (HEIGHT + 2) + GAP - 2
        each = [lanes[one.lane] + t * (HEIGHT + 2) for one, t in zip(row.program.instructions, own, strict=True)]
        return Tops(top, y, lanes, each)


def _place(span: Span, y: float) -> tuple[float, float, float]:
    return LEFT + UNIT * span[0], y, UNIT * (span[1] - span[0]) - 1.5


def _colour(op: Op) -> str:
    return look(kind_of(op)).colour


def _labels(one: Instruction, span: Span, y: float) -> Iterable[Words]:
    x, y, width = _place(span, y)
    middle, colour = x + width / 2, ink(_colour(one.op))
    label = f"u{one.unit}" if one.unit >= 0 else f"b{one.bucket}" if one.bucket >= 0 else ""
    if not label and one.op is Op.REDUCE:
        label = one.writes[0].kind  # the loss, or the norms
    second = f"m{one.microbatch}" if one.microbatch >= 0 else ""
    if label:
        yield Words(middle, y + (15 if second else 21), label, 11, colour, "middle")
    if second:
        yield Words(middle, y + (28 if label else 21), second, 10.5, colour, "middle")


def _waits(row: Row, spans: Spans, top: Tops) -> Iterator[Line]:
    """Yield a line for each wait, from what is waited for to what waits."""
    for at, one in enumerate(row.program.instructions):
        for wait in one.waits:
            down = top.each[at] > top.each[wait]
            y1 = top.each[wait] + (HEIGHT if down else 0)
            y2 = top.each[at] + (0 if down else HEIGHT)
            yield Line(LEFT + UNIT * spans[wait][1] - 4, y1, LEFT + UNIT * spans[at][0] + 4, y2, WAIT, 1.2)


def _messages(found: Sequence[Row], spans: Sequence[Spans], tops: Sequence[Tops], mesh: Mesh) -> Iterator[Line]:
    """Yield a line from each SEND to its RECEIVE."""
    home = _homes(found, mesh)
    sent: dict[Meeting, tuple[float, float]] = {}
    for op in (Op.SEND, Op.RECEIVE):
        for at, row in enumerate(found):
            keys = _meetings(row, at, home, mesh)
            for one, span, top, key in zip(row.program.instructions, spans[at], tops[at].each, keys, strict=True):
                x, y, width = _place(span, top)
                if op is one.op is Op.SEND and key is not None:
                    sent[key] = (x + width - 3, y)
                elif op is one.op is Op.RECEIVE and key in sent:
                    x1, y1 = sent[key]
                    down = y > y1
                    yield Line(x1, y1 + (HEIGHT if down else 0), x + 3, y + (0 if down else HEIGHT), MESSAGE, 1.0)


# ---- the legend ------------------------------------------------------------------------------------------------------


def _legend(sheet: Sheet, found: Sequence[Row], units: Sequence[str], y: float) -> float:
    """Say what colours, letters and lines mean, and return the y at which that ends."""
    instructions = [one for row in found for one in row.program.instructions]
    x = 12.0
    for op in dict.fromkeys(one.op for one in instructions):
        width = 12 + 5 + width_of(str(op), 11) + 16
        if x > 12 and x + width > sheet.width:
            x, y = 12.0, y + 20
        sheet.items.append(Rectangle(x, y, 12, 12, _colour(op)))
        sheet.items.append(Words(x + 17, y + 10.5, str(op), 11))
        x += width
    y += 14
    for text in _explained(instructions, units):
        for line in _wrapped(text, sheet.width - 24, 12):
            y += 18
            sheet.items.append(Words(12, y, line, 12, GREY))
    return y


def _explained(instructions: Sequence[Instruction], units: Sequence[str]) -> Iterator[str]:
    """Yield what letters and lines mean, of those that there are."""
    if any(one.unit >= 0 for one in instructions):
        named = [f"u{at} {name}" for at, name in enumerate(units)]
        shown = named if len(named) <= MOST_UNITS else [*named[: MOST_UNITS - 2], "...", named[-1]]
        yield "u: a unit, a part of the model that is run as a whole" + (f" ({', '.join(shown)})" if shown else "")
    letters = []
    if any(one.microbatch >= 0 for one in instructions):
        letters.append("m: a microbatch, some of the step's rows")
    if any(one.bucket >= 0 for one in instructions):
        letters.append("b: a bucket, some of the parameters, or their gradients, in one buffer")
    if letters:
        yield "; ".join(letters)
    if any(one.op is Op.REDUCE and one.bucket < 0 for one in instructions):
        yield "loss, norm: what a REDUCE sums over ranks beside gradients"
    lines = ["A grey line leads to an instruction that waits for another lane"]
    if any(one.op is Op.SEND for one in instructions):
        lines.append("a brown one from a SEND to its RECEIVE")
    yield f"{', '.join(lines)}. Widths are not measured times: a BACKWARD is drawn twice as long as anything else."


def _wrapped(text: str, width: float, size: float) -> list[str]:
    """Return a text in lines that are at most ``width`` pixels wide."""
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], joined] if width_of(joined, size) <= width or not lines[-1] else [*lines, word]
    return lines
