"""Tables and numbers are printed for people, and as JSON for programs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 80  # the columns if there is no terminal


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that colours only what it is told to, and is 80 columns wide if there is no terminal."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDTH)


def pairs(title: str, rows: Mapping[str, Any]) -> RenderableType:
    """Return a table of two columns, names and values; rows whose value is None are left out."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, value if isinstance(value, Text) else Text(str(value)))
    return _titled(title, table)


def grid(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, totals: Sequence[Any] | None = None
) -> RenderableType:
    """Return a table with columns, to the right if their name begins with ``>``, and ``totals`` as a last row, set
    apart."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, show_footer=totals is not None)
    for index, name in enumerate(columns):
        footer = str(totals[index]) if totals is not None else ""
        table.add_column(
            name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold", footer=footer
        )
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return _titled(title, table)


def folded(text: str, at: str, width: int) -> str:
    """Return ``text`` in lines of at most ``width`` characters, broken at the pattern ``at`` as far as possible."""
    lines = [""]
    for piece in re.split(at, text):
        lines = [*lines, piece] if lines[-1] and len(lines[-1] + piece) > width else [*lines[:-1], lines[-1] + piece]
    return "\n".join(lines)


def _titled(title: str, table: Table) -> RenderableType:
    """Put a title above a table, as a table's own title is no wider than the table."""
    return Group(Text(title, style="bold"), table, Text())


def show(console: Console, *parts: RenderableType) -> None:
    """Print parts one after the other."""
    for part in parts:
        console.print(part)


def print_json(values: Any) -> None:
    """Print a value as JSON on standard output; infinities and NaN, which JSON lacks, become text."""
    print(json.dumps(_finite(values), indent=2, allow_nan=False), flush=True)


def _finite(values: Any) -> Any:
    if isinstance(values, float) and not math.isfinite(values):
        return str(values)
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    return [_finite(value) for value in values] if isinstance(values, list | tuple) else values


def count(number: float) -> str:
    """Return a large number with a thousands' unit and three or four digits, such as ``963.8 K``."""
    return _scaled(number, 1000, ("", "K", "M", "G", "T", "P")).rstrip()


def flops(rate: float) -> str:
    """Return a number of FLOP/s with its unit, such as ``41.5 GFLOP/s``."""
    return f"{_scaled(rate, 1000, ('', 'K', 'M', 'G', 'T', 'P', 'E'))}FLOP/s"


def plural(number: int, word: str) -> str:
    """Return a number and its word, such as ``1 rank``, ``2 ranks`` or ``3 microbatches``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('h') else 's'}"


def size(nbytes: float) -> str:
    """Return a number of bytes with its unit, such as ``3.7 MiB``."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    """Return a number in the first of the units, each ``step`` of the one before, in which fewer than ``step`` are
    written."""
    for index, unit in enumerate(units):
        text = f"{number / step**index:.{min(index, 1)}f}"
        if abs(float(text)) < step or unit == units[-1]:
            break
    return f"{text} {unit}"


def duration(seconds: float) -> str:
    """Return seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def decimal(value: float | None) -> str:
    """Return a loss with four decimals, or words if it is None, which stands for one that is not finite."""
    return "not finite" if value is None else f"{value:.4f}"
