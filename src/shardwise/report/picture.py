"""A program is drawn with its lanes from top to bottom, its instructions from left to right, and lines for waits."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.core.instruction import OP_INFO, Instruction, Lane, Op
from shardwise.core.program import Program

from .kinds import ink, kind_of, look
from .sheet import Line, Rectangle, Sheet, Words, width_of

UNIT, HEIGHT, GAP, LEFT = 17, 34, 22, 74
LEGEND = 18  # pixels from one line of the legend to the next
NARROWEST = 620  # pixels; the words below the picture need them
LETTERS = "u: unit of the model, in order   m: microbatch   b: bucket of parameters   line: the later one waits"


def place(program: Program) -> list[tuple[float, float]]:
    """Return (start, stop) of every instruction in units of width, each as early as its lane and its waits allow."""
    free: dict[Lane, float] = {}
    spans: list[tuple[float, float]] = []
    for one in program.instructions:
        issued = spans[-1][0] if spans else 0.0
        ready = [spans[at][1] for at in one.waits]
        start = max([free.get(one.lane, 0.0), issued if one.lane is not Lane.COMPUTE else 0.0, *ready])
        spans.append((start, start + (4 if one.op is Op.BACKWARD else 2)))  # a backward takes as long as two forwards
        free[one.lane] = spans[-1][1]
    return spans


def picture(program: Program, title: str = "") -> Sheet:
    """Return the picture of a program; a line joins two instructions if one waits for the other."""
    lanes = [lane for lane in Lane if any(one.lane is lane for one in program.instructions)]
    spans = place(program)
    top = {lane: 44 + i * (HEIGHT + GAP) for i, lane in enumerate(lanes)}
    width = max(LEFT + UNIT * max((stop for _, stop in spans), default=0) + 12, NARROWEST)
    bottom = 44 + len(lanes) * (HEIGHT + GAP)
    legend = list(_legend(program, width, bottom))
    sheet = Sheet(width, max(words.y for words in legend if isinstance(words, Words)) + 12)
    sheet.items.append(Words(12, 24, title or program.name, 15, bold=True))
    sheet.items += [Words(12, top[lane] + HEIGHT / 2 + 5, str(lane), 13) for lane in lanes]
    for at, one in enumerate(program.instructions):
        sheet.items += _lines(one, at, spans, top, program)
    for one, span in zip(program.instructions, spans, strict=True):
        sheet.items.append(Rectangle(*_place(span, top[one.lane]), HEIGHT, _colour(one.op), tip=str(one)))
    for one, span in zip(program.instructions, spans, strict=True):
        sheet.items += _labels(one, span, top[one.lane])
    sheet.items += legend
    return sheet


def _place(span: tuple[float, float], y: float) -> tuple[float, float, float]:
    return LEFT + UNIT * span[0], y, UNIT * (span[1] - span[0]) - 1.5


def _colour(op: Op) -> str:
    return look(kind_of(op)).colour


def _labels(one: Instruction, span: tuple[float, float], y: float) -> Iterable[Words]:
    x, y, width = _place(span, y)
    middle, colour = x + width / 2, ink(_colour(one.op))
    label = f"u{one.unit}" if one.unit >= 0 else f"b{one.bucket}" if one.bucket >= 0 else ""
    if not label and one.op is Op.REDUCE:
        label = one.writes[0].kind  # the loss, or the norms
    if label:
        yield Words(middle, y + 15, label, 11, colour, "middle")
    if one.microbatch >= 0:
        yield Words(middle, y + 28, f"m{one.microbatch}", 10, colour, "middle")


def _lines(
    one: Instruction, at: int, spans: list[tuple[float, float]], top: dict[Lane, int], program: Program
) -> Iterable[Line]:
    for wait in one.waits:
        source = program.instructions[wait]
        down = top[one.lane] > top[source.lane]
        y1 = top[source.lane] + (HEIGHT if down else 0)
        y2 = top[one.lane] + (0 if down else HEIGHT)
        yield Line(LEFT + UNIT * spans[wait][1] - 4, y1, LEFT + UNIT * spans[at][0] + 4, y2, "#777777", 1.2)


def _legend(program: Program, width: float, y: float) -> Iterable[Rectangle | Words]:
    """Yield what the colours mean, in as many lines as they need, and what the letters mean."""
    x = float(LEFT)
    for op in dict.fromkeys(one.op for one in program.instructions):
        words = f"{op}: {OP_INFO[op].does}"
        if x > LEFT and x + 16 + width_of(words, 11) > width:
            x, y = float(LEFT), y + LEGEND
        yield Rectangle(x, y + 2, 12, 12, _colour(op))
        yield Words(x + 16, y + 12, words, 11)
        x += 16 + width_of(words, 11) + 10
    yield Words(LEFT, y + LEGEND + 12, LETTERS, 11)
