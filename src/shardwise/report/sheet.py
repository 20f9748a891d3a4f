"""A sheet has boxes, lines and words in pixels; it is written as SVG on its own, or as PNG or PDF with matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .figures import check_format, save
from .files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCH = 100  # the pixels of an inch
DIGIT = 0.62  # the width of a digit in the widest of the fonts, in font sizes
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle from (``x``, ``y``), its upper left corner; ``tip`` is what a browser says about it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    outline: str | None = None
    thickness: float = 0.0
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    thickness: float = 1.0


@dataclass(frozen=True, slots=True)
class Words:
    """Text whose baseline begins, ends or has its middle at (``x``, ``y``), as ``anchor`` says."""

    x: float
    y: float
    text: str
    size: float = 11
    colour: str = "black"
    anchor: Anchor = "start"
    bold: bool = False


@dataclass
class Sheet:
    """The items are drawn in order, each above those before it; y grows downwards."""

    width: float
    height: float
    items: list[Rectangle | Line | Words] = field(default_factory=list)

    def svg(self) -> str:
        """Return the sheet as SVG text."""
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica,Arial,sans-serif">'
        return (
            "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *map(_svg, self.items), "</svg>"])
            + "\n"
        )

    def write(self, out: Path, option: str) -> None:
        """Write the sheet into ``out``, which ``option`` named, in its name's format; raise ConfigError on failure."""
        check_format(out, option)
        if out.suffix.lower() != ".svg":
            save(self.figure, out, option)
            return
        with writing(out, option):
            out.write_text(self.svg(), encoding="utf-8")

    def figure(self) -> Figure:
        """Return the sheet as a figure of matplotlib, not yet on any canvas."""
        from matplotlib.collections import LineCollection, PolyCollection
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width / INCH, self.height / INCH))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        axes.set_axis_off()
        point = 72 / INCH
        for order, found in enumerate(self._runs()):
            if isinstance(found[0], Words):
                for one in found:
                    assert isinstance(one, Words)
                    ha: Literal["left", "center", "right"] = {"start": "left", "middle": "center", "end": "right"}[
                        one.anchor
                    ]  # type: ignore[assignment]
                    axes.text(
                        one.x, one.y, one.text, fontsize=one.size * point, color=one.colour, ha=ha, va="baseline",
                        zorder=order,
                        fontweight="bold" if one.bold else "normal", parse_math=False,
                    )  # fmt: skip
            elif isinstance(found[0], Rectangle):
                boxes = [b for b in found if isinstance(b, Rectangle)]
                corners = [
                    [(b.x, b.y), (b.x + b.width, b.y), (b.x + b.width, b.y + b.height), (b.x, b.y + b.height)]
                    for b in boxes
                ]
                axes.add_collection(PolyCollection(
                    corners, facecolors=[b.fill for b in boxes], edgecolors=[b.outline or "none" for b in boxes],
                    linewidths=[b.thickness * point for b in boxes], zorder=order,
                ))  # fmt: skip
            else:
                lines = [one for one in found if isinstance(one, Line)]
                axes.add_collection(LineCollection(
                    [[(one.x1, one.y1), (one.x2, one.y2)] for one in lines], colors=[one.colour for one in lines],
                    linewidths=[one.thickness * point for one in lines], zorder=order,
                ))  # fmt: skip
        return figure

    def _runs(self) -> Iterator[list[Rectangle | Line | Words]]:
        """Yield items of one kind that follow one another; drawing them together takes a hundredth of the time."""
        run: list[Rectangle | Line | Words] = []
        for item in self.items:
            if run and type(item) is not type(run[0]):
                yield run
                run = []
            run.append(item)
        if run:
            yield run


def _svg(item: Rectangle | Line | Words) -> str:
    if isinstance(item, Line):
        ends = f'x1="{item.x1:.1f}" y1="{item.y1:.1f}" x2="{item.x2:.1f}" y2="{item.y2:.1f}"'
        return f'<line {ends} stroke="{item.colour}" stroke-width="{item.thickness:g}"/>'
    if isinstance(item, Words):
        look = f' text-anchor="{item.anchor}"' if item.anchor != "start" else ""
        look += ' font-weight="bold"' if item.bold else ""
        place = f'x="{item.x:.1f}" y="{item.y:.1f}" font-size="{item.size:g}" fill="{item.colour}"'
        return f"<text {place}{look}>{escape(item.text)}</text>"
    look = f' stroke="{item.outline}" stroke-width="{item.thickness:g}"' if item.outline is not None else ""
    place = f'x="{item.x:.2f}" y="{item.y:.2f}" width="{item.width:.2f}" height="{item.height:.2f}" fill="{item.fill}"'
    return (
        f"<rect {place}{look}>{f'<title>{escape(item.tip)}</title>'}</rect>" if item.tip else f"<rect {place}{look}/>"
    )


def width_of(text: str, size: float) -> float:
    """Return the most pixels that a number, or a word of common letters, takes in a font of ``size`` pixels."""
    return DIGIT * size * len(text)
