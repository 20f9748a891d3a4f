"""Timetables are drawn with a row for each rank and time from left to right, one above the other on one axis."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .kinds import ink, lighter, look
from .sheet import Line, Rectangle, Sheet, Words, width_of
from .timetable import COMPUTE, Drawing, TimeBox, milliseconds

LEFT, RIGHT = 74, 104  # pixels beside the rows
NARROWEST, WIDEST = 760, 1800  # pixels of the rows
ROOMY = 22  # the pixels of the median box, unless the rows would be too wide
STRIP = 7  # the height of a lane that does not compute
IDLE, CRITICAL, GREY = "#eeeeee", "#b00000", "#555555"
SMALLEST = 6.5  # the pixels of the smallest number that can be read
SHADE = 0.5  # how much white the last of a rank's stages has, at most
STEP_OF_SHADE = 0.3  # how much more white each later stage has, at most


@dataclass(frozen=True)
class _Scale:
    """The axis that all drawings share: the pixels of a time."""

    seconds: float
    width: float
    row: float

    def x(self, time: float) -> float:
        return LEFT + (time / self.seconds if self.seconds else 0.0) * self.width


def picture(drawings: Sequence[Drawing]) -> Sheet:
    """Return the drawings one above the other, with the axis of time below the last."""
    lengths = [
        b.stop - b.start
        for d in drawings
        for b in d.boxes
        if b.lane == COMPUTE and b.stop > b.start and b.microbatch >= 0
    ]
    seconds = max(drawing.end for drawing in drawings)
    wanted = ROOMY * seconds / statistics.median(lengths) if lengths else 0
    ranks = sum(drawing.ranks for drawing in drawings)
    scale = _Scale(seconds, min(max(wanted, NARROWEST), WIDEST), min(max(440 / ranks, 9), 28))
    sheet = Sheet(LEFT + scale.width + RIGHT, 0)
    y = 8.0
    for drawing in drawings:
        y = _draw(sheet, drawing, scale, y) + 14
    y = _axis(sheet, scale, y - 8)
    sheet.height = _legend(sheet, drawings, y + 22) + 12
    return sheet


def _draw(sheet: Sheet, drawing: Drawing, scale: _Scale, y: float) -> float:
    """Draw a title and the rows below it, and return the y at which they end."""
    sheet.items.append(Words(12, y + 17, drawing.title, 15, bold=True))
    sheet.items.append(Words(12, y + 35, "; ".join([drawing.summary, *drawing.notes]), 12, GREY))
    end = LEFT + scale.width
    if drawing.memory is not None:
        sheet.items.append(Words(end + 10, y + 35, drawing.memory_title, 11, GREY))
    y += 44
    digits = max((len(str(box.microbatch)) for box in drawing.boxes), default=1)
    chunks, rows = drawing.chunks(), drawing.rows()
    for rank, lanes in enumerate(drawing.lanes()):
        middle = y + scale.row / 2 + 4
        sheet.items.append(Words(LEFT - 8, middle, f"rank {rank}", min(12, scale.row + 2), anchor="end"))
        if drawing.memory is not None:
            sheet.items.append(Words(end + 10, middle, drawing.memory_words[rank], min(12, scale.row + 2)))
        for lane in lanes:
            height = scale.row if lane == COMPUTE else STRIP
            sheet.items.append(Rectangle(LEFT, y, scale.x(drawing.end) - LEFT, height, IDLE))
            row = rows.get((rank, lane), [])
            sheet.items += _boxes(row, chunks.get(rank, {}), scale, y, height)
            if lane == COMPUTE:
                sheet.items += _numbers(row, chunks.get(rank, {}), scale, y, digits)
            y += height + (1 if lane != lanes[-1] else max(2, scale.row / 6))
    return y


def fill(box: TimeBox, chunks: dict[int, int]) -> str:
    """Return the colour of a box: the later its stage among those of its rank, the lighter."""
    shade = min(STEP_OF_SHADE, SHADE / max(1, len(chunks) - 1))
    return lighter(look(box.kind).colour, shade * chunks.get(box.stage, 0))


def _boxes(
    row: Sequence[TimeBox], chunks: dict[int, int], scale: _Scale, y: float, height: float
) -> Iterable[Rectangle]:
    """Yield the boxes of a row: white lines part those that are wide enough, and an outline lies inside its box."""
    for box in row:
        x, width = scale.x(box.start), scale.x(box.stop) - scale.x(box.start)
        tip = f"{box.title}, rank {box.rank}: {milliseconds(box.start)} to {milliseconds(box.stop)}"
        if box.critical:
            line = min(1.6, width / 3)
            yield Rectangle(
                x + line / 2, y + line / 2, width - line, height - line, fill(box, chunks), CRITICAL, line, tip
            )
        else:
            line = min(0.8, width / 8)
            yield Rectangle(x + line / 2, y, width - line, height, fill(box, chunks), tip=tip)


def _numbers(row: Sequence[TimeBox], chunks: dict[int, int], scale: _Scale, y: float, digits: int) -> Iterable[Words]:
    """Yield the numbers of microbatches, in boxes with room for ``digits`` digits, and the words of other boxes."""
    for box in row:
        text = str(box.microbatch) if box.microbatch >= 0 else look(box.kind).words
        room = (scale.x(box.stop) - scale.x(box.start) - 2) / width_of("0" * max(digits, len(text)), 1)
        size = min(11, 0.62 * scale.row, room)
        if size >= SMALLEST:
            middle = scale.x((box.start + box.stop) / 2)
            yield Words(middle, y + scale.row / 2 + 0.36 * size, text, round(size, 1), ink(fill(box, chunks)), "middle")


def _axis(sheet: Sheet, scale: _Scale, y: float) -> float:
    """Draw milliseconds, at round numbers that leave room for each other, and return the y at which they end."""
    last = scale.seconds * 1e3
    sheet.items.append(Line(LEFT, y, LEFT + scale.width, y, GREY))
    step = round_step(last / max(1, scale.width / 90))
    for tick in range(math.floor(last / step * (1 + 1e-9)) + 1 if step else 1):
        x = scale.x(tick * step / 1e3)
        sheet.items.append(Line(x, y, x, y + 4, GREY))
        sheet.items.append(Words(x, y + 17, f"{tick * step:,g}", 11, GREY, "middle"))
    sheet.items.append(Words(LEFT + scale.width + 10, y + 17, "ms", 11, GREY))
    return y + 17


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... times a power of ten that is at least ``least``."""
    if least <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9))


