"""A timetable is shown in a terminal: a line for each rank, microbatches as numbers, kinds as colours or as letters."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from .kinds import look
from .timetable import COMPUTE, Drawing, TimeBox, milliseconds
from .timetable_picture import kinds

GOLDEN = 0.618034  # its multiples, modulo 1, are spread evenly


def chart(drawings: Sequence[Drawing], width: int, colours: bool) -> Text:
    """Return the steps from left to right on a common axis, one below the other, in lines of at most ``width`` columns.

    A column shows what is computed in its middle; if boxes are narrower than columns, at places that change from column
    to column, so that each kind gets its share of them.  With ``colours`` a box holds its microbatch's number, without
    them a letter for its kind (small for the later stages of a rank) and the number after it, if there is room; blanks
    are idle.
    """
    left = max(len(_name(drawing.ranks - 1)) for drawing in drawings)
    right = max(len(words) for drawing in drawings for words in ("", *drawing.memory_words))
    columns, seconds = max(width - left - right - 4, 10), max(drawing.end for drawing in drawings)
    return Text("\n\n").join(_chart(drawing, colours, (left, columns, right), seconds) for drawing in drawings)


def _name(rank: int) -> str:
    return f"rank {rank}"


def _chart(drawing: Drawing, colours: bool, widths: tuple[int, int, int], whole: float) -> Text:
    left, columns, right = widths
    memory = drawing.memory_words or [""] * drawing.ranks
    text = Text()
    text.append(drawing.title, "bold")
    for line in drawing.notes:
        text.append(f"\n{line}")
    room = left + columns + right + 4 - len(drawing.summary)
    text.append(f"\n{drawing.summary}{drawing.memory_title:>{max(0, room)}}".rstrip())
    chunks, rows = drawing.chunks(), drawing.rows()
    for rank in range(drawing.ranks):
        text.append(f"\n{_name(rank):>{left}} |")
        stages, row = chunks.get(rank, {}), rows.get((rank, COMPUTE), [])
        for box, length in _spans(row, columns, whole):
            if box is None:
                text.append(" " * length)
                continue
            letter = look(box.kind).letter.lower() if stages.get(box.stage, 0) else look(box.kind).letter
            wide = box.microbatch >= 0 and box.stop - box.start > 0.99 * whole / columns
            number = str(box.microbatch) if wide else ""
            if colours:
                shown = letter if box.microbatch < 0 else number
                text.append(f"{shown if len(shown) <= length else '':<{length}}", _style(box, stages))
            else:
                text.append(f"{letter + number if len(letter + number) <= length else letter:-<{length}}")
        text.append(f"| {memory[rank]:>{right}}".rstrip())
    end = milliseconds(whole)
    text.append(f"\n{'':>{left}} 0{end:>{columns}}\n")
    text.append_text(_legend(drawing, colours))
    return text


def _spans(row: list[TimeBox], columns: int, seconds: float) -> Iterator[tuple[TimeBox | None, int]]:
    """Yield the boxes of a row in order, None while it is idle, each with the number of its columns."""
    starts = [box.start for box in row]
    narrow = bool(row) and statistics.median(b.stop - b.start for b in row) * columns < seconds

    def shown(column: int) -> TimeBox | None:
        place = (column + ((column * GOLDEN) % 1 if narrow else 0.5)) * seconds / columns
        at = bisect_right(starts, place) - 1
        return row[at] if at >= 0 and place < row[at].stop else None

    for _, same in groupby(map(shown, range(columns)), key=id):
        boxes = list(same)
        yield boxes[0], len(boxes)


def _style(box: TimeBox, chunks: dict[int, int]) -> str:
    ink, _, ground = look(box.kind).style.partition(" on ")
    later = chunks.get(box.stage, 0) > 0 and not ground.startswith("bright_")
    words = f"black on bright_{ground}" if later else f"{ink} on {ground}"
    return f"underline {words}" if box.critical else words


def _legend(drawing: Drawing, colours: bool) -> Text:
    several = any(len(one) > 1 for one in drawing.chunks().values())
    parts: list[Text] = []
    for kind in kinds([drawing], COMPUTE):
        one = look(kind)
        if colours:
            parts.append(Text.assemble((f" {one.letter} ", one.style), f" {one.words}"))
        else:
            parts.append(Text(f"{one.letter} {one.words}"))
    if several:
        parts.append(Text("bright: later stages of a rank" if colours else "small letters: later stages of a rank"))
    if colours and any(box.critical for box in drawing.boxes):
        parts.append(Text.assemble((" 0 ", "underline"), " critical path"))
    return Text("  ").join(parts)
