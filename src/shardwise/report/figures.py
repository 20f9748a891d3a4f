"""Figures of matplotlib are written into files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.core.errors import ConfigError

from .files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def save(make: Callable[[], Figure], out: Path, option: str) -> None:
    """Write the figure that ``make`` makes into ``out``, which ``option`` named; raise ConfigError on failure."""
    check_format(out, option)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError(f"plot: {error}; legal: pip install matplotlib") from None
    figure = make()
    FigureCanvasAgg(figure)
    with writing(out, option):
        figure.savefig(out, dpi=150)


def check_format(out: Path, option: str) -> None:
    """Raise :class:`ConfigError` unless pictures can be written in the format that the file's name says."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"{option} {out}: {out.suffix or 'no ending'} is not legal; legal: {', '.join(FORMATS)}")