def _legend(sheet: Sheet, drawings: Sequence[Drawing], y: float) -> float:
    """Draw the kinds that there are, each in the shades of a rank's stages, and return the y at which they end."""
    shades: dict[str, set[str]] = defaultdict(set)
    for drawing in drawings:
        chunks = drawing.chunks()
        for box in drawing.boxes:
            shades[box.kind].add(fill(box, chunks.get(box.rank, {})))
    entries: list[tuple[list[str], str | None, str]] = [
        (sorted(shades[kind]), None, look(kind).words) for kind in kinds(drawings)
    ]
    entries.append(([IDLE], None, "idle"))
    if any(box.critical for d in drawings for box in d.boxes):
        entries.append((["white"], CRITICAL, "critical path"))
    x = float(LEFT)
    for colours, line, words in entries:
        width = 13 * len(colours) + 5 + width_of(words, 12) + 14
        if x > LEFT and x + width > LEFT + sheet.width - RIGHT:
            x, y = float(LEFT), y + 20
        for at, colour in enumerate(colours):
            sheet.items.append(Rectangle(x + 13 * at, y, 12, 12, colour, line, 1.6 if line else 0))
        sheet.items.append(Words(x + 13 * len(colours) + 5, y + 10.5, words, 12))
        x += width
    if any(len(colours) > 1 for colours in shades.values()):
        sheet.items.append(Words(LEFT, y + 30, "lighter: the later stages of a rank", 11, GREY))
        y += 20
    return y + 12


def kinds(drawings: Sequence[Drawing], lane: str | None = None) -> list[str]:
    """Return the kinds of all boxes, or of those in a lane, forward and backward first."""
    there = {box.kind for drawing in drawings for box in drawing.boxes if lane in (None, box.lane)}
    known = list(dict.fromkeys([*"FBIW", *sorted(there)]))
    return [kind for kind in known if kind in there]
