"""A timetable in a terminal: a line for each rank, microbatches as numbers, kinds as colours or, where there are none, as letters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from rich.text import Text

from .kinds import look
from .timetable import COMPUTE, Box, Drawing, milliseconds
from .timetable_picture import kinds


def chart(drawing: Drawing, width: int, colours: bool, seconds: float | None = None) -> Text:
    """The step from left to right in lines of at most ``width`` columns, ``seconds`` (by default all of it) being the whole width.

    A column shows what is computed in its middle.  With ``colours`` a box holds its microbatch's number, without a letter for its kind
    (small for the later stages of a rank) and the number after it, where there is room; blanks are idle.
    """
    memory = drawing.memory_words or [""] * drawing.ranks
    names = [f"rank {rank}" for rank in range(drawing.ranks)]
    left, right = max(map(len, names)), max(map(len, memory))
    columns = max(width - left - right - 4, 10)
    whole = seconds if seconds is not None else drawing.end
    text = Text()
    text.append(drawing.title, "bold")
    for line in drawing.notes:
        text.append(f"\n{line}")
    text.append(f"\n{drawing.summary}{drawing.memory_title:>{max(0, width - len(drawing.summary))}}".rstrip())
    chunks, rows = drawing.chunks(), drawing.rows()
    for rank in range(drawing.ranks):
        text.append(f"\n{names[rank]:>{left}} |")
        for box, length in _spans(rows.get((rank, COMPUTE), []), columns, whole):
            if box is None:
                text.append(" " * length)
            elif colours:
                text.append(_number(box, length), _style(box, chunks.get(rank, {})))
            else:
                text.append(_letters(box, length, chunks.get(rank, {})))
        text.append(f"| {memory[rank]:>{right}}".rstrip())
    end = milliseconds(whole)
    text.append(f"\n{'':>{left}} 0{end:>{columns}}\n")
    text.append_text(_legend(drawing, colours))
    return text


def _spans(row: list[Box], columns: int, seconds: float) -> Iterator[tuple[Box | None, int]]:
    """What follows what in a row: a box, or None where it is idle, and over how many columns."""
    starts = [box.start for box in row]
    before: tuple[Box | None, int] | None = None
    for column in range(columns):
        middle = (column + 0.5) * seconds / columns
        at = bisect_right(starts, middle) - 1
        box = row[at] if at >= 0 and middle < row[at].stop else None
        if before is not None and before[0] is box:
            before = box, before[1] + 1
        else:
            if before is not None:
                yield before
            before = box, 1
    if before is not None:
        yield before


def _number(box: Box, length: int) -> str:
    text = str(box.microbatch) if box.microbatch >= 0 else look(box.kind).letter
    return f"{text if len(text) <= length else '':<{length}}"


def _style(box: Box, chunks: dict[int, int]) -> str:
    ink, _, ground = look(box.kind).style.partition(" on ")
    later = chunks.get(box.stage, 0) > 0 and not ground.startswith("bright_")
    words = f"black on bright_{ground}" if later else f"{ink} on {ground}"
    return f"underline {words}" if box.critical else words


def _letters(box: Box, length: int, chunks: dict[int, int]) -> str:
    letter = look(box.kind).letter
    letter = letter.lower() if chunks.get(box.stage, 0) else letter
    text = f"{letter}{box.microbatch}" if box.microbatch >= 0 else letter
    return f"{text if len(text) <= length else letter:-<{length}}"


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
