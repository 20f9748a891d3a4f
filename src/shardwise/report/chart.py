"""A panel of curves, and the memory of a step, as SVG inside a page: they can be read without any script, and have what
a script needs to tell the values under the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

import numpy as np

from .memory import COLOURS as OF_CATEGORY
from .memory import MemoryProfile, columns, present, unit
from .panels import COLOURS, FEW, Curve, Panel, smooth
from .runs import Floats
from .tables import count
from .timetable_picture import round_step

WIDTH, HEIGHT = 420, 240  # pixels, of which a page may show more or fewer
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 34  # pixels around the curves
DRAWN = 800  # points of a curve that is not smoothed
STACKED = 300  # columns of the memory of a step
GREY, GRID, MARK = "#555555", "#e4e4e4", "#b3261e"
POINT_COLOUR = COLOURS[1]


@dataclass(frozen=True)
class _Axis:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``stop``."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value; one out of range is at the edge."""
        low, high, value = (map(math.log, (self.low, self.high, max(value, 1e-300)))) if self.log else (
            self.low, self.high, value
        )  # fmt: skip
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start)

    def ticks(self, most: int) -> list[float]:
        """Return at most about ``most`` round values that lie on the axis."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            fine = [10.0**p * n for p in powers for n in (1, 2, 5)]
            found = [v for v in fine if self.low <= v <= self.high]
            return found if len(found) <= most else found[:: -(-len(found) // most)]
        step = round_step((self.high - self.low) / most) or 1.0
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def run_charts(found: Sequence[Panel], over: str, marks: Sequence[float] = ()) -> list[str]:
    """Return the panels of a single run as SVG, all over the same range; ``over`` is the label of that axis, on which
    ``marks`` are marked by dashed lines."""
    places = [curve.places[np.isfinite(curve.values)] for panel in found for curve in panel.curves]
    everything = np.concatenate([np.zeros(0), *places])
    ends = (float(everything.min()), float(everything.max())) if len(everything) else (0.0, 1.0)
    across = _Axis(*ends, LEFT + 6, WIDTH - RIGHT - 6)
    return [_panel_chart(panel, over, across, [one for one in marks if ends[0] <= one <= ends[1]]) for panel in found]


def _panel_chart(panel: Panel, over: str, across: _Axis, marks: Sequence[float]) -> str:
    svg = _canvas(panel.title)
    known = [curve for curve in panel.curves if curve.known]
    if not known:
        _text(svg, WIDTH / 2, HEIGHT / 2, "no data", anchor="middle", fill=GREY)
        return _written(svg)
    limits = panel.scale
    up = _Axis(limits.low, limits.high, HEIGHT - BOTTOM, TOP, limits.log)
    _frame(svg, across, up, over)
    for mark in marks:
        _line(svg, across.at(mark), TOP, across.at(mark), HEIGHT - BOTTOM, MARK, dash="5 4")
    series = []
    for curve in known:
        _curve(svg, curve, panel.smoothed and curve.look == "curve" and curve.known > FEW, across, up)
        series.append({"name": curve.words, "points": _hovered(curve, across, up)})
    hidden = [(float(v), float(p)) for c in known for v, p in zip(c.values, c.places, strict=True) if v > limits.high]
    if hidden:
        highest, place = max(hidden)
        words = f"▲ {tick(highest)} at {tick(place)}"
        _text(svg, WIDTH - RIGHT, TOP - 14, words, anchor="end", fill=GREY, size=10.5)
    else:
        _legend(svg, panel, known)
    svg.set("data-chart", json.dumps({"over": over, "series": series}))
    first, last = (known[0].values[np.isfinite(known[0].values)][at] for at in (0, -1))
    svg.set("aria-label", f"{panel.title}: {tick(float(first))} at first, {tick(float(last))} at last")
    return _written(svg)


def _canvas(title: str, width: int = WIDTH) -> ET.Element:
    look = {"class": "chart", "viewBox": f"0 0 {width} {HEIGHT}", "role": "img", "aria-label": title}
    svg = ET.Element("svg", look)
    _text(svg, 4, 16, title, weight="bold", size=13)
    return svg


def _written(svg: ET.Element) -> str:
    return ET.tostring(svg, encoding="unicode")


def _text(
    svg: ET.Element, x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#1a1a1a", size: float = 11.5,
    weight: str = "normal",
) -> None:  # fmt: skip
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "fill": fill, "font-size": f"{size:g}"}
    ET.SubElement(svg, "text", place | {"font-weight": weight}).text = text


def _line(svg: ET.Element, x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "none") -> None:
    ends = zip(("x1", "y1", "x2", "y2"), (x1, y1, x2, y2), strict=True)
    look = {"stroke": colour, "stroke-dasharray": dash}
    ET.SubElement(svg, "line", {name: f"{at:.1f}" for name, at in ends} | look)


def _frame(svg: ET.Element, across: _Axis, up: _Axis, over: str, width: int = WIDTH) -> None:
    """Draw the grid, the axes and their numbers."""
    for value in up.ticks(5):
        y = up.at(value)
        _line(svg, LEFT, y, width - RIGHT, y, GRID)
        _text(svg, LEFT - 6, y + 4, tick(value), anchor="end")
    for value in across.ticks(6 if width == WIDTH else 12):
        x = across.at(value)
        _line(svg, x, up.start, x, up.start + 4, GREY)
        _text(svg, x, up.start + 16, tick(value), anchor="middle")
    _line(svg, LEFT, up.start, width - RIGHT, up.start, GREY)
    _text(svg, (LEFT + width - RIGHT) / 2, HEIGHT - 4, over, anchor="middle", fill=GREY)


def tick(value: float) -> str:
    """Return a number for an axis: a few digits, thousands parted, millions as ``1.5 M``."""
    return (
        count(value).replace(".0 ", " ")
        if abs(value) >= 1e6
        else f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.4g}"
    )


def _curve(svg: ET.Element, curve: Curve, smoothed: bool, across: _Axis, up: _Axis) -> None:
    colour = COLOURS[0] if curve.look == "curve" else POINT_COLOUR
    pixels = _path(*thinned(curve.places, curve.values, DRAWN), across, up)
    look = {"d": pixels, "fill": "none", "stroke": colour, "stroke-linejoin": "round"}
    if curve.look == "curve" and smoothed:
        ET.SubElement(svg, "path", look | {"stroke-width": "0.7", "opacity": "0.35"})
        pixels = _path(*smooth(curve.places, curve.values), across, up)
        ET.SubElement(svg, "path", look | {"d": pixels, "stroke-width": "2"})
        return
    dash = {"curve": "none", "points": "1 3", "level": "6 4"}[curve.look]
    thick = {"curve": "2", "points": "1.2", "level": "1.5"}[curve.look]
    ET.SubElement(svg, "path", look | {"stroke-width": thick, "stroke-dasharray": dash})
    if curve.look == "points" or curve.known == 1:
        for place, value in zip(curve.places, curve.values, strict=True):
            if math.isfinite(value):
                x, y = across.at(place), up.at(value)
                corners = f"{x:.1f},{y - 5:.1f} {x + 5:.1f},{y:.1f} {x:.1f},{y + 5:.1f} {x - 5:.1f},{y:.1f}"
                face = {"points": corners, "fill": "white", "stroke": colour, "stroke-width": "1.8"}
                ET.SubElement(svg, "polygon", face)


def _path(places: Floats, values: Floats, across: _Axis, up: _Axis) -> str:
    """Return the commands of a path; a value that is not finite leaves a gap."""
    words, pen = [], "M"
    for place, value in zip(places, values, strict=True):
        if math.isfinite(value):
            words.append(f"{pen}{across.at(place):.1f} {up.at(value):.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(words)


def thinned(places: Floats, values: Floats, most: int) -> tuple[Floats, Floats]:
    """Return about ``most`` points at most: of values that would share a pixel, the least and the greatest."""
    if len(values) <= most:
        return places, values
    kept: list[int] = []
    for chunk in np.array_split(np.arange(len(values)), most // 2):
        known = chunk[np.isfinite(values[chunk])]
        if len(known):
            kept += sorted({int(known[values[known].argmin()]), int(known[values[known].argmax()])})
        else:
            kept.append(int(chunk[0]))  # a gap stays one
    return places[kept], values[kept]


def _hovered(curve: Curve, across: _Axis, up: _Axis) -> list[list[float | str]]:
    """Return for each drawn point its pixels, and its place and value in words."""
    if curve.look == "level":
        return []
    places, values = thinned(curve.places, curve.values, DRAWN)
    return [
        [round(across.at(p), 1), round(up.at(v), 1), tick(p), f"{v:,.5g}"]
        for p, v in zip(places.tolist(), values.tolist(), strict=True)
        if math.isfinite(v)
    ]


def _legend(svg: ET.Element, panel: Panel, known: Sequence[Curve]) -> None:
    """Name what is drawn where that is more than one thing, to the right of the title."""
    if len(known) < 2:
        return
    x = float(WIDTH - RIGHT)
    for curve in reversed(known):
        colour = COLOURS[0] if curve.look == "curve" else POINT_COLOUR
        _text(svg, x, 16, curve.words, anchor="end", fill=colour, size=11.5, weight="bold")
        x -= 6.6 * len(curve.words) + 12


# ---- the memory of a step --------------------------------------------------------------------------------------------


def memory_chart(predicted: MemoryProfile, measured: MemoryProfile | None, limit: int) -> str:
    """Return the bytes of a rank over the instructions of a step: the prediction as a stack, what was measured as a
    line, and ``limit`` (bytes) where it is not far above."""
    width = 2 * WIDTH
    most = max(predicted.peak_bytes, measured.peak_bytes if measured is not None else 0)
    shown = limit < 1.6 * most
    name, size = unit(max(most, limit if shown else 0))
    svg = _canvas(f"Rank {predicted.rank}, tensors ({name})", width)
    number = len(predicted.peaks)
    across = _Axis(0, number, LEFT, width - RIGHT)
    up = _Axis(0, 1.12 * max(most, limit if shown else 0) / size, HEIGHT - BOTTOM, TOP)
    _frame(svg, across, up, "instruction of the step", width)
    found, _ = columns(predicted, min(STACKED, number))
    edges = np.linspace(0, number, len(found) + 1)
    below = np.zeros(len(found))
    for category in present(predicted):
        above = below + np.array([one.get(category, 0) / size for one in found])
        outline = [*_stairs(edges, above), *reversed(_stairs(edges, below))]
        points = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in outline)
        ET.SubElement(svg, "polygon", {"points": points, "fill": OF_CATEGORY[category]})
        below = above
    if measured is not None and measured.peaks:
        steps, _ = columns(measured, min(STACKED, len(measured.peaks)))
        line = _stairs(np.linspace(0, number, len(steps) + 1), np.array([sum(one.values()) / size for one in steps]))
        path = "M" + "L".join(f"{across.at(x):.1f} {up.at(y):.1f}" for x, y in line)
        ET.SubElement(svg, "path", {"d": path, "fill": "none", "stroke": "black", "stroke-width": "1.2"})
    if shown:
        y = up.at(limit / size)
        _line(svg, LEFT, y, width - RIGHT, y, "#a00000")
        _text(svg, width - RIGHT, y - 4, "budget", anchor="end", fill="#a00000")
    _categories(svg, present(predicted), measured is not None, width)
    return _written(svg)


def _stairs(edges: Floats, heights: Floats) -> list[tuple[float, float]]:
    return [
        corner
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True)
        for corner in ((left, height), (right, height))
    ]


def _categories(svg: ET.Element, names: Sequence[str], measured: bool, width: int) -> None:
    """Name the colours of categories to the right of the title."""
    entries = [*names, *(["measured"] if measured else [])]
    x = float(width - RIGHT - sum(6.6 * len(name) + 32 for name in entries))
    for name in entries:
        if name == "measured":
            _line(svg, x - 4, 12, x + 11, 12, "black")
        else:
            face = {"x": f"{x:.1f}", "y": "6", "width": "11", "height": "11", "fill": OF_CATEGORY[name]}
            ET.SubElement(svg, "rect", face)
        _text(svg, x + 16, 16, name)
        x += 6.6 * len(name) + 32
